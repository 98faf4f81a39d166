"""The query service as a retriever and a reader of LlamaIndex (docs/clients.md). It needs the extra ``llamaindex``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from penstock.client import (
    AsyncClient,
    Client,
    DocumentResponse,
    SearchFilters,
    SearchMode,
    SearchResponse,
    SearchResult,
)

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import (
        Document,
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
    )
except ModuleNotFoundError as error:
    raise ImportError("this needs LlamaIndex: pip install 'penstock[llamaindex]'", name=error.name) from error

__all__ = ["PenstockReader", "PenstockRetriever"]

FOR_MODELS = frozenset({"citation"})
"""The metadata that LlamaIndex puts before a text in a prompt or an embedding."""


class PenstockRetriever(BaseRetriever):
    """Retrieves the passages that the caller of the client may read.

    client serves ``retrieve``, and async_client ``aretrieve``; with client alone, ``aretrieve`` uses it in a thread.
    The other arguments are those of ``Client.search``. Each node has the ``chunk_id`` as its id, the document as its
    source, the passage's score, and ``SearchResult.metadata()`` as its metadata. Raises what the client raises.
    """

    def __init__(
        self,
        client: Client | None = None,
        async_client: AsyncClient | None = None,
        *,
        top: int = 10,
        mode: SearchMode = "hybrid",
        filters: SearchFilters | None = None,
        rerank: bool = True,
        **options: Any,
    ) -> None:
        """options: those of LlamaIndex's BaseRetriever, such as ``callback_manager``."""
        super().__init__(**options)
        self._client, self._async_client = _clients(client, async_client)
        self._options: dict[str, Any] = {"top": top, "mode": mode, "filters": filters, "rerank": rerank}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _nodes(_blocking(self._client).search(query_bundle.query_str, **self._options))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._async_client is None:
            return await asyncio.to_thread(self._retrieve, query_bundle)
        return _nodes(await self._async_client.search(query_bundle.query_str, **self._options))


class PenstockReader(BaseReader):
    """Reads whole documents: those with the given ids, and those that have the best passages for a query.

    client serves ``load_data`` and ``lazy_load_data``, and async_client ``aload_data`` and ``alazy_load_data``; with
    client alone, these use it in a thread. Each document has the ``document_id`` as its id. Raises what the client
    raises; a document that the caller may not read is a ProblemError with status 404.
    """

    def __init__(self, client: Client | None = None, async_client: AsyncClient | None = None) -> None:
        self._client, self._async_client = _clients(client, async_client)

    def lazy_load_data(
        self,
        document_ids: Iterable[UUID | str] = (),
        *,
        query: str | None = None,
        top: int = 10,
        filters: SearchFilters | None = None,
    ) -> Iterator[Document]:
        """One document after the other, each once. top: the number of passages that the query returns, of which several
        may be of one document."""
        client, ids = _blocking(self._client), list(map(str, document_ids))
        if query is not None:
            ids += _documents_of(client.search(query, top=top, filters=filters))
        for document_id in dict.fromkeys(ids):
            yield _document(client.document(document_id))

    async def aload_data(
        self,
        document_ids: Iterable[UUID | str] = (),
        *,
        query: str | None = None,
        top: int = 10,
        filters: SearchFilters | None = None,
    ) -> list[Document]:
        """The documents that ``load_data`` returns for the same arguments."""
        client, ids = self._async_client, list(map(str, document_ids))
        if client is None:
            return await asyncio.to_thread(self.load_data, ids, query=query, top=top, filters=filters)
        if query is not None:
            ids += _documents_of(await client.search(query, top=top, filters=filters))
        return [_document(await client.document(document_id)) for document_id in dict.fromkeys(ids)]

    async def alazy_load_data(self, *arguments: Any, **options: Any) -> list[Document]:
        """As ``aload_data``."""
        return await self.aload_data(*arguments, **options)


def _clients(client: Client | None, async_client: AsyncClient | None) -> tuple[Client | None, AsyncClient | None]:
    if client is None and async_client is None:
        raise ValueError("give a client or an async_client")
    return client, async_client


def _blocking(client: Client | None) -> Client:
    if client is None:
        raise TypeError("there is an async_client only: use the asynchronous method, or give a client")
    return client


def _documents_of(response: SearchResponse) -> list[str]:
    return [result.document_id for result in response.results]


def _nodes(response: SearchResponse) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(
                id_=result.chunk_id,
                text=result.text,
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=result.document_id)},
                **_metadata(result),
            ),
            score=result.score,
        )
        for result in response.results
    ]


def _document(document: DocumentResponse) -> Document:
    return Document(id_=document.document_id, text=document.text, **_metadata(document))


def _metadata(of: SearchResult | DocumentResponse) -> dict[str, Any]:
    metadata = of.metadata()
    excluded = [name for name in metadata if name not in FOR_MODELS]
    return {
        "metadata": metadata,
        "excluded_embed_metadata_keys": excluded,
        "excluded_llm_metadata_keys": excluded,
    }
