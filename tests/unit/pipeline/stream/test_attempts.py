"""One record that fails while others succeed is set aside; a world that is down never is to blame on a record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.model import Lane
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import FinalStage, Flooded, Incoming, used
from pipeline.stream import attempts
from pipeline.stream.lanes import Lanes
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic


class Stage(FinalStage):
    name = "stage"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012
    batch_size = 2

    def __init__(self, work: Callable[[int], None]) -> None:
        self.aside: list[int] = []
        self._work = work

    async def handle(self, batch: Sequence[Incoming]) -> None:
        await asyncio.sleep(0)
        for record in batch:
            self._work(record.offset)

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        self.aside.append(record.offset)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.001)
    monkeypatch.setattr("pipeline.core.breaker.BASE_SECONDS", 0.001)
    monkeypatch.setattr("pipeline.core.breaker.CAP_SECONDS", 0.005)
    monkeypatch.setattr("pipeline.core.breaker.TRIAL_POLL_SECONDS", 0.001)


async def run(stage: Stage, records: int, *, until: Callable[[list[int]], bool], lanes: int = 2) -> list[int]:
    done: list[int] = []
    running = Lanes(
        stage,
        count=lanes,
        queue_size=1000,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda record, _: done.append(record.offset),
    )
    for n in range(records):
        await running.put(Incoming("t", 0, n, b"%d" % n, b"", [], "live"), None)
    running.start()
    try:
        async with asyncio.timeout(10):
            while not until(done):
                await asyncio.sleep(0.001)
    finally:
        await running.stop(within_seconds=5)
    return done


@pytest.mark.parametrize(
    "error",
    [Retryable("500", service="embedding"), Misconfigured("XX000"), OSError("no buffer"), MemoryError()],
    ids=lambda e: type(e).__name__,
)
async def test_a_record_that_always_fails_while_others_succeed_is_set_aside(error: Exception) -> None:
    def work(offset: int) -> None:
        if offset == 7:
            raise error
        used("embedding")

    stage = Stage(work)
    done = await run(stage, 40, until=lambda done: len(done) == 40)
    assert stage.aside == [7]
    assert sorted(done) == list(range(40))


async def test_a_failing_record_is_set_aside_with_a_single_lane() -> None:
    def work(offset: int) -> None:
        if offset == 0:
            raise Retryable("500", service="embedding")
        used("embedding")

    stage = Stage(work)
    done = await run(stage, 20, until=lambda done: len(done) == 20, lanes=1)
    assert stage.aside == [0]
    assert done[-1] == 0 or 0 in done


async def test_the_other_records_of_a_failing_batch_are_done_first() -> None:
    """Nobody proves that the service works but those that stand in the same batch: they come first."""

    def work(offset: int) -> None:
        if offset == 0:
            raise Retryable("500", service="embedding")
        used("embedding")

    stage = Stage(work)
    stage.batch_size = 4
    assert sorted(await run(stage, 4, until=lambda done: len(done) >= 3, lanes=1))[-3:] == [1, 2, 3]


async def test_successes_with_another_service_do_not_set_a_failing_record_aside() -> None:
    tries = 0

    def work(offset: int) -> None:
        nonlocal tries
        if offset % 2:
            tries += 1
            raise Retryable("the model is down", service="embedding")
        used("kafka")

    stage = Stage(work)
    await run(stage, 30, until=lambda _: tries > 200)
    assert stage.aside == []


async def test_a_deferred_record_is_never_set_aside() -> None:
    tries = 0

    def work(offset: int) -> None:
        nonlocal tries
        if offset == 3:
            tries += 1
            if tries < 60:
                raise Deferred("429", service="embedding")
        used("embedding")

    stage = Stage(work)
    done = await run(stage, 30, until=lambda done: len(done) == 30)
    assert stage.aside == []
    assert sorted(done) == list(range(30))


class Alone(Deferred):
    alone = True


async def test_a_record_that_fails_alone_holds_up_neither_its_batch_nor_later_records() -> None:
    """A text that the embedding server answered 429 each time held up the records of its batch for ten tries, and
    those that came after it in its lane for as long as the server asked to wait."""
    tries = 0

    def work(offset: int) -> None:
        nonlocal tries
        if offset == 0:
            tries += 1
            raise Alone("429", retry_after=60.0, service="embedding")
        used("embedding")

    stage = Stage(work)
    stage.batch_size = 8
    done = await run(stage, 24, until=lambda done: len(done) == 23, lanes=1)
    assert sorted(done) == list(range(1, 24))
    assert (stage.aside, tries <= 4) == ([], True)


@pytest.mark.parametrize(("wait", "most_tries"), [(0.0, 6), (60.0, 1)])
async def test_a_record_that_fails_alone_is_put_off_where_an_operator_sees_it(wait: float, most_tries: int) -> None:
    """It was tried again for as long as the worker ran, its partition was not committed, and `penstock why` did not
    say what it waited for. No breaker opens: the service answers others."""
    tries = 0
    put_off: list[tuple[int, str]] = []

    class PuttingOff(Stage):
        async def put_off(self, record: Incoming, error: Retryable) -> bool:
            put_off.append((record.offset, str(error)))
            return True

    def work(_: int) -> None:
        nonlocal tries
        tries += 1
        raise Alone("429", retry_after=wait, service="embedding")

    stage = PuttingOff(work)
    stage.batch_size = 1
    assert sorted(await run(stage, 4, until=lambda done: len(done) == 4, lanes=4)) == [0, 1, 2, 3]
    assert sorted(put_off) == [(n, "429") for n in range(4)]
    assert (stage.aside, tries) == ([], 4 * most_tries)


@pytest.mark.parametrize("wait", [0.0, 60.0])
async def test_a_record_that_fails_alone_without_being_deferred_is_set_aside(wait: float) -> None:
    """Whether a text that the server answered 500 each time was set aside or waited without a failure depended on how
    many other batches succeeded in its first seconds."""

    class Failing(Retryable):
        alone = True

    def work(offset: int) -> None:
        if offset == 0:
            raise Failing("500", retry_after=wait, service="embedding")

    stage = Stage(work)
    stage.batch_size = 1
    done = await run(stage, 2, until=lambda done: len(done) == 2, lanes=2)
    assert sorted(done) == [0, 1]
    assert stage.aside == [0]


async def test_a_record_held_back_by_the_dead_letter_limit_is_not_set_aside() -> None:
    def work(offset: int) -> None:
        if offset == 3:
            raise Retryable("too many dead letters", service="dead-letters")

    stage = Stage(work)
    done: list[int] = await run(stage, 30, until=lambda done: len(done) == 29)
    await asyncio.sleep(0.05)
    assert stage.aside == []
    assert 3 not in done


async def test_reaching_the_dead_letter_limit_in_backfill_lanes_does_not_delay_live_records() -> None:
    """However many lanes hold some: it is no outage, the breaker stays closed, and `status` says what is waited for."""
    full = True

    class Flooding(Stage):
        async def handle(self, batch: Sequence[Incoming]) -> None:
            bad = [record for record in batch if record.offset % 2]
            if full and bad:
                raise Flooded("too many", bad, retry_after=0.01)
            used("dead-letters")

    stage, done = Flooding(lambda _: None), list[int]()
    running = Lanes(
        stage,
        count=8,
        queue_size=1000,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda record, _: done.append(record.offset),
    )
    for n in range(32):
        await running.put(Incoming("t", 0, n, b"%d" % n, b"", [], "backfill"), None)
    running.start()
    try:
        async with asyncio.timeout(60):
            while running.trouble is None:
                await asyncio.sleep(0.001)
            for n in range(32, 64, 2):  # of the same documents, too
                await running.put(Incoming("t", 0, n, b"%d" % (n - 31), b"", [], "live"), None)
            while not set(range(32, 64, 2)) <= set(done) or running.trouble is None:
                await asyncio.sleep(0.001)
            assert running.trouble.service == "dead-letters"
            assert not any(offset % 2 for offset in done)
            full = False
            while len(done) < 48:
                await asyncio.sleep(0.001)
    finally:
        await running.stop(within_seconds=5)
    assert running.trouble is None
    assert sorted(done) == [*range(32), *range(32, 64, 2)]


async def test_records_beyond_the_dead_letter_limit_keep_no_lane_from_other_records() -> None:
    """Two bad membership records for each lane of the identities stage stopped everybody's revocations for as long as
    the limit's pause, although only the record of another source, which waited behind them, could end it."""
    full = True
    tries: list[int] = []

    class Flooding(Stage):
        batch_size = 3

        async def handle(self, batch: Sequence[Incoming]) -> None:
            bad = [record for record in batch if record.offset < 60]
            if full and bad:
                tries.append(len(bad))
                raise Flooded("too many", bad, retry_after=0.05)
            used("dead-letters")

    stage, done = Flooding(lambda _: None), list[int]()
    running = Lanes(
        stage,
        count=2,
        queue_size=10,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda record, _: done.append(record.offset),
    )
    running.start()
    try:
        async with asyncio.timeout(30):
            for n in range(70):
                await running.put(Incoming("t", 0, n, b"%d" % n, b"", [], "live"), None)
            while len(done) < 10:
                await asyncio.sleep(0.001)
            assert sorted(done) == [*range(60, 70)]
            tries.clear()
            began = time.monotonic()
            while len(tries) < 6:
                await asyncio.sleep(0.001)
            rounds = (time.monotonic() - began) / 0.05 + 2
            assert sum(tries) <= 2 * 3 * rounds, "each lane tries its first batch again, and no other"
            full = False
            while len(done) < 70:
                await asyncio.sleep(0.001)
    finally:
        await running.stop(within_seconds=5)
    assert sorted(done) == [*range(70)]
    assert running.trouble is None


