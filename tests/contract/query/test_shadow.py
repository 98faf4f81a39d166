"""Shadowing: the generation that may take over is asked, too, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from query.evaluation.shadow import documents, overlap, rank_biased
from query.mcp import tools
from query.mcp.shapes import SearchArguments
from query.model import SearchResults
from query.retrieval import keywords
from query.retrieval.search import Search
from query.service import Service
from query.settings import CandidateRanking, CandidateReranker, RetrievalSettings, ShadowSettings
from tests.fakes.rerank import FakeRerank
from tests.support.query.generation_query_kit import Site
from tests.support.query.http_kit import as_
from tests.support.query.library import document
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

TEXTS = {f"{n}.md": f"Entry {n} of the keeper's log: wind and water as on day {n}." for n in range(24)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(stack: Stack) -> AsyncIterator[Site]:
    async with Site.create(stack) as site:
        await site.put(*(document(n, text, acl_tags=["user:ann", "staff"]) for n, text in TEXTS.items()))
        yield site


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clear_measurements(site: Site) -> None:
    await site.library.execute("DELETE FROM shadow_agreement")


async def ready(service: Service) -> None:
    """It knows which generations there are, and every model has answered."""
    async with asyncio.timeout(30):
        while service.following.seen is None or len(service.following._ready) < 3:
            await asyncio.sleep(0.02)


def outcomes(service: Service, compared: str = "generation") -> dict[str, int]:
    def value(outcome: str) -> int:
        labels = {"compared": compared, "outcome": outcome}
        return int(service.metrics.registry.get_sample_value("penstock_query_shadow_total", labels) or 0)

    return {outcome: results for outcome in ("measured", "failed", "dropped") if (results := value(outcome))}


class Held(Search):
    """A search whose shadow queries of the candidate wait until they are permitted."""

    def __init__(self, service: Service, site: Site) -> None:
        assert service.shadow.pool is not None
        super().__init__(service.shadow.pool, site.library.es, service.embedders)
        self.may = asyncio.Event()
        self.waiting = 0

    async def search(self, *arguments: Any, **named: Any) -> SearchResults:
        self.waiting += 1
        await self.may.wait()
        return await super().search(*arguments, **named)


async def test_shadow_queries_delay_no_search_and_are_dropped_beyond_the_limit(site: Site) -> None:
    shadow = ShadowSettings(share=1.0, at_once=2)
    async with site.service(shadow=shadow) as (client, service):
        await ready(service)
        service.shadow.search = held = Held(service, site)
        for n in range(5):
            request = {"query": TEXTS[f"{n}.md"]}
            answer = await client.post("/v1/search", json=request, headers=as_("ann"))
            assert answer.status_code == 200
            assert (answer.json()["degraded"], answer.json()["results"][0]["external_id"]) == ([], f"{n}.md")
            assert outcomes(service).get("measured", 0) == 0, "it was answered before its shadow was"
        await until(lambda: held.waiting == 2)
        assert outcomes(service) == {"dropped": 3}
        stats = service.pool.get_stats()
        assert stats["pool_available"] == stats["pool_size"], "no connection that a user's question needs"
        assert service.shadow.pool is not service.pool
        held.may.set()
        await until(lambda: outcomes(service) == {"dropped": 3, "measured": 2})
        answer = await client.post("/v1/search", json={"query": TEXTS["9.md"]}, headers=as_("ann"))
        assert answer.status_code == 200
        await until(lambda: outcomes(service) == {"dropped": 3, "measured": 3})


async def test_only_the_measures_of_a_shadow_query_are_stored(site: Site) -> None:
    query = TEXTS["7.md"]
    async with site.service(shadow=ShadowSettings(share=1.0)) as (client, service):
        await ready(service)
        answer = await client.post("/v1/search", json={"query": query, "top": 3}, headers=as_("ann"))
        assert answer.status_code == 200
        await until(lambda: not service.shadow._tasks)
        assert outcomes(service) == {"measured": 1}
        caller = await site.library.caller("acme", "staff")
        results = [
            documents(await service.search.search(query, caller, top=20, generation=await site.generation(name)))
            for name in ("g1", "g3")
        ]
        in_registry = [
            service.metrics.registry.get_sample_value(
                f"penstock_query_shadow_{name}_ratio_sum", {"compared": "generation"}
            )
            for name in ("overlap", "agreement")
        ]
    assert [len(ranked) for ranked in results] == [10, 10]
    assert 0 < overlap(*results) == len(set(results[0]) & set(results[1])) / 10 < 1
    [row] = await site.library.execute("SELECT * FROM shadow_agreement")
    active, candidate, hour, queries, shared, agreement, failed = row
    assert (active, candidate, queries, failed) == ("g1", "g3", 1, 0)
    assert [shared, agreement] == pytest.approx([overlap(*results), rank_biased(*results)])
    assert in_registry == pytest.approx([shared, agreement])
    assert (hour.minute, hour.second, hour.microsecond) == (0, 0, 0)


async def test_a_failing_shadow_query_is_counted_and_does_not_affect_the_response(site: Site) -> None:
    async with site.service(shadow=ShadowSettings(share=1.0)) as (client, service):
        await ready(service)
        site.models["g3"].api_key = "another"
        try:
            answer = await client.post("/v1/search", json={"query": TEXTS["3.md"]}, headers=as_("ann"))
            assert (answer.status_code, answer.json()["degraded"]) == (200, [])
            await until(lambda: not service.shadow._tasks)
        finally:
            site.models["g3"].api_key = "key-g3"
        assert outcomes(service) == {"failed": 1}
    assert await site.library.execute("SELECT queries, failed FROM shadow_agreement") == [(0, 1)]


async def test_the_configured_share_of_searches_is_shadowed(site: Site) -> None:
    async with site.service(shadow=ShadowSettings(share=0.25, at_once=8)) as (client, service):
        await ready(service)
        service.shadow.dice = iter([0.1, 0.25, 0.24, 0.9]).__next__
        for n in range(4):
            await client.post("/v1/search", json={"query": TEXTS[f"{n}.md"]}, headers=as_("ann"))
        await until(lambda: not service.shadow._tasks)
        assert outcomes(service) == {"measured": 2}


async def test_answers_and_mcp_searches_are_shadowed_when_they_search(site: Site) -> None:
    async with site.service(shadow=ShadowSettings(share=1.0)) as (client, service):
        await ready(service)
        [(id_,)] = await site.library.execute("SELECT id FROM documents WHERE external_id = '4.md'")
        caller = await site.library.caller("acme", "staff")
        for requests, measured in (
            ({"question": TEXTS["4.md"], "mode": "hybrid"}, 1),
            ({"question": TEXTS["4.md"], "mode": "hybrid", "stream": True}, 2),
            ({"question": TEXTS["4.md"], "documents": [str(id_)]}, 2),
        ):
            answer = await client.post("/v1/answers", json=requests, headers=as_("ann"))
            assert answer.status_code == 200, answer.text
            await until(lambda: not service.shadow._tasks)
            assert outcomes(service) == {"measured": measured}
        await tools.search(service, caller, SearchArguments(query="the keeper's log"))
        await until(lambda: not service.shadow._tasks)
        assert outcomes(service) == {"measured": 3}


@pytest_asyncio.fixture(loop_scope="module")
async def one_generation(site: Site) -> AsyncIterator[Site]:
    """No generation may take over."""
    await site.state(g2="retired", g3="retired")
    yield site
    await site.state(g2="previous", g3="building")


async def settled(service: Service) -> None:
    while service.following.seen is None:
        await asyncio.sleep(0.02)


WEIGHTED = CandidateRanking(neighbour_weight=0.0)


async def test_candidate_settings_of_ranking_are_shadowed_as_is_a_generation(site: Site) -> None:
    query = "the keeper's log of wind and water on day 7"
    async with site.service(shadow=ShadowSettings(share=1.0), candidate_ranking=WEIGHTED) as (client, service):
        await ready(service)
        answer = await client.post("/v1/search", json={"query": query, "top": 3}, headers=as_("ann"))
        assert answer.status_code == 200
        await until(lambda: not service.shadow._tasks)
        assert (outcomes(service), outcomes(service, "ranking")) == ({"measured": 1}, {"measured": 1})
        caller = await site.library.caller("acme", "staff")
        by_both = [
            documents(await search.search(query, caller, top=20))
            for search in (
                Search(site.library.pool, site.library.es, service.embedders, settings=settings)
                for settings in (RetrievalSettings(), RetrievalSettings(neighbour_weight=0.0))
            )
        ]
    assert by_both[0] != by_both[1], "else nothing would be compared"
    rows = await site.library.execute("SELECT active, candidate, overlap, agreement, queries FROM shadow_agreement")
    [row] = [row for row in rows if row[1] != "g3"]
    assert row[:2] == ("g1", "g1 with QUERY_NEIGHBOUR_WEIGHT 0.0 instead of 0.5")
    assert row[2:] == pytest.approx((overlap(*by_both), rank_biased(*by_both), 1))
    assert len(rows) == 2


async def test_both_settings_of_ranking_share_what_they_need_alike(
    one_generation: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store is searched once for both, and the question is embedded once. Another walk through the graph of the
    vectors is another search."""
    site, searched = one_generation, []

    async def bm25(*arguments: Any, **named: Any) -> Any:
        searched.append(arguments[4])
        return await keywords.bm25(*arguments, **named)

    monkeypatch.setattr("query.retrieval.stores.bm25", bm25)
    for candidate, searches in ((CandidateRanking(feedback=False), 2), (CandidateRanking(ef_search=100), 3)):
        searched.clear()
        query = f"the log of day {searches}"
        async with site.service(shadow=ShadowSettings(share=1.0), candidate_ranking=candidate) as (client, service):
            await settled(service)
            await client.post("/v1/search", json={"query": query}, headers=as_("ann"))
            await until(lambda service=service: not service.shadow._tasks)  # type: ignore[misc]
            assert outcomes(service, "ranking") == {"measured": 1}
        assert searched == [query] * searches, "the first is the caller's"
        assert site.models["g1"].texts.count(query) == 2


