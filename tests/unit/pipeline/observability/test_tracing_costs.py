"""Costs of questions and answers: tokens as the servers count them, and money by the configured prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.model import ChunkParams, EmbeddingService, Generation
from pipeline.embedding.openai import OpenAIEmbedder
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import EmbeddingSettings
from query.embedding.embedders import GenerationEmbedders
from query.settings import ChatSettings
from query.telemetry import QueryMetrics
from tests.fakes.openai import FakeOpenAI


def value(metrics: QueryMetrics, name: str, **labels: str) -> float:
    outcome = metrics.registry.get_sample_value(f"penstock_query_{name}", labels)
    assert outcome is not None, name
    return outcome


async def test_the_cost_of_a_question_is_computed_from_the_servers_token_count() -> None:
    messages: list[tuple[int, float]] = []
    async with FakeOpenAI() as fake:
        settings = EmbeddingSettings(
            provider="openai", base_url=fake.url, api_key="x", price_per_million_tokens=0.13, dimensions=64
        )
        embedder = OpenAIEmbedder(settings, byte_pairs())
        embedder.on_question = lambda tokens, money: messages.append((tokens, money))
        try:
            await embedder.embed_query("How do I undo a commit?")
            await embedder.embed_documents(["a passage is billed by whoever asked for it"])
        finally:
            await embedder.aclose()
        [(tokens, money)] = messages
        assert 0 < tokens < fake.stats.tokens
    assert money == pytest.approx(tokens * 0.13 / 1_000_000)


async def test_the_query_service_counts_tokens_and_cost_of_embedded_questions(tmp_path: Path) -> None:
    metrics = QueryMetrics()
    async with FakeOpenAI() as fake:
        settings = EmbeddingSettings(
            provider="openai",
            base_url=fake.url,
            api_key="x",
            model="text-embedding-3-large",
            dimensions=64,
            price_per_million_tokens=2.0,
        )
        embedders = GenerationEmbedders.by_settings(settings, tmp_path, metrics=metrics)
        try:
            await embedders.of(generation(fake)).embed("How do I undo a commit?")
        finally:
            await embedders.aclose()
        assert value(metrics, "embedding_tokens_total") == fake.stats.tokens > 0
        assert value(metrics, "embedding_cost_total") == pytest.approx(fake.stats.tokens * 2 / 1_000_000)
    assert value(metrics, "embedding_seconds_count", outcome="answered") == 1


def generation(fake: FakeOpenAI) -> Generation:
    return Generation(
        "g1",
        "active",
        "text-embedding-3-large",
        "",
        64,
        8191,
        ChunkParams(),
        "",
        "",
        "chunks_g1",
        "chunks-g1",
        service=EmbeddingService("openai", fake.url),
    )


def test_the_cost_of_an_answer_is_computed_from_prompt_and_answer_tokens() -> None:
    metrics = QueryMetrics()
    prices = ChatSettings(price_per_million_prompt_tokens=3.0, price_per_million_answer_tokens=15.0)
    assert ChatSettings().money(prompt=1_000_000, answer=1_000_000) == 0
    metrics.answered("large", prompt=1_000_000, answer=200_000, money=prices.money(prompt=1_000_000, answer=200_000))
    assert value(metrics, "answer_cost_total", model="large") == pytest.approx(6.0)
    assert value(metrics, "tokens_total", kind="answer", model="large") == 200_000


def test_a_reranked_search_costs_money_and_a_cached_one_does_not() -> None:
    metrics = QueryMetrics()
    for outcome in ("reranked", "cached", "timeout", "skipped", "reranked", "cancelled"):
        metrics.reranked(outcome, 2.0)
    assert value(metrics, "rerank_cost_total") == pytest.approx(0.008)
    assert value(metrics, "rerank_total", outcome="cached") == 1
