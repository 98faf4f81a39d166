"""Nothing relevant, with models of several geometries on real servers: calibrated, stored, shown, configured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics
from typing import Any

import pytest
from pydantic import SecretStr

from bench.confidence import EVERYDAY
from deploy.local.stack import Stack
from pipeline.core.relevance import EVERYDAY as EVERYDAY_QUESTIONS
from pipeline.core.relevance import Calibration
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import OneModel
from pipeline.generations.calibration import SAMPLED_CHUNKS, CalibrationKeeper, _sample, calibrate
from pipeline.ledger import generations
from pipeline.runtime.settings import EmbeddingSettings, dist
from pipeline.stores import graph
from query.embedding.embedders import QueryEmbedder
from query.model import SearchResults
from query.retrieval.search import Search
from query.settings import RetrievalSettings
from tests.fakes.geometries import FakeGeometry, Vector
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.questions import QUESTIONS
from tests.support.query.retrieval_kit import find

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

VECTORS: dict[str, Vector] = {}
"""By text, for all geometries."""
ANSWERING = {topic for _, answering in QUESTIONS for topic in sorted(answering)[:1]}


@asynccontextmanager
async def library_of(stack: Stack, geometry: str) -> AsyncIterator[Library]:
    """A library of Python's documentation, embedded by a server with this geometry."""
    bundled = embedder(EmbeddingSettings(), dist() / "models")
    async with FakeGeometry(geometry, bundled, VECTORS) as server:
        settings = EmbeddingSettings(
            provider="openai",
            base_url=server.url,
            model=geometry,
            dimensions=server.dimensions,
            send_dimensions=False,
            api_key=SecretStr("any"),
            input_window=254,
            chunk_tokens=200,
        )
        model = embedder(settings, dist() / "models")
        async with Library.create(stack, model) as library:
            await library.put(*(document(name, topics[name], tenant="python") for name in sorted(ANSWERING)))
            yield library
        await model.aclose()
    await bundled.aclose()


async def calibrated(library: Library) -> Calibration:
    async with library.pool.connection() as connection:
        calibration = await calibrate(connection, library.generation, library.embedder)
    assert calibration is not None
    return calibration


async def answers(library: Library, questions: Sequence[str], search: Search | None = None) -> list[SearchResults]:
    return [await find(library, "python", question, search=search) for question in questions]


def facts(response: SearchResults) -> dict[str, object]:
    [step] = [step for step in response.steps if step.name == "confidence"]
    return dict(step.facts)


@dataclass
class Judge:
    """A reranker that knows one word, on a scale of its own."""

    word: str
    model: str = "judge"
    queries: list[str] = field(default_factory=list)

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        self.queries.append(query)
        return [12.0 if self.word in query else -3.0 - n for n, _ in enumerate(texts)]

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("geometry", ["crowded", "narrow", pytest.param("sparse", marks=pytest.mark.slow)])
async def test_unrelated_questions_get_no_results_from_a_model_of_any_geometry(stack: Stack, geometry: str) -> None:
    async with library_of(stack, geometry) as library:
        before = await find(library, "python", EVERYDAY[0])
        assert (before.relevant, facts(before)["floor"]) == (True, "none: not calibrated yet")
        calibration = await calibrated(library)
        off_topic = await answers(library, EVERYDAY)
        assert sum(response.relevant for response in off_topic) <= 0.1 * len(EVERYDAY)
        answerable = await answers(library, [question for question, _ in QUESTIONS])
        assert sum(not response.relevant for response in answerable) <= 0.03 * len(QUESTIONS)
        assert facts(off_topic[0])["floor"] == f"{calibration.cosine:.2f}"
        assert facts(off_topic[0])["floor source"] == "calibrated"

        # A setting replaces the calibrated floor.
        lenient = Search(
            library.pool,
            library.es,
            QueryEmbedder(lambda: library.embedder),
            settings=RetrievalSettings(cosine_floor=-1),
        )
        assert all(response.relevant for response in await answers(library, EVERYDAY[:3], lenient))


