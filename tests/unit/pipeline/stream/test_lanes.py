"""Key lanes: order by key, waiting out the world, halving a failing batch, live before backfill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from pipeline.core.errors import Poison, Retryable
from pipeline.core.model import Lane
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stream import attempts, lanes
from pipeline.stream.lanes import Lanes
from tests.support.waiting import until
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic


def record(offset: int, key: bytes = b"k", lane: Lane = "live") -> Incoming:
    return Incoming("t", 0, offset, key, b"", [], lane)


class Recording(FinalStage):
    name = "recording"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012

    def __init__(self, work: Callable[[Sequence[Incoming]], None] = lambda _: None, batch_size: int = 4) -> None:
        self.batch_size = batch_size
        self.batches: list[list[Incoming]] = []
        self.aside: list[tuple[int, Exception]] = []
        self._work = work

    async def handle(self, batch: Sequence[Incoming]) -> None:
        await asyncio.sleep(0)
        self._work(batch)
        self.batches.append(list(batch))

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        self.aside.append((record.offset, error))


def build(stage: Recording, done: list[int], *, count: int = 1, queue: int = 100, batch_wait: float = 0) -> Lanes:
    return Lanes(
        stage,
        count=count,
        queue_size=queue,
        batch_wait_seconds=batch_wait,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda r, _: done.append(r.offset),
    )


async def drain(lanes_: Lanes, done: list[int], count: int) -> None:
    async with asyncio.timeout(10):
        while len(done) < count:
            await asyncio.sleep(0.001)
    await lanes_.stop(within_seconds=5)


async def test_records_of_one_key_are_handled_in_order() -> None:
    done: list[int] = []
    stage = Recording()
    running = build(stage, done, count=4)
    running.start()
    for n in range(40):
        await running.put(record(n, key=b"key-%d" % (n % 7)), None)
    await drain(running, done, 40)
    for key in {b"key-%d" % n for n in range(7)}:
        offsets = [r.offset for batch in stage.batches for r in batch if r.key == key]
        assert offsets == sorted(offsets)


async def test_fewer_backfill_lanes_have_larger_batches_and_keep_the_order_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "BACKFILL_LANES", {"recording": 1})
    done: list[int] = []
    in_progress: list[bytes | None] = []
    overlaps: list[bytes | None] = []

    class Watching(Recording):
        async def handle(self, batch: Sequence[Incoming]) -> None:
            keys = [r.key for r in batch]
            overlaps.extend(key for key in keys if key in in_progress)
            in_progress.extend(keys)
            await asyncio.sleep(0.005)
            for key in keys:
                in_progress.remove(key)
            await super().handle(batch)

    stage = Watching(batch_size=16)
    running = build(stage, done, count=8)
    for n in range(16):
        await running.put(record(n, b"key-%d" % n, lane="backfill"), None)
    for n in range(16, 32):
        await running.put(record(n, b"key-%d" % (n - 16)), None)
    running.start()
    await drain(running, done, 32)
    assert overlaps == []
    assert sum(batch[0].lane == "backfill" for batch in stage.batches) < 8, "not one batch in each of eight lanes"


async def test_live_records_that_come_together_are_one_batch() -> None:
    done: list[int] = []
    stage = Recording(batch_size=32)
    running = build(stage, done, count=8, batch_wait=0.5)
    running.start()
    for n in range(20):
        await running.put(record(n, b"key-%d" % n), None)
    await drain(running, done, 20)
    assert len(stage.batches) == 1


async def test_no_live_record_waits_for_a_slow_batch_of_other_keys() -> None:
    done: list[int] = []
    released = asyncio.Event()

    class Slow(Recording):
        async def handle(self, batch: Sequence[Incoming]) -> None:
            if any(r.key == b"slow" for r in batch):
                await released.wait()
            await super().handle(batch)

    stage = Slow()
    running = build(stage, done, count=4)
    running.start()
    await running.put(record(0, b"slow"), None)
    await asyncio.sleep(0.05)
    for n in range(1, 41):  # among them are records of the slow one's lane, and the slow key's own next one
        await running.put(record(n, b"slow" if n == 7 else b"key-%d" % n), None)
    await until(lambda: len(done) == 39)
    assert not {0, 7} & set(done)
    released.set()
    await drain(running, done, 41)
    assert done.index(0) < done.index(7)


async def test_after_a_pause_several_live_batches_begin_one_after_the_other() -> None:
    """The fifth waits until the lane has a batch every half hour on average."""
    done: list[int] = []
    stage = Recording(batch_size=100)
    running = build(stage, done, batch_wait=1_800)
    running.start()
    for n in range(lanes.LIVE_BURST):
        await running.put(record(n), None)
        await until(lambda count=n + 1: len(done) == count)  # type: ignore[misc]
    await running.put(record(lanes.LIVE_BURST), None)
    await asyncio.sleep(10 * lanes.GATHER_SECONDS)
    assert len(done) == lanes.LIVE_BURST
    await running.stop(within_seconds=5)


async def test_after_many_full_batches_and_a_pause_live_batches_begin_at_once_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there were: full batches do not wait, and leave no debt."""
    clock = [1_000.0]
    monkeypatch.setattr(lanes, "monotonic", lambda: clock[0])
    done: list[int] = []
    running = build(Recording(batch_size=2), done, batch_wait=100)
    running.start()
    for n in range(40):
        await running.put(record(n), None)
    await until(lambda: len(done) == 40)
    clock[0] += lanes.LIVE_BURST * 100
    async with asyncio.timeout(20):
        for n in range(40, 40 + lanes.LIVE_BURST):
            await running.put(record(n), None)
            await until(lambda count=n + 1: len(done) == count)  # type: ignore[misc]
    await running.stop(within_seconds=5)