async def test_records_beyond_the_dead_letter_limit_are_dropped_with_their_partition() -> None:
    full = True

    class Flooding(Stage):
        async def handle(self, batch: Sequence[Incoming]) -> None:
            if full:
                raise Flooded("too many", batch, retry_after=0.01)

    done: list[int] = []
    running = Lanes(
        Flooding(lambda _: None),
        count=1,
        queue_size=10,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda record, _: done.append(record.offset),
    )
    for n in range(8):
        await running.put(Incoming("t", n % 2, n, b"%d" % n, b"", [], "live"), n % 2)
    running.start()
    try:
        async with asyncio.timeout(10):
            while sum(len(batch.items) for lane in running._lanes for batch in lane.held) < 7:
                await asyncio.sleep(0.001)
            running.forget(lambda partition: partition == 1)
            full = False
            while len(done) < 4:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
    finally:
        await running.stop(within_seconds=5)
    assert {0, 2, 4, 6} <= set(done)
    assert len(done) <= 5, "at most the batch that was tried at that moment"


async def test_records_that_were_held_back_by_the_dead_letter_limit_are_split_when_they_fail_in_another_way() -> None:
    """The batch was halved into none of its records and all of them, again and again."""
    is_full, tries = True, 0

    class Flooding(Stage):
        async def handle(self, batch: Sequence[Incoming]) -> None:
            nonlocal is_full, tries
            tries += 1
            assert batch
            if is_full:
                is_full = False
                raise Flooded("too many", batch, retry_after=0)
            await super().handle(batch)

    def work(offset: int) -> None:
        if offset == 1:
            raise ZeroDivisionError

    stage = Flooding(work)
    assert await run(stage, 2, until=lambda done: len(done) == 2, lanes=1) == [0, 1]
    assert (stage.aside, tries) == ([1], 4)