async def test_a_worker_calibrates_a_new_collection_and_one_that_has_grown(
    library: Library, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def current() -> dict[str, object]:
        async with library.pool.connection() as connection:
            return {g.name: g for g in await generations.writable(connection)}

    keeper = CalibrationKeeper(library.settings.postgres, OneModel(library.embedder), current)  # type: ignore[arg-type]

    async def turn() -> list[str]:
        async with library.pool.connection() as connection:
            return await keeper.turn(connection)

    async def stored() -> Calibration | None:
        async with library.pool.connection() as connection:
            return (await generations.active(connection)).calibration

    embedded: list[str] = []
    embed_query = library.embedder.embed_query

    async def counting(text: str) -> Any:
        embedded.append(text)
        return await embed_query(text)

    monkeypatch.setattr(library.embedder, "embed_query", counting)
    [(chunks,)] = await library.execute(f"SELECT count(*) FROM {library.generation.chunk_table}")
    assert chunks == 0, "another test has filled the library"
    assert await turn() == []
    await library.put(*(document(f"{n}.md", f"Gauge {n} of the weir reads {n}.", tenant=tenant) for n in range(6)))
    assert await turn() == ["g1"]
    first = await stored()
    assert first is not None
    assert first.chunks == 6
    assert set(EVERYDAY_QUESTIONS) <= set(embedded)
    embedded.clear()
    assert await turn() == [], "it has not grown"
    await library.put(*(document(f"b{n}.md", f"Buoy {n} lies at mile {n}.", tenant=tenant) for n in range(14)))
    loading = "UPDATE index_state SET seq = want_seq - 1, attempts = 0, pending_since = clock_timestamp()"
    await library.execute(f"{loading} WHERE (SELECT count(*) FROM documents) >= 20 RETURNING 1")
    assert await turn() == [], "a load is being written"
    await library.execute("UPDATE index_state SET seq = want_seq RETURNING 1")
    graph_name = graph.own_name(library.generation)
    [(definition,)] = await library.execute("SELECT pg_get_indexdef(%s::regclass)", graph_name)
    await library.execute(f"DROP INDEX {graph_name}")
    with monkeypatch.context() as large:
        large.setattr(graph, "GRAPH_FROM_ROWS", 5)
        assert await turn() == [], "each question would read the whole table"
    await library.execute(definition)
    assert await turn() == ["g1"]
    second = await stored()
    assert second is not None
    assert second.chunks == 20
    assert len(embedded) == 20, "known items alone: the everyday questions' vectors are stored"
    async with library.pool.connection() as connection:
        again = await calibrate(connection, library.generation, library.embedder)
    assert again is not None
    assert again.cosine == pytest.approx(second.cosine, abs=1e-6), "the same as with vectors of the model"

    # The reranker's floor is measured by command, and stays when a worker calibrates again.
    judge = Judge("weir")
    async with library.pool.connection() as connection:
        await generations.record_calibration(connection, "g1", replace(second, reranker="judge", rerank=1.5))
        await calibrate(connection, library.generation, library.embedder)
    kept = await stored()
    assert kept is not None
    assert (kept.reranker, kept.rerank) == ("judge", 1.5)

    # Its score takes the place of the cosine.
    search = Search(library.pool, library.es, QueryEmbedder(lambda: library.embedder), reranker=judge)
    assert (await find(library, tenant, "weir prices in winter", search=search)).relevant
    noise = await find(library, tenant, "bread prices in winter", search=search)
    assert (noise.relevant, list(noise.results)) == (False, [])
    assert facts(noise)["rerank score"] == "-3.000"
    assert facts(noise)["rerank floor"] == "1.500"
    without = await find(library, tenant, "weir prices in winter")
    assert "rerank score" not in facts(without)


async def test_who_writes_the_passages_with_the_lowest_ids_does_not_decide_the_floor(stack: Stack) -> None:
    async with Library.create(stack, WordEmbedder()) as library:
        gauges = (document(f"{n}.md", f"Gauge {n} of the weir.", tenant="weir") for n in range(2 * SAMPLED_CHUNKS))
        await library.put(*gauges)
        async with library.pool.connection() as connection:
            texts, vectors = await _sample(connection, library.generation)
        lowest = await library.execute(
            f"SELECT text FROM {library.generation.chunk_table} ORDER BY id LIMIT {SAMPLED_CHUNKS}"
        )
    assert SAMPLED_CHUNKS // 2 < len(texts) == len(vectors) <= SAMPLED_CHUNKS
    assert not set(texts) <= {text for (text,) in lowest}


async def test_the_floor_of_a_reranker_is_measured_on_its_own_scale(stack: Stack) -> None:
    async with library_of(stack, "as-it-is") as library:
        scorer = Judge("of the")
        async with library.pool.connection() as connection:
            calibration = await calibrate(connection, library.generation, library.embedder, scorer=scorer)
        assert calibration is not None
        assert calibration.reranker == "judge"
        assert len(scorer.queries) == 80
        assert calibration.rerank is not None
        assert -8 <= calibration.rerank <= 12
