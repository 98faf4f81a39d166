"""A client that a server with a limit sends away uses most of the limit, and asks for no more: in simulated time."""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bench.embedding_client import Bucket, Window
from pipeline.core.errors import Retryable
from pipeline.embedding import pace as module
from pipeline.embedding.pace import Pace, Place, Throttled, TooLarge
from pipeline.embedding.rate import ENOUGH, SHRINK_REFUSALS, SHRINK_SECONDS, Rate, RequestSize

LATENCY = 0.05
SECONDS = 120.0
LEARNING_SECONDS = 30.0
WINDOW = 10.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time: when nothing is ready, it is at once the time of what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLoop]:
    made = SimulatedLoop()
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)  # type: ignore[attr-defined]
    monkeypatch.setattr(module.random, "random", random.Random(5).random)  # type: ignore[attr-defined]
    yield made
    monkeypatch.undo()
    made.close()


@dataclass
class Server:
    loop: SimulatedLoop
    bucket: Bucket | Window
    whole_seconds: bool = True
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)

    async def __call__(self, place: Place) -> None:
        now = self.loop.now
        wait = self.bucket.take(1.0, now)
        (self.refused if wait else self.answered).append(now)
        if wait:
            raise Throttled("429", retry_after=math.ceil(wait) if self.whole_seconds else wait)
        await asyncio.sleep(LATENCY)


async def run_callers(pace: Pace, server: Server, until: float) -> None:
    async def caller() -> None:
        while server.loop.now < until:
            try:
                await pace.run(server, size=1_000, deadline=server.loop.now + 20)
            except Retryable as away:
                await asyncio.sleep(away.retry_after or 0.0)

    await asyncio.gather(*(caller() for _ in range(8)))


def pace() -> Pace:
    return Pace(parallel=4, base_seconds=0.5)


@pytest.mark.parametrize(
    ("bucket", "whole_seconds"),
    [
        (Bucket(20.0, room=1.0), True),
        (Bucket(20.0, room=0.06), False),
        (Bucket(60.0, room=1.0), True),
        (Bucket(5.0, room=10.0), True),
        (Bucket(0.5, room=60.0), True),
        (Bucket(20.0, room=0.5), True),
        (Window(20.0), True),
        (Window(5.0), False),
    ],
    ids=[
        "20 a second",
        "20 a second, none saved up",
        "60 a second",
        "5 a second, 50 saved up",
        "30 a minute",
        "20 a second, half of it saved up",
        "20 in any second",
        "5 in any second",
    ],
)
def test_at_least_80_percent_of_a_servers_limit_is_used_and_little_is_requested_beyond(
    loop: SimulatedLoop, bucket: Bucket | Window, whole_seconds: bool
) -> None:
    server = Server(loop, bucket, whole_seconds)
    loop.run_until_complete(run_callers(pace(), server, loop.now + SECONDS))
    begins = server.refused[0] + LEARNING_SECONDS
    ends = begins + SECONDS - 2 * LEARNING_SECONDS
    answered = sum(begins <= at < ends for at in server.answered)
    assert answered >= 0.8 * bucket.rate * (ends - begins)
    times = sorted(at for at in (*server.answered, *server.refused) if server.refused[0] < at < ends)
    most = max(bisect_left(times, start + WINDOW) - n for n, start in enumerate(times))
    assert most <= bucket.rate * (WINDOW + bucket.room)


def test_refusals_before_any_success_do_not_lower_the_rate(loop: SimulatedLoop) -> None:
    server = Server(loop, Bucket(1_000.0, room=100.0))
    refusals = iter(range(6))

    async def hesitant(place: Place) -> None:
        if next(refusals, None) is not None:
            raise Throttled("429", retry_after=1.0)
        await server(place)

    async def all_at_once() -> None:
        of = pace()
        await asyncio.gather(*(of.run(hesitant, size=1, deadline=loop.now + 60) for _ in range(100)))

    began = loop.now
    loop.run_until_complete(all_at_once())
    assert len(server.answered) == 100
    assert server.answered[-1] - server.answered[0] <= 100 / 4 * LATENCY
    assert server.answered[0] - began >= 1.0


def test_a_low_rate_learned_in_a_bad_moment_is_forgotten_within_a_minute(loop: SimulatedLoop) -> None:
    """A second in which the server let ten through, and never refused again."""
    server = Server(loop, Bucket(10.0, room=1.0))
    of = pace()
    loop.run_until_complete(run_callers(of, server, loop.now + 1))
    assert server.refused
    server.bucket = Bucket(1_000.0, room=100.0)
    loop.run_until_complete(run_callers(of, server, loop.now + 60))
    last = loop.now - 5
    assert sum(at >= last for at in server.answered) >= 5 * 60


def test_a_time_of_few_requests_does_not_lower_the_learned_rate(loop: SimulatedLoop) -> None:
    """A request a minute for an hour, then a burst that is refused: the hour says nothing of what is allowed."""
    server = Server(loop, Bucket(20.0))
    of = pace()

    async def seldom() -> None:
        for _ in range(60):
            await of.run(server, size=1, deadline=loop.now + 20)
            await asyncio.sleep(60)

    loop.run_until_complete(seldom())
    began = loop.now
    loop.run_until_complete(run_callers(of, server, began + 10))
    assert server.refused
    assert sum(at >= began for at in server.answered) >= 0.8 * 10 * 20


def test_a_small_request_waits_less_than_a_large_one_under_a_token_limit() -> None:
    """A limit of tokens, learned from batches of thousands, hardly holds a question of ten."""
    rate = Rate()
    rate.wakes(0.0)
    for _ in range(20):
        rate.answered(4_000)
    rate.refused(10.0, 11.0)
    rate.start(11.0, 10)
    assert rate.next(11.0) - 11.0 < 0.01
    rate.start(11.0, 4_000)
    assert rate.next(11.0) - 11.0 > 0.5