async def test_a_candidate_reranker_that_hangs_delays_no_search(one_generation: Site) -> None:
    async with FakeRerank() as fake:
        fake.faults.hang = 1
        candidate = CandidateReranker(url=fake.url(), model=fake.model)
        shadow = ShadowSettings(share=1.0, at_once=1, seconds=600)
        async with one_generation.service(shadow=shadow, candidate_reranker=candidate) as (client, service):
            await settled(service)
            for n in range(2):
                answer = await client.post("/v1/search", json={"query": TEXTS[f"{n}.md"]}, headers=as_("ann"))
                assert (answer.status_code, answer.json()["degraded"]) == (200, [])
                assert answer.json()["results"][0]["rerank_score"] is None
                await until(lambda: fake.stats.open == 1)
            assert outcomes(service, "ranking") == {"dropped": 1}


async def test_a_candidate_reranker_that_takes_too_long_counts_as_failed(one_generation: Site) -> None:
    async with FakeRerank() as fake:
        fake.faults.hang = 1
        candidate = CandidateReranker(url=fake.url(), model=fake.model)
        shadow = ShadowSettings(share=1.0, seconds=4.0)
        async with one_generation.service(shadow=shadow, candidate_reranker=candidate) as (client, service):
            await settled(service)
            for n in range(2):
                await client.post("/v1/search", json={"query": TEXTS[f"{n}.md"]}, headers=as_("ann"))
                await until(lambda: not service.shadow._tasks)
            assert outcomes(service, "ranking") == {"failed": 1, "measured": 1}
    assert await one_generation.library.execute("SELECT sum(queries), sum(failed) FROM shadow_agreement") == [(1, 1)]


