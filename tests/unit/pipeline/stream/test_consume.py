"""Offsets that may be committed, whatever happens to batches and partitions: the consuming module without its
broker."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import faust
import pytest
from aiokafka.errors import KafkaConnectionError
from faust.transport.drivers.aiokafka import Consumer as FaustConsumer
from faust.types import TP

from pipeline.core.errors import Poison, Retryable
from pipeline.core.kafka_log import Witness, witness
from pipeline.core.model import Lane
from pipeline.core.progress import Progress
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings, StreamSettings
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stream import attempts
from pipeline.stream import consume as consuming
from pipeline.stream.consume import Consumption
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

PARTITIONS = [TP("index.live.v1", n) for n in range(3)]
RECORDS = 60


class Stage(FinalStage):
    name = "stage"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012
    batch_size = 6

    def __init__(self, chance: random.Random) -> None:
        self.finished: set[tuple[int, int]] = set()
        self._chance = chance

    async def handle(self, batch: Sequence[Incoming]) -> None:
        for _ in range(self._chance.randint(0, 3)):
            await asyncio.sleep(0)
        places = {(r.partition, r.offset) for r in batch}
        if any(offset % 13 == 5 for _, offset in places):
            raise Poison("bad", "one of them")
        if self._chance.random() < 0.3:
            raise Retryable("down")
        self.finished |= places

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        if self._chance.random() < 0.3:
            raise Retryable("down")
        self.finished.add((record.partition, record.offset))


@dataclass
class Message:
    tp: TP
    offset: int
    key: bytes
    value: bytes = b""
    timestamp: float = 1.5
    headers: tuple[()] = ()

    @property
    def topic(self) -> str:
        return str(self.tp.topic)

    @property
    def partition(self) -> int:
        return int(self.tp.partition)


@dataclass
class Event:
    message: Message

    def ack(self) -> None: ...


@dataclass
class Broker:
    """One consumer's side of a group: it reads each partition from what was committed when it was assigned."""

    waiting: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    committed: dict[TP, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    position: dict[TP, int] = field(default_factory=dict)

    def noack(self) -> Broker:
        return self

    async def events(self) -> AsyncIterator[Event]:
        while True:
            yield await self.waiting.get()

    def fetch(self, tp: TP, chance: random.Random) -> None:
        for _ in range(chance.randint(0, 8)):
            if self.position[tp] < RECORDS:
                offset = self.position[tp]
                self.waiting.put_nowait(Event(Message(tp, offset, b"%d" % (offset % 7))))
                self.position[tp] += 1


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.001)
    monkeypatch.setattr("pipeline.core.breaker.BASE_SECONDS", 0.001)
    monkeypatch.setattr("pipeline.core.breaker.CAP_SECONDS", 0.002)
    monkeypatch.setattr("pipeline.core.breaker.TRIAL_POLL_SECONDS", 0.0005)
    monkeypatch.setattr(consuming, "MAX_IN_FLIGHT_RECORDS", 20)


async def test_no_commit_passes_an_unfinished_record_through_failures_and_rebalances() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    stage, broker = Stage(chance), Broker()
    settings = StreamSettings(lanes=2, lane_queue=5, batch_wait_seconds=0)
    unused: Any = None  # the guard's, which does not run here
    consumption = Consumption(stage, kafka=KafkaSettings(), stream=settings, metrics=Metrics(), pool=unused)
    consumption._lanes.start()
    agent = asyncio.create_task(consumption._agent("live")(broker))
    mine: set[TP] = set()

    def commit() -> None:
        for tp in mine:
            offset = consumption._progress.committable(tp)
            if offset is not None and offset > broker.committed[tp]:
                undone = [n for n in range(offset) if (tp.partition, n) not in stage.finished]
                assert undone == [], f"{tp} committed at {offset}"
                broker.committed[tp] = offset

    async def rebalance(assigned: set[TP]) -> None:
        nonlocal mine
        while not broker.waiting.empty():
            broker.waiting.get_nowait()
        await consumption._revoked(None, mine)
        mine = set()
        for _ in range(chance.randint(1, 20)):
            await asyncio.sleep(0)
        mine, broker.position = assigned, {tp: broker.committed[tp] for tp in assigned}
        consumption._progress.open(assigned)  # the consumer does, before faust's signal
        await consumption._assigned(None, assigned)

    try:
        async with asyncio.timeout(60):
            await rebalance(set(PARTITIONS))
            while any(offset < RECORDS for offset in broker.committed.values()):
                for tp in mine:
                    broker.fetch(tp, chance)
                if chance.random() < 0.02:
                    await rebalance({tp for tp in PARTITIONS if chance.random() < 0.8})
                elif not mine:
                    await rebalance(set(PARTITIONS))
                await asyncio.sleep(chance.choice((0, 0, 0.001)))
                commit()
                assert not agent.done()
    finally:
        agent.cancel()
        await consumption._lanes.stop(within_seconds=5)