async def test_no_trouble_is_shown_after_the_dead_letter_of_a_record_that_had_to_wait() -> None:
    left = 2

    class Flooding(Stage):
        async def set_aside(self, record: Incoming, error: Exception) -> None:
            nonlocal left
            if left:
                left -= 1
                raise Flooded("too many", [record], retry_after=0.01)
            await super().set_aside(record, error)

    def work(_: int) -> None:
        raise ZeroDivisionError

    done: list[int] = []
    running = Lanes(
        Flooding(work),
        count=1,
        queue_size=10,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda record, _: done.append(record.offset),
    )
    running.start()
    try:
        async with asyncio.timeout(10):
            await running.put(Incoming("t", 0, 0, b"0", b"", [], "live"), None)
            while running.trouble is None:
                await asyncio.sleep(0.001)
            while not done:
                await asyncio.sleep(0.001)
    finally:
        await running.stop(within_seconds=5)
    assert running.trouble is None


async def test_the_circuit_breaker_names_the_failed_service_and_closes_when_it_recovers() -> None:
    down = True
    seen: list[str | None] = []

    def work(_: int) -> None:
        if down:
            raise Retryable("refused", service="elasticsearch")
        used("elasticsearch")

    stage = Stage(work)
    done: list[int] = []
    metrics = Metrics()
    running = Lanes(
        stage,
        count=4,
        queue_size=100,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=metrics,
        on_done=lambda record, _: done.append(record.offset),
    )
    for n in range(20):
        await running.put(Incoming("t", 0, n, b"%d" % n, b"", [], "live"), None)
    running.start()

    def gauge() -> float | None:
        return metrics.registry.get_sample_value(
            "penstock_breaker_open", {"stage": "stage", "service": "elasticsearch"}
        )

    async with asyncio.timeout(10):
        while running.trouble is None:
            await asyncio.sleep(0.001)
        seen.append(running.trouble.service)
        assert gauge() == 1
        down = False
        while len(done) < 20:
            await asyncio.sleep(0.001)
    assert running.trouble is None
    assert gauge() == 0
    assert seen == ["elasticsearch"]
    assert stage.aside == []
    await running.stop(within_seconds=5)
