"""A member's own history beside the documents: for nobody else, within its share, and never missing without a word."""

from __future__ import annotations

import pytest

from pipeline.conversations.embed import ConversationVectors
from pipeline.conversations.record import Conversations
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import OneModel
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import ConversationSettings, EmbeddingSettings, dist
from pipeline.stages.stage import Incoming
from query.embedding.embedders import QueryEmbedder
from query.modes.budget import HISTORY_SHARE
from query.modes.gather import Modes
from query.modes.history import NEAREST_CHUNKS
from query.modes.material import Material, Question
from query.retrieval.search import Search
from query.settings import ChatSettings, RetrievalSettings
from query.telemetry import QueryMetrics
from tests.fakes.openai import FakeOpenAI
from tests.support.pipeline.conversations_kit import known, recorded, sent
from tests.support.query.leak_paths import BrokenModel
from tests.support.query.library import Library, WordEmbedder, document
from topics.codec import encode

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

GATE = 400


async def record(library: Library, tenant: str, member: str, pairs: int, *, topic: str = "leave") -> None:
    settings = ConversationSettings(gate_tokens=GATE, embeddings_per_second=10_000)
    stage = Conversations(library.pool, library.detect._dead, byte_pairs().count, library.metrics, settings)
    said = recorded(*(sent(n, topic) for n in range(pairs)), tenant=tenant, member=member)
    await known(library.pool, said)
    message = encode(said)
    await stage.handle([Incoming("conversations", 0, 1, message.key, message.value, message.headers, "live")])
    vectors = ConversationVectors(library.pool, OneModel(library.embedder), library.metrics, settings)
    for _ in range(20):
        if not await vectors.turn():
            return
    raise AssertionError("the chunks were not embedded")


async def gather(
    library: Library,
    tenant: str,
    question: Question,
    *,
    model: QueryEmbedder | None = None,
    metrics: QueryMetrics | None = None,
    budget: int = 30_000,
    cached_queries: int = 2_000,
) -> Material:
    settings = RetrievalSettings(standard_tokens=budget, cached_queries=cached_queries)
    search = Search(library.pool, library.es, model or QueryEmbedder(WordEmbedder), settings=settings)
    modes = Modes(search, library.pool, settings, ChatSettings(), metrics=metrics)
    return await modes.gather(question, await library.caller(tenant, "staff"), "standard")


def step(material: Material) -> dict[str, object]:
    [one] = [s for s in material.steps if s.name == "history"]
    return dict(one.facts)


async def test_a_short_history_is_read_whole_and_reduces_the_budget(library: Library, tenant: str) -> None:
    await record(library, tenant, "ada", 3)
    await library.put(document("a.md", "Rules of leave.", tenant=tenant))
    response = await gather(library, tenant, Question("leave", member="ada"), model=QueryEmbedder(BrokenModel))
    assert response.history is not None
    assert (response.history.served, len(response.history.pieces), response.notes) == ("whole", 3, [])
    assert step(response) == {
        "served": "whole",
        "pieces": 3,
        "tokens": response.history.tokens,
        "budget_tokens": int(HISTORY_SHARE * 30_000),
    }
    assert response.budget_tokens == 30_000 - response.history.tokens
    assert [r.passage.external_id for r in response.passages] == ["a.md"]


async def test_a_long_history_is_searched_by_vector(library: Library, tenant: str) -> None:
    await record(library, tenant, "ada", 80, topic="travel")
    response = await gather(library, tenant, Question("travel number 7", member="ada"))
    assert response.history is not None
    assert (response.history.served, len(response.history.pieces)) == ("nearest", NEAREST_CHUNKS)
    assert response.notes == []
    small = await gather(library, tenant, Question("travel number 7", member="ada"), budget=1_000)
    assert small.history is not None
    assert step(small)["tokens"] <= 200  # type: ignore[operator]
    assert small.notes == [f"the history's {small.history.left_out} chunks did not fit the budget"]


async def test_without_the_embedding_model_the_newest_history_is_used_with_a_note(
    library: Library, tenant: str
) -> None:
    await record(library, tenant, "ada", 80)
    response = await gather(library, tenant, Question("leave", member="ada"), model=QueryEmbedder(BrokenModel))
    assert response.history is not None
    assert response.history.served == "newest"
    said = "the history was searched by time only: the model is overloaded (429)"
    assert said in response.notes
    assert (step(response)["degraded"], step(response)["reason"]) == (True, said)


@pytest.mark.parametrize("cached_queries", [0, 2_000])
async def test_a_question_is_embedded_once_for_the_history_and_the_search(
    library: Library, tenant: str, cached_queries: int
) -> None:
    await record(library, tenant, "ada", 80)
    await library.put(document("a.md", "Rules of leave.", tenant=tenant))
    async with FakeOpenAI(model="words", dimensions=WordEmbedder.dimensions) as server:
        settings = EmbeddingSettings(
            provider="openai", base_url=server.url, model="words", dimensions=WordEmbedder.dimensions
        )
        served = embedder(settings, dist() / "models")
        response = await gather(
            library,
            tenant,
            Question("leave", "hybrid", member="ada"),
            model=QueryEmbedder(lambda: served),
            cached_queries=cached_queries,
        )
        assert response.history is not None
        assert response.history.served == "nearest"
        assert [s.facts.get("degraded") for s in response.steps if s.name == "embed"] == [None]
        assert server.stats.requests == 1
        await served.aclose()


async def test_the_metric_says_how_histories_were_read(library: Library, tenant: str) -> None:
    metrics = QueryMetrics()
    await record(library, tenant, "ada", 3)
    await record(library, tenant, "bob", 80)
    for member, model in (("ada", WordEmbedder), ("bob", WordEmbedder), ("bob", BrokenModel), ("nobody", WordEmbedder)):
        await gather(library, tenant, Question("leave", member=member), model=QueryEmbedder(model), metrics=metrics)
    assert {
        served: metrics.registry.get_sample_value("penstock_query_history_total", {"served": served})
        for served in ("whole", "nearest", "newest")
    } == {"whole": 1, "nearest": 1, "newest": 1}


async def test_a_history_is_never_served_to_another_member_or_tenant(library: Library, tenant: str) -> None:
    await record(library, tenant, "ada", 3, topic="secrets")
    unasked = await gather(library, tenant, Question("secrets"))
    assert unasked.history is None
    assert "history" not in [s.name for s in unasked.steps]
    for of, member in ((tenant, "bob"), (f"{tenant}x", "ada"), (tenant, "ad%"), (tenant, "a\x00da")):
        gathered = await gather(library, of, Question("secrets", member=member))
        assert gathered.history is not None
        assert list(gathered.history.pieces) == []
        assert step(gathered) == {"served": "whole", "pieces": 0, "tokens": 0, "budget_tokens": 6_000}