def test_only_a_retry_after_of_less_than_a_second_is_taken_as_the_cost_of_one_request() -> None:
    rate = Rate()
    rate.wakes(0.0)
    rate.refused(0.1, 0.15, retry_after=0.05)
    rate.start(0.15, 1_000)
    assert rate.next(0.15) - 0.15 == pytest.approx(0.05)
    of_whole_seconds = Rate()
    of_whole_seconds.wakes(0.0)
    of_whole_seconds.refused(0.1, 1.1, retry_after=1.0)
    of_whole_seconds.start(1.1, 1_000)
    assert of_whole_seconds.next(1.1) == 1.1


def test_a_rate_is_learned_from_requests_without_a_token() -> None:
    """Some tokenizers drop invisible characters: a refusal after ten such texts was an error of the worker."""
    rate = Rate()
    for _ in range(ENOUGH):
        rate.answered(0)
    rate.refused(1.0, 2.0)
    rate.start(2.0, 0)
    assert rate.next(2.0) == 2.0
    rate.start(2.0, 1_000)
    assert rate.next(2.0) > 2.0


@pytest.mark.parametrize("whole_seconds", [True, False])
def test_requests_become_small_enough_for_a_limit_of_tokens_a_minute(loop: SimulatedLoop, whole_seconds: bool) -> None:
    """With a limit of 30,000 tokens a minute, a request of 57,000 was never answered: a first load stood still."""
    of, bucket = pace(), Bucket(30_000 / 60, room=60.0)
    began, answered = loop.now, list[tuple[float, int]]()

    async def caller() -> None:
        while loop.now < began + 3_600:
            size = int(min(57_000, of.most))

            async def request(_place: Place, size: int = size) -> None:
                if wait := bucket.take(size, loop.now):
                    raise Throttled("429", retry_after=math.ceil(wait) if whole_seconds else wait)
                answered.append((loop.now, size))
                await asyncio.sleep(LATENCY)

            try:
                await of.run(request, size=size, deadline=loop.now + 20, divisible=True)
            except TooLarge:
                pass
            except Retryable as away:
                await asyncio.sleep(away.retry_after or 0.0)

    async def callers() -> None:
        await asyncio.gather(*(caller() for _ in range(4)))

    loop.run_until_complete(callers())
    assert answered[0][0] - began < 300
    last = [size for at, size in answered if at >= began + 600]
    assert sum(last) >= 0.6 * 30_000 * 50
    assert max(last) <= 30_000


@pytest.mark.parametrize(("answered", "most"), [(50_000, math.inf), (49_999, 49_999), (20, 25_000)])
def test_requests_become_smaller_when_none_as_large_was_answered_for_a_minute(answered: int, most: float) -> None:
    """Small requests are answered beside large ones that never are."""
    size = RequestSize()
    for second in range(int(SHRINK_SECONDS)):
        assert not size.refused(50_000, sent=second, now=second + 0.1)
    size.answered(answered)
    assert size.refused(50_000, sent=SHRINK_SECONDS, now=SHRINK_SECONDS + 1) == (most < 50_000)
    assert size.most == most


def test_requests_that_are_still_too_large_become_smaller_at_once() -> None:
    size = RequestSize()
    for second in range(int(SHRINK_SECONDS) + 1):
        size.refused(50_000, sent=second, now=second + 0.1)
    for most in (12_500, 6_250):
        moments = [second := second + 1 for _ in range(SHRINK_REFUSALS)]
        shrunk = [size.refused(int(size.most), sent=moment, now=moment + 0.1) for moment in moments]
        assert (shrunk, size.most) == ([False] * (SHRINK_REFUSALS - 1) + [True], most)


def test_refusals_of_requests_that_ran_at_once_make_no_request_smaller() -> None:
    size = RequestSize()
    assert not size.refused(50_000, sent=0.0, now=0.1)
    for _ in range(2 * SHRINK_REFUSALS):
        assert not size.refused(50_000, sent=0.05, now=2 * SHRINK_SECONDS)
    for second in range(SHRINK_REFUSALS - 2):
        assert not size.refused(50_000, sent=2 * SHRINK_SECONDS + second, now=2 * SHRINK_SECONDS + second + 0.5)
    assert size.refused(50_000, sent=3 * SHRINK_SECONDS, now=3 * SHRINK_SECONDS + 0.5)
    assert size.most == 25_000


def test_a_size_that_was_learned_in_an_outage_is_forgotten_after_it() -> None:
    size, second = RequestSize(), 0.0
    while size.most > 300:
        second += 10
        size.refused(int(min(size.most, 100_000)), sent=second, now=second + 1)
    answers = 0
    while size.most < 100_000:
        size.answered(int(size.most))
        answers += 1
    assert answers <= math.log2(100_000 / 150) + 1
    most = size.most
    size.answered(20)
    assert size.most == most, "small requests say nothing of large ones"


def test_a_limit_that_is_the_same_for_every_request_is_seldom_exceeded_once_it_is_known() -> None:
    """Each answer was followed by three refusals, and each of them holds up all requests."""
    size, now, answers, refusals = RequestSize(), 0.0, 0, 0
    while answers < 200:
        tokens, now = int(min(57_000, size.most)), now + 1
        if tokens > 5_000:
            refusals += 1
            size.refused(tokens, sent=now - 1, now=now)
        else:
            answers += 1
            size.answered(tokens)
    assert refusals < SHRINK_SECONDS + answers / 6
    assert size.most > 4_500
