"""The time that a search spends on a reranker: its limit at most, little while it is down, nothing for known scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from pipeline.core.breaker import THRESHOLD
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Poison, Retryable
from query.rerank.guarded import SCORE_TTL_SECONDS, Guarded, Outcome, open_reranker
from query.settings import RerankSettings
from tests.fakes.rerank import FakeRerank, scores
from tests.support.query import cross_encoder_kit

DOWN = Retryable("the rerank server responded with 503", service="rerank")


class Inner:
    """A ``port.Reranker`` that does as it is told, and scores a text by its length."""

    model = "inner"

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[str]]] = []
        self.error: Exception | None = None
        self.wait: Callable[[], Awaitable[object]] | None = None
        self.closed = False

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        self.requests.append((query, list(texts)))
        if self.wait is not None:
            await self.wait()
        if self.error is not None:
            raise self.error
        return [float(len(text)) for text in texts]

    async def aclose(self) -> None:
        self.closed = True


class Bench:
    """A Guarded with a clock to turn and its outcomes to read."""

    def __init__(self, *, timeout_seconds: float = 30.0, cached_pairs: int = 100) -> None:
        self.inner = Inner()
        self.now = 1_000.0
        self.outcomes: list[Outcome] = []
        self.guarded = Guarded(
            self.inner,
            timeout_seconds=timeout_seconds,
            cached_pairs=cached_pairs,
            on_outcome=self.outcomes.append,
            clock=lambda: self.now,
        )

    async def fail(self, times: int, error: Exception = DOWN) -> None:
        self.inner.error = error
        for n in range(times):
            with pytest.raises(type(error)):
                await self.guarded.rerank("question", [f"text of failure {n} at {self.now}"])
        self.inner.error = None


async def test_rerank_scores_are_cached_per_question_and_passage() -> None:
    bench = Bench()
    assert await bench.guarded.rerank("one", ["a", "bb", "a"]) == [1, 2, 1]
    assert await bench.guarded.rerank("one", ["bb", "ccc", "a"]) == [2, 3, 1]
    assert await bench.guarded.rerank("one", ["ccc", "a"]) == [3, 1]
    assert await bench.guarded.rerank("two", ["a"]) == [1]
    assert await bench.guarded.rerank("one", []) == []
    assert bench.inner.requests == [("one", ["a", "bb"]), ("one", ["ccc"]), ("two", ["a"])]
    assert bench.outcomes == ["reranked", "reranked", "cached", "reranked", "cached"]


async def test_rerank_scores_are_not_shared_between_tenants() -> None:
    bench = Bench()
    for tenant in ("acme", "globex", "acme"):
        await bench.guarded.rerank("q", ["a"], tenant=tenant)
    assert len(bench.inner.requests) == 2


async def test_the_cache_distinguishes_where_the_question_ends_and_the_passage_begins() -> None:
    bench = Bench()
    await bench.guarded.rerank("one two", ["three"])
    await bench.guarded.rerank("one", [" twothree"])
    assert len(bench.inner.requests) == 2


async def test_cached_scores_expire_and_are_limited_in_number() -> None:
    bench = Bench(cached_pairs=2)
    await bench.guarded.rerank("q", ["a", "bb", "ccc"])
    await bench.guarded.rerank("q", ["bb", "ccc"])
    assert len(bench.inner.requests) == 1
    bench.now += SCORE_TTL_SECONDS
    await bench.guarded.rerank("q", ["bb", "ccc"])
    assert len(bench.inner.requests) == 2


async def test_a_cache_size_of_zero_disables_the_cache() -> None:
    bench = Bench(cached_pairs=0)
    for _ in range(2):
        assert await bench.guarded.rerank("q", ["a"]) == [1]
    assert len(bench.inner.requests) == 2


async def test_a_rerank_request_is_limited_in_time() -> None:
    bench = Bench(timeout_seconds=0.05)
    bench.inner.wait = asyncio.Event().wait
    with pytest.raises(Retryable, match=r"did not answer within 0.05 s"):
        await asyncio.wait_for(bench.guarded.rerank("q", ["a"]), 10)
    assert bench.outcomes == ["timeout"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DOWN, "unavailable"),
        (Deferred("later", retry_after=1.0), "throttled"),
        (Misconfigured("401"), "misconfigured"),
        (Poison("rejected", "422"), "rejected"),
    ],
)
async def test_every_rerank_failure_has_its_own_outcome(error: PenstockError, outcome: Outcome) -> None:
    bench = Bench()
    await bench.fail(1, error)
    assert bench.outcomes == [outcome]


async def test_a_failing_rerank_server_is_tried_by_one_search_at_a_time_after_pauses() -> None:
    bench = Bench()
    await bench.fail(THRESHOLD)
    for _ in range(100):
        with pytest.raises(Retryable, match="not called at present: the rerank server responded with 503"):
            await bench.guarded.rerank("q", ["a"])
    assert len(bench.inner.requests) == THRESHOLD
    assert bench.outcomes[THRESHOLD:] == ["skipped"] * 100
    bench.now += 40
    answers = asyncio.Event()
    bench.inner.wait = answers.wait
    trial = asyncio.create_task(bench.guarded.rerank("q", ["a"]))
    await asyncio.sleep(0)
    with pytest.raises(Retryable, match="not called at present"):  # one at a time
        await bench.guarded.rerank("q", ["a"])
    answers.set()
    assert await trial == [1]
    assert await bench.guarded.rerank("q", ["bb"]) == [2]  # all is well again


async def test_cached_scores_are_used_while_the_rerank_server_is_down() -> None:
    bench = Bench()
    await bench.guarded.rerank("q", ["a"])
    await bench.fail(THRESHOLD)
    assert await bench.guarded.rerank("q", ["a"]) == [1]


async def test_a_trial_whose_caller_is_cancelled_makes_way_for_the_next() -> None:
    bench = Bench()
    await bench.fail(THRESHOLD)
    bench.now += 40
    bench.inner.wait = asyncio.Event().wait
    trial = asyncio.create_task(bench.guarded.rerank("q", ["a"]))
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    bench.inner.wait = None
    assert await bench.guarded.rerank("q", ["a"]) == [1]


async def test_cancelled_callers_do_not_reset_the_failure_count() -> None:
    bench = Bench()
    for _ in range(THRESHOLD):
        await bench.fail(1)
        bench.inner.wait = asyncio.Event().wait
        leaving = asyncio.create_task(bench.guarded.rerank("q", ["left"]))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        bench.inner.wait = None
    with pytest.raises(Retryable, match="not called at present"):
        await bench.guarded.rerank("q", ["a"])


async def test_a_cancelled_reranking_has_an_outcome_because_it_costs_money() -> None:
    bench = Bench()
    bench.inner.wait = asyncio.Event().wait
    leaving = asyncio.create_task(bench.guarded.rerank("q", ["a"]))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert bench.outcomes == ["cancelled"]


async def test_a_429_pauses_rerank_requests_for_its_retry_after() -> None:
    bench = Bench()
    await bench.fail(1, Deferred("later", retry_after=7.0))
    with pytest.raises(Retryable, match="it requested a pause") as raised:
        await bench.guarded.rerank("q", ["a"])
    assert raised.value.retry_after == pytest.approx(7.0)
    bench.now += 7.0
    assert await bench.guarded.rerank("q", ["a"]) == [1]


async def test_poison_questions_do_not_open_the_circuit_breaker() -> None:
    bench = Bench()
    await bench.fail(THRESHOLD + 1, Poison("too_long", "the question is too long"))
    assert await bench.guarded.rerank("q", ["a"]) == [1]


# By settings


@pytest.fixture
async def fake() -> AsyncIterator[FakeRerank]:
    async with FakeRerank() as fake:
        yield fake


async def test_without_settings_no_reranker_is_opened() -> None:
    assert await open_reranker(RerankSettings()) is None


async def test_a_rerank_server_is_opened_by_settings(fake: FakeRerank) -> None:
    outcomes: list[Outcome] = []
    settings = RerankSettings(url=fake.url("jina"), flavour="jina", model=fake.model, timeout_seconds=10)
    reranker = await open_reranker(settings, outcomes.append)
    assert reranker is not None
    texts = ["tea", "the turbine"]
    for _ in range(2):
        assert await reranker.rerank("turbine", texts) == pytest.approx(scores("turbine", texts))
    await reranker.aclose()
    assert (reranker.model, fake.stats.requests, outcomes) == (fake.model, 1, ["reranked", "cached"])


async def test_a_local_rerank_model_is_opened_by_settings(tmp_path: Path) -> None:
    folder = cross_encoder_kit.write(tmp_path / "overlap")
    reranker = await open_reranker(RerankSettings(onnx_path=folder, timeout_seconds=30))
    assert reranker is not None
    tea, turbine = await reranker.rerank("turbine", ["tea", "the turbine"])
    await reranker.aclose()
    assert turbine > tea
    assert reranker.model == "overlap"


async def test_a_rerank_server_together_with_a_local_model_is_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="choose one"):
        await open_reranker(RerankSettings(url="http://rerank.example", onnx_path=tmp_path))