async def test_a_poison_record_is_set_aside_and_the_others_are_handled() -> None:
    done: list[int] = []

    def work(batch: Sequence[Incoming]) -> None:
        if any(r.offset == 5 for r in batch):
            raise Poison("bad", "five")

    stage = Recording(work, batch_size=8)
    running = build(stage, done)
    for n in range(8):
        await running.put(record(n), None)
    running.start()
    await drain(running, done, 8)
    assert [offset for offset, _ in stage.aside] == [5]
    assert sorted(r.offset for batch in stage.batches for r in batch) == [0, 1, 2, 3, 4, 6, 7]


async def test_an_unexpected_exception_sets_aside_only_the_record_that_raised_it() -> None:
    done: list[int] = []

    def work(batch: Sequence[Incoming]) -> None:
        if any(r.offset == 1 for r in batch):
            raise ZeroDivisionError

    stage = Recording(work)
    running = build(stage, done)
    for n in range(3):
        await running.put(record(n), None)
    running.start()
    await drain(running, done, 3)
    assert [(offset, type(e)) for offset, e in stage.aside] == [(1, ZeroDivisionError)]


async def test_during_an_outage_a_record_is_retried_and_not_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.01)
    done: list[int] = []
    left = [3]

    def work(_: Sequence[Incoming]) -> None:
        if left[0]:
            left[0] -= 1
            raise Retryable("down")

    stage = Recording(work)
    running = build(stage, done)
    running.start()
    await running.put(record(0), None)
    await drain(running, done, 1)
    assert stage.aside == []
    assert left == [0]


class Held(Recording):
    """Its backfill batches stay at work until they are let go."""

    def __init__(self) -> None:
        super().__init__(batch_size=2)
        self.begun: list[int] = []
        self.go = asyncio.Event()
        self.is_crowded = False

    async def handle(self, batch: Sequence[Incoming]) -> None:
        self.begun += [r.offset for r in batch]
        if batch[0].lane == "backfill":
            await self.go.wait()
        await super().handle(batch)

    async def is_backlogged(self) -> bool:
        await asyncio.sleep(0.01)
        return self.is_crowded


