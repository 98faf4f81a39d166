"""The law of the port, kept by both embedders: MiniLM, and the client of a server that keeps OpenAI's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import Poison
from pipeline.embedding.choose import embedder as choose
from pipeline.embedding.port import Embedder
from pipeline.runtime.settings import EmbeddingSettings
from tests.fakes.openai import FakeOpenAI

PASSAGES = [
    "A man is eating food.",
    "The girl is carrying a baby.",
    "Ein Mann reitet auf einem weißen Pferd.",
    "日本語の文章もひとつの段落になる。",
    "שלום עולם, טקסט מימין לשמאל",
    "e\u0301tude, nai\u0308ve, 👩‍👩‍👧‍👦 and \u202ebidi\u202c",
    "def search(query: str) -> list[Hit]:\n    return index.search(query)",
    "<|endoftext|> in a document is ordinary text, and so is [CLS].",
    "nul \x00 inside",
    "word " * 180,
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["local", "openai-base64", "openai-float"])
async def embedder(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Embedder]:
    if request.param == "local":
        local = choose(EmbeddingSettings(), models)
        yield local
        await local.aclose()
        return
    async with FakeOpenAI() as fake:
        options: dict[str, Any] = {"encoding_format": request.param.removeprefix("openai-")}
        client = choose(
            EmbeddingSettings(provider="openai", base_url=fake.url, batch_inputs=4, dimensions=256, **options), models
        )
        yield client
        await client.aclose()


async def test_rows_are_unit_float32_in_input_order(embedder: Embedder) -> None:
    together = await embedder.embed_documents(PASSAGES)
    assert together.vectors.shape == (len(PASSAGES), embedder.dimensions)
    assert together.vectors.dtype == np.float32
    assert together.refused == {}
    np.testing.assert_allclose(np.linalg.norm(together.vectors, axis=1), 1.0, atol=1e-5)
    for text, row in zip(PASSAGES, together.vectors, strict=True):
        alone = await embedder.embed_documents([text])
        assert float(alone.vectors[0] @ row) > 0.99999


async def test_the_same_text_gives_the_same_vector_whatever_it_is_batched_with(embedder: Embedder) -> None:
    forward = (await embedder.embed_documents(PASSAGES)).vectors
    backward = (await embedder.embed_documents(PASSAGES[::-1] + PASSAGES)).vectors
    np.testing.assert_allclose(backward[: len(PASSAGES)][::-1], forward, atol=1e-5)
    np.testing.assert_allclose(backward[len(PASSAGES) :], forward, atol=1e-5)


async def test_different_texts_give_different_vectors(embedder: Embedder) -> None:
    vectors = (await embedder.embed_documents(PASSAGES)).vectors
    likeness = vectors @ vectors.T - np.eye(len(PASSAGES))
    assert likeness.max() < 0.95


async def test_a_query_is_embedded_like_a_passage(embedder: Embedder) -> None:
    query = await embedder.embed_query(PASSAGES[0])
    assert query.shape == (embedder.dimensions,)
    passage = (await embedder.embed_documents([PASSAGES[0]])).vectors[0]
    assert float(query @ passage) > 0.99999


async def test_embedding_no_texts_returns_no_rows(embedder: Embedder) -> None:
    nothing = await embedder.embed_documents([])
    assert nothing.vectors.shape == (0, embedder.dimensions)
    assert nothing.refused == {}


async def test_unembeddable_texts_are_refused_and_the_others_embedded(embedder: Embedder) -> None:
    embedded = await embedder.embed_documents(["", PASSAGES[0], " \n\t", "lone \ud800 surrogate", PASSAGES[1]])
    assert embedded.refused == {0: "empty text", 2: "empty text", 3: "not valid Unicode"}
    np.testing.assert_array_equal(np.linalg.norm(embedded.vectors, axis=1) > 0.5, [False, True, False, False, True])
    whole = await embedder.embed_documents(PASSAGES[:2])
    np.testing.assert_allclose(embedded.vectors[[1, 4]], whole.vectors, atol=1e-5)


async def test_a_batch_of_only_unembeddable_texts_returns_zero_vectors(embedder: Embedder) -> None:
    embedded = await embedder.embed_documents(["", " "])
    assert embedded.refused.keys() == {0, 1}
    assert not embedded.vectors.any()


@pytest.mark.parametrize("query", ["", "   ", "\udfff"])
async def test_a_query_that_cannot_be_embedded_is_poison(embedder: Embedder, query: str) -> None:
    with pytest.raises(Poison) as caught:
        await embedder.embed_query(query)
    assert caught.value.code == "unembeddable_query"


async def test_text_beyond_the_input_window_is_truncated_and_counted(embedder: Embedder) -> None:
    kept = "word " * embedder.input_window
    counted: list[int] = []
    embedder.on_truncated = counted.append
    embedded = await embedder.embed_documents([kept + "beyond the end", kept.rstrip(), "short"])
    assert counted == [1]
    assert embedded.refused == {}
    assert float(embedded.vectors[0] @ embedded.vectors[1]) > 0.99999
    np.testing.assert_allclose(np.linalg.norm(embedded.vectors, axis=1), 1.0, atol=1e-5)


async def test_token_counts_are_correct_for_empty_short_and_long_texts(embedder: Embedder) -> None:
    assert embedder.count_tokens([]) == []
    assert embedder.count_tokens(["", "hello", "hello world", "hello " * 2_000])[:3] == [0, 1, 2]
    assert embedder.count_tokens(["hello " * 2_000])[0] in (2_000, 2_001)


async def test_concurrent_calls_give_the_same_vectors_as_one_batch(embedder: Embedder) -> None:
    results = await asyncio.gather(*(embedder.embed_documents([text]) for text in PASSAGES))
    together = await embedder.embed_documents(PASSAGES)
    for result, row in zip(results, together.vectors, strict=True):
        np.testing.assert_allclose(result.vectors[0], row, atol=1e-5)
