"""The retriever and the reader in LlamaIndex itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
import pytest_asyncio
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import MetadataMode

from penstock.client import AsyncClient, Client, ProblemError
from penstock.llamaindex import PenstockReader, PenstockRetriever
from tests.contract.penstock.conftest import TEXTS, QueryService
from tests.support.query.http_kit import TOKEN_FILE

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]


@dataclass
class Clients:
    blocking: Client
    asynchronous: AsyncClient


@pytest_asyncio.fixture(loop_scope="session")
async def clients(service: QueryService) -> AsyncIterator[Clients]:
    with Client(service.url, TOKEN_FILE) as client:
        async with AsyncClient(service.url, TOKEN_FILE) as async_client:
            yield Clients(client, async_client)


async def test_a_retriever_returns_scored_nodes_with_their_place(clients: Clients) -> None:
    retriever = PenstockRetriever(clients.blocking, clients.asynchronous, top=1)
    [result] = await retriever.aretrieve("harbour opens")
    [same] = await asyncio.to_thread(retriever.retrieve, "harbour opens")
    assert (same.node.node_id, same.node.metadata) == (result.node.node_id, result.node.metadata)
    assert result.score == result.node.metadata["score"] > 0
    assert result.node.node_id == result.node.metadata["chunk_id"]
    assert result.node.ref_doc_id == result.node.metadata["document_id"]
    assert result.node.metadata["citation"] == "Rules › Harbour (https://wiki.example/harbour.md)"
    assert (result.node.metadata["url"], result.node.metadata["headings"]) == (
        "https://wiki.example/harbour.md",
        ["Harbour"],
    )
    shown = result.node.get_content(MetadataMode.LLM)
    assert "opens at nine" in shown
    assert "citation: Rules" in shown
    assert "score" not in shown, "only what a model can use"
    assert SimilarityPostprocessor(similarity_cutoff=1e9).postprocess_nodes([result]) == []


async def test_a_reader_reads_whole_documents_by_id_and_by_query(service: QueryService, clients: Clients) -> None:
    reader = PenstockReader(clients.blocking, clients.asynchronous)
    id_ = await service.id("default", "harbour.md")
    [document] = await reader.aload_data([id_, str(id_)])
    assert (document.text, document.doc_id) == (TEXTS["harbour.md"], str(id_))
    assert document.metadata["citation"] == "Rules (https://wiki.example/harbour.md)"
    assert await asyncio.to_thread(reader.load_data, [id_]) == [document]
    by_query = await reader.alazy_load_data(query="crane licence", top=1)
    assert [read.text for read in by_query] == [TEXTS["crane.md"]]
    assert await asyncio.to_thread(lambda: list(reader.lazy_load_data(query="crane licence", top=1))) == by_query
    nodes = SentenceSplitter(chunk_size=256, chunk_overlap=0).get_nodes_from_documents([document])
    assert {node.ref_doc_id for node in nodes} == {str(id_)}


async def test_one_client_is_enough_and_none_is_an_error(clients: Clients) -> None:
    assert len(await PenstockRetriever(clients.blocking, top=1).aretrieve("harbour")) == 1, "in a thread"
    assert len(await PenstockReader(clients.blocking).aload_data(query="harbour", top=1)) == 1, "in a thread"
    for wrong in (
        lambda: PenstockRetriever(async_client=clients.asynchronous).retrieve("harbour"),
        lambda: PenstockReader(async_client=clients.asynchronous).load_data(query="harbour"),
    ):
        with pytest.raises(TypeError, match="use the asynchronous method"):
            wrong()
    for kind in (PenstockRetriever, PenstockReader):
        with pytest.raises(ValueError, match="give a client or an async_client"):
            kind()


async def test_the_services_errors_are_raised(clients: Clients) -> None:
    with pytest.raises(ProblemError) as raised:
        await PenstockReader(async_client=clients.asynchronous).aload_data([uuid4()])
    assert raised.value.kind == "not-found"
