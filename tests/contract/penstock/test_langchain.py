"""The retriever in LangChain itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

from penstock.client import AsyncClient, Client, ProblemError, SearchFilters
from penstock.langchain import PenstockRetriever
from tests.contract.penstock.conftest import QueryService
from tests.support.query.http_kit import TOKEN_FILE

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def retriever(service: QueryService) -> AsyncIterator[PenstockRetriever]:
    with Client(service.url, TOKEN_FILE) as client:
        async with AsyncClient(service.url, TOKEN_FILE) as async_client:
            yield PenstockRetriever(client=client, async_client=async_client, top=1)


async def test_a_retriever_returns_passages_with_their_place(retriever: PenstockRetriever) -> None:
    blocking = await asyncio.to_thread(retriever.invoke, "harbour opens")
    assert await retriever.ainvoke("harbour opens") == blocking
    [document] = blocking
    assert "opens at nine" in document.page_content
    assert document.id == document.metadata["chunk_id"]
    assert document.metadata["citation"] == "Rules › Harbour (https://wiki.example/harbour.md)"
    assert (document.metadata["url"], document.metadata["headings"]) == ("https://wiki.example/harbour.md", ["Harbour"])
    assert {"document_id", "score"} <= document.metadata.keys()
    json.dumps(document.metadata)


async def test_a_retriever_is_a_part_of_a_chain(retriever: PenstockRetriever) -> None:
    def cite(documents: list[Document]) -> list[str]:
        return [document.metadata["external_id"] for document in documents]

    chain = retriever | RunnableLambda(cite)
    assert await chain.ainvoke("crane licence") == ["crane.md"]
    assert await chain.abatch(["crane licence", "harbour opens"]) == [["crane.md"], ["harbour.md"]]


async def test_a_retrievers_fields_are_the_arguments_of_a_search(
    service: QueryService, retriever: PenstockRetriever
) -> None:
    elsewhere = retriever.model_copy(update={"filters": SearchFilters(sources=["elsewhere"])})
    assert await elsewhere.ainvoke("harbour") == []
    with pytest.raises(ValueError, match="mode"):
        PenstockRetriever(client=retriever.client, mode="fuzzy")  # type: ignore[arg-type]


async def test_one_client_is_enough_and_none_is_an_error(retriever: PenstockRetriever) -> None:
    blocking = PenstockRetriever(client=retriever.client, top=1)
    assert len(await blocking.ainvoke("harbour")) == 1, "in a thread"
    with pytest.raises(TypeError, match="use ainvoke"):
        PenstockRetriever(async_client=retriever.async_client).invoke("harbour")
    with pytest.raises(ValueError, match="give the retriever a client"):
        PenstockRetriever()


async def test_the_services_errors_are_raised(retriever: PenstockRetriever) -> None:
    with pytest.raises(ProblemError) as raised:
        await retriever.model_copy(update={"top": 1000}).ainvoke("harbour")
    assert raised.value.status == 422