@dataclass
class Commits:
    """The consumer of PARTITIONS in which the record at offset 4 is done, and what it hands to Kafka."""

    stored: set[TP]
    """The partitions whose marks the guard stores."""
    progress: Progress[TP] = field(default_factory=Progress)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    committed: dict[TP, int] = field(default_factory=dict)

    async def marked(self, done: Mapping[TP, Witness]) -> set[TP]:
        return self.stored & done.keys()

    def consumer(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        async def commit(_consumer: FaustConsumer, offsets: Mapping[TP, int], *_: object) -> bool:
            self.committed.update(offsets)
            return True

        monkeypatch.setattr(FaustConsumer, "_commit_offsets", commit)
        monkeypatch.setattr(FaustConsumer, "_commit", commit)
        self.progress.open(PARTITIONS)
        for tp in PARTITIONS:
            token = self.progress.arrived(tp, 4, witness(4, 0, b"key", b"value"))
            assert token is not None
            self.progress.finished(tp, token)
        guard: Any = self
        kind = consuming._consumer_class(self.progress, guard, self.lock)
        consumer: Any = object.__new__(kind)  # without the broker that its constructor needs
        consumer._commit_due = {}
        return consumer


async def test_only_offsets_whose_marks_are_stored_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Commits(stored={PARTITIONS[1]})
    consumer = commits.consumer(monkeypatch)
    assert await consumer._commit_offsets(dict.fromkeys(PARTITIONS, 5))
    assert commits.committed == {PARTITIONS[1]: 5}


async def test_a_commit_that_began_before_an_offset_was_taken_back_does_not_undo_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = Commits(stored=set(PARTITIONS))
    consumer = commits.consumer(monkeypatch)
    await commits.lock.acquire()  # the guard commits an earlier offset of one partition
    late = asyncio.create_task(consumer._commit(dict.fromkeys(PARTITIONS, 5)))
    await asyncio.sleep(0)
    commits.progress.close([PARTITIONS[0]])
    commits.lock.release()
    assert await late
    assert commits.committed == dict.fromkeys(PARTITIONS[1:], 5)


async def test_a_partition_with_very_many_records_in_flight_is_not_read_while_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next record waited for room in the loop that all partitions of the topic share: one record that waited for
    the end of a flood of dead letters stopped them all."""
    read: list[set[TP]] = []

    async def getmany(_consumer: FaustConsumer, partitions: set[TP], _timeout: float) -> dict[TP, object]:
        read.append(partitions)
        return {}

    commits = Commits(stored=set())
    consumer = commits.consumer(monkeypatch)
    consumer._held = Counter()
    monkeypatch.setattr(FaustConsumer, "_getmany", getmany)
    tokens = [commits.progress.arrived(PARTITIONS[0], n) for n in range(consuming.STOP_READING_RECORDS)]
    await consumer._getmany(set(PARTITIONS), 1.0)
    assert tokens[0] is not None
    commits.progress.finished(PARTITIONS[0], tokens[0])
    await consumer._getmany(set(PARTITIONS), 1.0)
    assert read == [set(PARTITIONS[1:]), set(PARTITIONS)]


async def test_no_memory_is_held_for_a_consumption_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of several workers one that fails is made again, and its predecessors, with all records that they
    had read, stayed in memory."""

    async def nothing(*_: object) -> None: ...

    async def drain(consumption: Consumption) -> None:
        await consumption._lanes.stop(within_seconds=5)

    monkeypatch.setattr(faust.App, "start", nothing)
    monkeypatch.setattr(faust.App, "stop", nothing)
    monkeypatch.setattr(Consumption, "drain", drain)
    settings, unused = StreamSettings(lanes=2), cast("Any", None)
    consumption = Consumption(
        Stage(random.Random()), kafka=KafkaSettings(), stream=settings, metrics=Metrics(), pool=unused
    )
    async with consumption.running():
        pass
    ended = weakref.ref(consumption)
    del consumption
    await asyncio.sleep(0)  # the callbacks of its tasks
    gc.collect()
    assert ended() is None


async def test_no_memory_is_held_for_a_consumption_that_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Kafka was away, each attempt to start a worker again left a consumption with its tasks in memory."""

    async def fail(_: object) -> None:
        raise KafkaConnectionError

    stopped: list[None] = []

    async def stop(_: object) -> None:
        stopped.append(None)

    monkeypatch.setattr(faust.App, "start", fail)
    monkeypatch.setattr(faust.App, "stop", stop)
    tasks, settings, unused = len(asyncio.all_tasks()), StreamSettings(lanes=2), cast("Any", None)
    consumption = Consumption(
        Stage(random.Random()), kafka=KafkaSettings(), stream=settings, metrics=Metrics(), pool=unused
    )
    with pytest.raises(KafkaConnectionError):
        async with consumption.running():
            pass
    ended = weakref.ref(consumption)
    del consumption
    await asyncio.sleep(0)  # the callbacks of its tasks
    gc.collect()
    assert ended() is None
    assert len(asyncio.all_tasks()) == tasks
    assert stopped