async def test_a_candidate_reranker_reads_only_what_the_caller_may_read(one_generation: Site) -> None:
    secret = document("board.md", "The secret of the keeper's log: wind and water.", acl_tags=["board"])
    await one_generation.library.put(secret)
    async with FakeRerank() as fake:
        candidate = CandidateReranker(url=fake.url(), model=fake.model)
        async with one_generation.service(shadow=ShadowSettings(share=1.0), candidate_reranker=candidate) as (
            client,
            service,
        ):
            await settled(service)
            request = {"query": "the secret of the keeper's log"}
            await client.post("/v1/search", json=request, headers=as_("ann"))
            await until(lambda: not service.shadow._tasks)
            assert outcomes(service, "ranking") == {"measured": 1}
            await client.post("/v1/search", json={**request, "rerank": False}, headers=as_("ann"))
            await until(lambda: not service.shadow._tasks)
            assert outcomes(service, "ranking") == {"measured": 2}
            [body] = fake.stats.bodies
            assert any("the keeper's log" in text for text in body["documents"])
            assert not any("secret" in text for text in body["documents"])


async def test_a_candidate_reranker_that_cannot_be_loaded_is_reported_at_the_start(site: Site, tmp_path: Path) -> None:
    candidate = CandidateReranker(onnx_path=tmp_path)
    with pytest.raises(Misconfigured, match=r"candidate settings of ranking \(PENSTOCK_SHADOW_RERANK_\*\): "):
        async with site.service(shadow=ShadowSettings(share=1.0), candidate_reranker=candidate):
            pass


async def test_without_a_share_no_shadow_query_runs(site: Site) -> None:
    async with site.service(candidate_ranking=WEIGHTED) as (client, service):
        await ready(service)
        assert (service.shadow.search, service.shadow.pool, service.shadow.rankings) == (None, None, None)
        await client.post("/v1/search", json={"query": TEXTS["3.md"]}, headers=as_("ann"))
        assert outcomes(service) == {}
        assert TEXTS["3.md"] not in site.models["g3"].texts[-1:]
