"""Settings → embedder, chunk sizes and counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from pipeline.embedding import choose, convert
from pipeline.runtime.settings import EmbeddingSettings
from tests.support.pipeline.generations import generation

KEY = SecretStr("k")
GENERATION = generation(model=convert.MODEL, dimensions=384)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def test_the_local_model_is_the_default_embedder(models: Path) -> None:
    embedder = choose.embedder(EmbeddingSettings(document_prefix="d: ", query_prefix="q: "), models)
    assert (embedder.model, embedder.dimensions, embedder.input_window) == ("all-MiniLM-L6-v2", 384, 254)
    assert embedder.revision.endswith("-int8")
    assert (embedder.document_prefix, embedder.query_prefix) == ("d: ", "q: ")
    await embedder.aclose()


async def test_the_openai_provider_has_default_model_and_window(models: Path) -> None:
    embedder = choose.embedder(EmbeddingSettings(provider="openai", api_key=KEY), models)
    assert (embedder.model, embedder.dimensions, embedder.input_window) == ("text-embedding-3-large", 1536, 8191)
    assert embedder.count_tokens(["<|endoftext|>"]) == [7]
    await embedder.aclose()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "text-embedding-3-large"}, "PENSTOCK_EMBEDDING_MODEL"),
        ({"dimensions": 256}, "PENSTOCK_EMBEDDING_DIMENSIONS"),
        ({"input_window": 512}, "PENSTOCK_EMBEDDING_INPUT_WINDOW"),
    ],
)
def test_options_the_local_model_does_not_support_are_misconfigured(
    models: Path, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(Misconfigured, match=line):
        choose.embedder(EmbeddingSettings(**options), models)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (200, 80, 254)),
        ({"chunk_tokens": 100}, (100, 40, 128)),
        ({"chunk_tokens": 254}, (254, 101, 254)),
        ({"document_prefix": "represent this: "}, (200, 80, 251)),
        ({"provider": "openai", "api_key": KEY}, (400, 160, 512)),
        ({"provider": "openai", "api_key": KEY, "chunk_tokens": 1000}, (1000, 400, 1280)),
        ({"provider": "openai", "api_key": KEY, "input_window": 512}, (400, 160, 512)),
        ({"provider": "openai", "api_key": KEY, "input_window": 450}, (360, 144, 450)),
        ({"provider": "openai", "api_key": KEY, "input_window": 300}, (240, 96, 300)),
    ],
)
async def test_chunk_sizes_fit_the_embedders_input_window(
    models: Path, options: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    settings = EmbeddingSettings(**options)
    embedder = choose.embedder(settings, models)
    params = choose.chunk_params(settings, embedder)
    assert (params.target, params.min_tokens, params.max_tokens) == sizes
    await embedder.aclose()


@pytest.mark.parametrize("chunk_tokens", [1, 15, 255, 10_000, -5])
async def test_a_chunk_size_outside_the_input_window_is_misconfigured(models: Path, chunk_tokens: int) -> None:
    settings = EmbeddingSettings(chunk_tokens=chunk_tokens)
    embedder = choose.embedder(settings, models)
    with pytest.raises(Misconfigured, match=f"CHUNK_TOKENS: {chunk_tokens} .* 254"):
        choose.chunk_params(settings, embedder)
    await embedder.aclose()


@pytest.mark.parametrize(
    ("model", "count"),
    [("all-MiniLM-L6-v2", 2), ("sentence-transformers/all-MiniLM-L6-v2", 2), ("text-embedding-3-large", 6)],
)
def test_a_token_counter_uses_the_tokenizer_of_the_generations_model(models: Path, model: str, count: int) -> None:
    counter = choose.token_counter(replace(GENERATION, model=model), models)
    assert counter(["[CLS] [SEP]", ""]) == [count, 0]


async def test_embedder_and_token_counter_give_the_same_counts(models: Path) -> None:
    texts = ["naïve café", "def f(x): return x", "語" * 20, "x" * 500]
    for settings in (EmbeddingSettings(), EmbeddingSettings(provider="openai", api_key=KEY)):
        embedder = choose.embedder(settings, models)
        counter = choose.token_counter(replace(GENERATION, model=embedder.model), models)
        assert counter(texts) == embedder.count_tokens(texts)
        await embedder.aclose()
