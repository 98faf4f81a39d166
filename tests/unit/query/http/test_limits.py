"""Places, waiting rooms and rates; and how a search's time is shared out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from query import problems
from query.auth.identity import Identity
from query.limits.concurrency import Kind, Limits, concurrent_searches
from query.model import BadQuery
from query.problems import KINDS, Problem
from query.retrieval.timeouts import time_budget
from query.settings import ServeSettings
from query.telemetry import QueryMetrics

ANN, BOB = Identity("token", "acme", "ann"), Identity("token", "acme", "bob")


def limits(**settings: float) -> tuple[Limits, QueryMetrics]:
    metrics = QueryMetrics()
    return Limits(ServeSettings(**settings), metrics), metrics


def shed_count(metrics: QueryMetrics, reason: str) -> float:
    return metrics.registry.get_sample_value("penstock_query_shed_total", {"reason": reason}) or 0


def test_each_caller_has_its_own_rate_limit() -> None:
    of, metrics = limits(requests_per_minute=3)
    for _ in range(3):
        of.count(ANN)
    with pytest.raises(Problem) as refused:
        of.count(ANN)
    assert refused.value.status == 429
    assert 1 <= int(refused.value.headers["Retry-After"]) <= 61
    of.count(BOB)
    of.count(Identity("token", "globex", "ann"))
    of.count(Identity("key", "acme", "ann", key="bot"))
    assert shed_count(metrics, "rate") == 1


def test_callers_with_ambiguous_names_do_not_share_a_rate_limit() -> None:
    of, _ = limits(requests_per_minute=1)
    for who in (Identity("token", "a", "b/c"), Identity("token", "a/b", "c"), Identity("token", "a", "", key="b/c")):
        of.count(who)


async def test_one_caller_cannot_take_every_slot() -> None:
    of, metrics = limits(concurrent_per_caller=2, concurrent=3)
    async with AsyncExitStack() as working:
        for _ in range(2):
            working.enter_context(of.place(ANN))
            await working.enter_async_context(of.slot(ANN))
        with pytest.raises(Problem) as refused, of.place(ANN):
            pass
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
        with of.place(BOB):
            async with of.slot(BOB):
                assert metrics.registry.get_sample_value("penstock_query_in_work") == 3
    with of.place(ANN):
        async with of.slot(ANN):
            assert metrics.registry.get_sample_value("penstock_query_in_work") == 1
    assert shed_count(metrics, "caller") == 1


async def test_a_request_waits_for_a_slot_and_is_rejected_when_the_queue_is_full() -> None:
    of, metrics = limits(concurrent=2, waiting=2, waiting_seconds=60)
    order = []

    async def ask(who: Identity) -> None:
        async with of.slot(who):
            order.append(who.principal)

    async with of.slot(ANN), of.slot(BOB):  # each has its share
        waiting = [asyncio.create_task(ask(who)) for who in (ANN, BOB)]
        while metrics.registry.get_sample_value("penstock_query_waiting") != 2:
            await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            await ask(Identity("token", "acme", "eve"))
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
        with pytest.raises(Problem) as refused:
            await ask(BOB)
        assert (refused.value.status, refused.value.kind) == (429, "over-share")
        assert order == []
    await asyncio.gather(*waiting)
    assert sorted(str(name) for name in order) == ["ann", "bob"]
    assert (shed_count(metrics, "busy"), shed_count(metrics, "share")) == (1, 1)


async def test_a_tenant_with_many_waiting_callers_does_not_block_another_tenant() -> None:
    of, metrics = limits(waiting_seconds=60)
    end = asyncio.Event()

    async def hold(who: Identity, kind: Kind) -> None:
        with suppress(Problem):
            async with of.slot(who, kind):
                await end.wait()

    for kind in ("answer", "search"):
        crowd = [Identity("token", "globex", f"{kind}-{n}") for n in range(8)]
        holding = [asyncio.create_task(hold(who, kind)) for who in crowd for _ in range(8)]
        while not metrics.registry.get_sample_value("penstock_query_waiting"):
            await asyncio.sleep(0)
        for mine in (kind, kind, "read"):
            async with asyncio.timeout(30), of.slot(ANN, mine):
                assert not end.is_set(), "none of the other tenant's requests has ended"
        end.set()
        await asyncio.gather(*holding)
        end.clear()
    assert metrics.registry.get_sample_value("penstock_query_in_work") == 0


async def test_searches_run_while_answers_wait_for_the_chat_model() -> None:
    of, metrics = limits(concurrent=1, answers_at_once=2, waiting_seconds=60)
    async with AsyncExitStack() as writing, asyncio.timeout(30):
        for who in (ANN, BOB):
            slot = await writing.enter_async_context(of.slot(who, "answer"))
            slot.release_search()
        async with of.slot(Identity("token", "acme", "eve")):
            assert metrics.registry.get_sample_value("penstock_query_in_work") == 3


def test_concurrent_searches_depend_on_processors_unless_configured() -> None:
    serve = ServeSettings()
    at_once = concurrent_searches(serve, uses_remote_models=False)
    assert 2 <= at_once <= 4
    assert concurrent_searches(serve, uses_remote_models=True) == 4 * at_once
    assert concurrent_searches(ServeSettings(concurrent=17), uses_remote_models=True) == 17


async def test_waiting_for_a_slot_is_limited_in_time_and_loses_no_slot() -> None:
    of, metrics = limits(concurrent=1, waiting=4, waiting_seconds=0.01)
    async with of.slot(ANN):
        for _ in range(3):
            with pytest.raises(Problem):
                async with of.slot(ANN):
                    pass
        left = asyncio.create_task(of.slot(ANN).__aenter__())
        await asyncio.sleep(0)
        left.cancel()  # whoever waits may leave
        await asyncio.gather(left, return_exceptions=True)
    async with of.slot(BOB):
        pass
    assert (shed_count(metrics, "waited"), metrics.registry.get_sample_value("penstock_query_waiting")) == (3, 0)


# The budget


@given(st.floats(0.5, 120), st.floats(0, 1))
def test_the_time_budgets_of_a_search_fit_its_total(seconds: float, part: float) -> None:
    rerank = part * seconds / 2
    budget = time_budget(seconds, rerank)
    assert budget.total <= seconds * (1 + 1e-9)
    assert min(budget.ledger, budget.embed, budget.vectors, budget.keywords) > 0.05 * seconds
    assert budget.rerank == rerank


def test_a_rerank_timeout_of_more_than_half_the_search_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="RERANK_TIMEOUT_SECONDS"):
        time_budget(10, 5.1)


# Problems


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (BadQuery("the query is empty"), 422, "the query is empty"),
        (Retryable("Postgres at db.internal:5432 refused"), 503, "unavailable"),
        (Retryable("busy", retry_after=7.6), 503, "unavailable"),
        (Misconfigured("PENSTOCK_X: wrong"), 500, "log"),
        (TimeoutError(), 504, "too long"),
        (RuntimeError("secret"), 500, "log"),
        (PenstockError("anything"), 500, "log"),
    ],
)
def test_errors_are_reported_without_internal_details(error: Exception, status: int, says: str) -> None:
    problem = problems.of(error)
    body = problem.as_json()
    assert (problem.status, body["status"]) == (status, status)
    assert says in body["detail"]
    assert not any(inner in str(body) for inner in ("db.internal", "PENSTOCK_X", "secret"))
    if status == 503:
        assert problem.headers["Retry-After"] == ("8" if "busy" in str(error) else "5")


def test_every_problem_kind_is_documented() -> None:
    from pathlib import Path

    guide = (Path(__file__).parents[4] / "docs" / "http.md").read_text()
    for kind, (status, _) in KINDS.items():
        assert f"| `{kind}` | {status} |" in guide, kind
