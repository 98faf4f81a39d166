"""Reranking over the real stores: it improves what it can read, and costs an answer nothing but its order when away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from query.embedding.embedders import QueryEmbedder
from query.model import SearchResults
from query.rerank.guarded import Outcome, open_reranker
from query.rerank.reranker import Reranker
from query.retrieval.search import Search
from query.settings import RerankSettings
from tests.fakes.rerank import FakeRerank
from tests.support.query.http_kit import as_, service_over
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

JUDGED = {
    "the valve closes before the pump starts": "valve",
    "ann reports to the head of sales": "ann",
    "the backup runs after the audit ends": "backup",
    "the north gate opens to the south road": "gate",
}
"""Questions, each with the one document that says it. Others use the same words, more often and the other way round."""
SAY = {
    "valve": "In plant nine, as its manual of last year tells, the valve closes before the pump starts. Mind the heat.",
    "valve-not": "The pump starts before the valve closes. Starts: pump before valve. Closes: valve before pump.",
    "ann": "Among a dozen people of the southern office, ann reports to the head of sales, and sells little herself.",
    "ann-not": "The head of sales reports to ann. Reports: sales head to ann. Ann, head of sales reports.",
    "backup": "On every machine of this kind, old or new, the backup runs after the audit ends, early on Sundays.",
    "backup-not": "The audit runs after the backup ends. Ends: backup after audit. Runs: audit after backup.",
    "gate": "According to drawings that were found in a drawer, the north gate opens to the south road, by two doors.",
    "gate-not": "The south gate opens to the north road. Gate: south. Opens: road, north. South, road, gate, north.",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(*(document(name, text, title="") for name, text in SAY.items()))
        await library.put(document("secret", "the valve closes before the pump starts " * 3, acl_tags=["board"]))
        yield library


@pytest_asyncio.fixture(loop_scope="module")
async def fake() -> AsyncIterator[FakeRerank]:
    async with FakeRerank() as fake:
        yield fake


class Reranked:
    """A search with a reranker of its own, and what became of each request to it."""

    def __init__(self, library: Library, reranker: Reranker, outcomes: list[Outcome], pool: int) -> None:
        self.library = library
        self.outcomes = outcomes
        self.search = Search(
            library.pool, library.es, QueryEmbedder(lambda: library.embedder), reranker=reranker, rerank_pool=pool
        )

    async def ask(self, question: str, *tags: str, **options: Any) -> SearchResults:
        caller = await self.library.caller("acme", *(tags or ("staff",)))
        return await self.search.search(question, caller, **options)


@pytest_asyncio.fixture(loop_scope="module")
async def connect(library: Library, fake: FakeRerank) -> AsyncIterator[Any]:
    opened: list[Reranker] = []

    async def connected(*, pool: int = 50, **options: Any) -> Reranked:
        outcomes: list[Outcome] = []
        settings = {"url": fake.url(), "model": fake.model, "timeout_seconds": 20.0} | options
        reranker = await open_reranker(RerankSettings(**settings), outcomes.append)
        assert reranker is not None
        opened.append(reranker)
        return Reranked(library, reranker, outcomes, pool)

    yield connected
    for reranker in opened:
        await reranker.aclose()


def names(response: SearchResults) -> list[str]:
    return [result.passage.external_id for result in response.results]


def step(response: SearchResults) -> dict[str, Any]:
    [facts] = [step.facts for step in response.steps if step.name == "rerank"]
    return dict(facts)


def reciprocal_rank(results: Sequence[str], expected: str) -> float:
    return 1 / (results.index(expected) + 1) if expected in results else 0.0


async def test_reranking_moves_the_answering_passage_above_passages_with_the_same_words(connect: Any) -> None:
    searcher = await connect()
    before, after = 0.0, 0.0
    for question, expected in JUDGED.items():
        before += reciprocal_rank(names(await searcher.ask(question, mode="vector", rerank=False)), expected)
        response = await searcher.ask(question, mode="vector")
        after += reciprocal_rank(names(response), expected)
        scores = [result.rerank_score for result in response.results]
        assert None not in scores
        assert scores == sorted(scores, reverse=True)
        assert step(response) == {"passages": len(SAY)}
    assert before < after == len(JUDGED)


@pytest.mark.parametrize("mode", ["hybrid", "keyword"])
async def test_results_of_every_search_mode_are_reranked(connect: Any, mode: str) -> None:
    searcher = await connect()
    for question, expected in JUDGED.items():
        assert names(await searcher.ask(question, mode=mode))[0] == expected


async def test_results_beyond_the_rerank_pool_keep_their_order(connect: Any) -> None:
    searcher = await connect(pool=3)
    question = "the valve closes before the pump starts"
    plain = names(await searcher.ask(question, rerank=False))
    response = await searcher.ask(question)
    assert step(response) == {"passages": 3}
    assert sorted(names(response)[:3]) == sorted(plain[:3])
    assert names(response)[3:] == plain[3:]
    assert [result.rerank_score is None for result in response.results] == [False] * 3 + [True] * (len(plain) - 3)


async def test_rerank_false_gives_the_same_results_as_no_reranker(connect: Any, library: Library) -> None:
    searcher, caller = await connect(), await library.caller("acme", "staff")
    question = "the north gate opens to the south road"
    unwanted, none = await searcher.ask(question, rerank=False), await library.search.search(question, caller)
    assert names(unwanted) == names(none)
    assert not any(step.name == "rerank" for step in [*unwanted.steps, *none.steps])
    assert searcher.outcomes == []


async def test_only_passages_the_caller_may_read_are_sent_to_the_reranker(connect: Any, fake: FakeRerank) -> None:
    searcher = await connect()
    question = "the valve closes before the pump starts"
    await searcher.ask(question)
    assert not any("secret" in text for body in fake.stats.bodies for text in body["documents"])
    board = await searcher.ask(question, "board")
    assert names(board) == ["secret"]
    assert step(board) == {"passages": 1}


async def test_a_caller_who_may_read_nothing_sends_no_rerank_request(connect: Any, fake: FakeRerank) -> None:
    searcher = await connect()
    nothing = await searcher.ask("the valve closes before the pump starts", "stranger")
    assert names(nothing) == []
    assert step(nothing) == {"passages": 0}
    assert fake.stats.requests == 0


# Its absence

QUESTION = "the backup runs after the audit ends"


@pytest.mark.parametrize(
    ("faults", "options", "outcome", "reason"),
    [
        ({"errors": 1}, {}, "unavailable", "responded with 503"),
        ({"throttle": 1}, {}, "throttled", "responded with 429"),
        ({"errors": 1, "error_status": 401}, {}, "misconfigured", "check PENSTOCK_RERANK_API_KEY"),
        ({"errors": 1, "error_status": 422}, {}, "rejected", "responded with 422"),
        ({"hang": 1}, {"timeout_seconds": 0.3}, "timeout", "did not answer within 0.3 s"),
        ({"latency_seconds": 60.0}, {"timeout_seconds": 0.3}, "timeout", "did not answer within 0.3 s"),
        ({"disconnect": 1}, {}, "unavailable", "cannot be reached"),
        ({"nan": 1}, {}, "unavailable", "not a number"),
        ({"drop_row": 1}, {}, "unavailable", "numbered them wrongly"),
        ({"not_json": 1}, {}, "unavailable", "response is invalid"),
        ({}, {"url": "http://127.0.0.1:1/rerank"}, "unavailable", "cannot be reached"),
    ],
)
async def test_a_failing_reranker_leaves_the_results_in_their_order_with_a_note(
    connect: Any, fake: FakeRerank, faults: dict[str, Any], options: dict[str, Any], outcome: str, reason: str
) -> None:
    searcher = await connect(**options)
    plain = await searcher.ask(QUESTION, rerank=False)
    for knob, value in faults.items():
        setattr(fake.faults, knob, value)
    response = await asyncio.wait_for(searcher.ask(QUESTION), 10)
    assert [(r.passage, r.text, r.score) for r in response.results] == [
        (r.passage, r.text, r.score) for r in plain.results
    ]
    assert all(result.rerank_score is None for result in response.results)
    assert (step(response)["degraded"], step(response)["passages"]) == (True, len(SAY))
    assert any(reason in line for line in response.degraded)
    assert searcher.outcomes in ([outcome], ["unavailable"])  # the client's own time-box may be the first to end


async def test_a_result_without_reranking_is_not_cached(connect: Any, fake: FakeRerank) -> None:
    searcher = await connect()
    fake.faults.errors = 1
    assert (await searcher.ask(QUESTION)).degraded
    assert not (await searcher.ask(QUESTION)).degraded


async def test_a_failing_reranker_is_skipped_after_a_while_and_earlier_scores_are_reused(
    connect: Any, fake: FakeRerank
) -> None:
    searcher = await connect()
    await searcher.ask(QUESTION)
    fake.faults.errors = 1_000
    for n in range(20):
        results = await searcher.ask(f"{uuid4().hex} pump {n}")
        assert names(results)
    assert fake.stats.requests < 10
    assert searcher.outcomes.count("skipped") > 10
    assert names(await searcher.ask(QUESTION, top=3))[0] == "backup"


async def test_cancelled_searches_do_not_affect_reranking_for_others(connect: Any, fake: FakeRerank) -> None:
    searcher = await connect()
    fake.faults.latency_seconds = 1.0  # none is answered before the last has asked, on a busy machine too
    searches = [asyncio.create_task(searcher.ask(question)) for question in JUDGED for _ in range(2)]
    while fake.stats.requests < len(searches):
        await asyncio.sleep(0.005)
    for search in searches[::2]:
        search.cancel()
    gathered = await asyncio.gather(*searches, return_exceptions=True)
    assert all(isinstance(item, asyncio.CancelledError) for item in gathered[::2])
    for value, expected in zip(gathered[1::2], JUDGED.values(), strict=True):
        assert isinstance(value, SearchResults)
        assert names(value)[0] == expected
    while fake.stats.left < len(searches) / 2:
        await asyncio.sleep(0.005)


# Over HTTP


async def test_the_query_service_reranks_counts_outcomes_and_names_no_address(
    library: Library, fake: FakeRerank
) -> None:
    await library.put(document("mine", "The lift stands still since the storm of May.", acl_tags=["user:ann"]))
    rerank = RerankSettings(url=fake.url(), model=fake.model, timeout_seconds=2.0)
    async with service_over(library, rerank=rerank) as (client, _):

        async def search(**body: Any) -> dict[str, Any]:
            answer = await client.post("/v1/search", json={"query": "lift storm"} | body, headers=as_("ann"))
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        response, plain = await search(), await search(rerank=False)
        fake.faults.errors = 1
        without = await search(query="the lift and the storm")
        counted = (await client.get("/metrics")).text
    assert response["results"][0]["rerank_score"] > 0
    assert plain["results"][0]["rerank_score"] is None
    assert without["results"][0]["rerank_score"] is None
    assert without["degraded"] == ["the rerank server responded with 503"]
    assert "127.0.0.1" not in str(without)
    for outcome in ("reranked", "unavailable"):
        assert f'penstock_query_rerank_total{{outcome="{outcome}"}} 1.0' in counted
    assert 'penstock_query_degraded_total{part="rerank"} 1.0' in counted