async def test_a_live_record_waits_only_for_backfill_of_the_same_document() -> None:
    done: list[int] = []
    stage = Held()
    running = build(stage, done)
    running.start()
    await running.put(record(0, key=b"same", lane="backfill"), None)
    await until(lambda: stage.begun == [0])
    await running.put(record(1, key=b"same"), None)
    await running.put(record(2, key=b"other"), None)
    await until(lambda: done == [2])
    stage.go.set()
    await drain(running, done, 3)
    assert done == [2, 0, 1]


@pytest.mark.parametrize(("failing", "beside"), [("backfill", "live"), ("live", "backfill")])
async def test_a_record_that_keeps_failing_does_not_delay_the_other_lane(
    monkeypatch: pytest.MonkeyPatch, failing: Lane, beside: Lane
) -> None:
    """Neither the document that was in its batch and is done, nor, once it is parked, its own."""
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.01)
    monkeypatch.setattr(attempts, "SET_ASIDE_AFTER_TRIES", 10**9)
    done: list[int] = []

    def work(batch: Sequence[Incoming]) -> None:
        if any(r.offset == 1 for r in batch):
            raise Retryable("down")

    stage = Recording(work)
    running = build(stage, done)
    await running.put(record(0, key=b"y", lane=failing), None)
    await running.put(record(1, key=b"x", lane=failing), None)
    running.start()
    await until(lambda: done == [0])
    await running.put(record(2, key=b"y", lane=beside), None)
    await running.put(record(3, key=b"x", lane=beside), None)
    await drain(running, done, 3)
    assert sorted(done) == [0, 2, 3]
    assert stage.aside == []


async def test_during_live_work_backfill_uses_one_lane_at_a_time() -> None:
    done: list[int] = []
    stage = Held()
    running = build(stage, done, count=4)
    running.start()
    await running.put(record(0), None)
    await until(lambda: done == [0])
    for n in range(1, 9):
        await running.put(record(n, key=b"key-%d" % n, lane="backfill"), None)
    await until(lambda: bool(stage.begun[1:]))
    await asyncio.sleep(0.3)
    assert len(stage.begun[1:]) <= stage.batch_size, "though each lane asked whether the stores are backlogged"
    stage.go.set()
    await drain(running, done, 9)


async def test_backfill_waits_while_the_next_stage_is_crowded() -> None:
    done: list[int] = []
    stage = Held()
    stage.is_crowded = True
    stage.go.set()
    running = build(stage, done)
    running.start()
    await running.put(record(0, lane="backfill"), None)
    await running.put(record(1, key=b"live"), None)
    await until(lambda: done == [1])
    await asyncio.sleep(0.2)
    assert done == [1]
    stage.is_crowded = False
    await drain(running, done, 2)


async def test_a_full_lane_blocks_further_records_of_its_topic() -> None:
    done: list[int] = []
    running = build(Recording(), done, queue=2)
    await running.put(record(0), None)
    await running.put(record(1), None)
    third = asyncio.create_task(running.put(record(2), None))
    await asyncio.sleep(0.02)
    assert not third.done()
    running.start()
    await drain(running, done, 3)


async def test_stopping_leaves_waiting_records_undone() -> None:
    done: list[int] = []

    def work(_: Sequence[Incoming]) -> None:
        raise Retryable("down")

    running = build(Recording(work), done)
    running.start()
    for n in range(6):
        await running.put(record(n), None)
    await asyncio.sleep(0.02)
    await running.stop(within_seconds=5)
    assert done == []


async def test_sources_take_turns_so_that_a_busy_one_does_not_delay_another() -> None:
    done: list[int] = []
    stage = Recording(batch_size=4)
    running = build(stage, done)
    for n in range(40):
        await running.put(record(n, key=b"loud/wiki/%d" % n), None)
    for n in range(40, 42):
        await running.put(record(n, key=b"quiet/wiki/%d" % n), None)
    running.start()
    await drain(running, done, 42)
    assert [r.offset for r in stage.batches[0]] == [0, 40, 1, 41]
    assert [r.offset for batch in stage.batches[1:] for r in batch] == list(range(2, 40))
