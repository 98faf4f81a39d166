"""The query service as a retriever of LangChain (docs/clients.md). It needs the extra ``langchain``."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from penstock.client import AsyncClient, Client, SearchFilters, SearchMode, SearchResponse

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
except ModuleNotFoundError as error:
    raise ImportError("this needs LangChain: pip install 'penstock[langchain]'", name=error.name) from error

__all__ = ["PenstockRetriever"]


class PenstockRetriever(BaseRetriever):
    """Retrieves the passages that the caller of the client may read.

    client serves ``invoke``, and async_client ``ainvoke``; with client alone, ``ainvoke`` uses it in a thread. The
    other fields are the arguments of ``Client.search``. Each document has a passage's text as its content, the
    passage's ``chunk_id`` as its id, and ``SearchResult.metadata()`` as its metadata: ``citation``, ``url``,
    ``document_id``, ``score``, ``headings`` and others. Raises what the client raises.
    """

    client: Client | None = None
    async_client: AsyncClient | None = None
    top: int = 10
    mode: SearchMode = "hybrid"
    filters: SearchFilters | None = None
    rerank: bool = True

    @model_validator(mode="after")
    def _has_a_client(self) -> PenstockRetriever:
        if self.client is None and self.async_client is None:
            raise ValueError("give the retriever a client or an async_client")
        return self

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if self.client is None:
            raise TypeError("this retriever has an async_client only: use ainvoke, or give it a client")
        return _documents(self.client.search(query, **self._options()))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if self.async_client is None:
            return await super()._aget_relevant_documents(query, run_manager=run_manager)
        return _documents(await self.async_client.search(query, **self._options()))

    def _options(self) -> dict[str, Any]:
        return {"top": self.top, "mode": self.mode, "filters": self.filters, "rerank": self.rerank}


def _documents(response: SearchResponse) -> list[Document]:
    return [
        Document(page_content=result.text, id=result.chunk_id, metadata=result.metadata())
        for result in response.results
    ]
