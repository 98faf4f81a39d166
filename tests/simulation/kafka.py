"""Kafka in memory: logs, consumer groups with fenced commits, and producers whose answers may be lost or late.

``Consumer`` stands where ``pipeline.stream.consume`` stands, around the product's own ``Progress`` and ``Lanes``, and
around its ``LogGuard`` in histories in which Kafka loses records.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pipeline.stream.logguard as logguard
from pipeline.core.errors import Retryable
from pipeline.core.kafka_log import Witness, witness
from pipeline.core.model import Lane
from pipeline.core.progress import Progress
from pipeline.kafka.logs import LogNow, LogsUnavailable, as_read
from pipeline.kafka.producer import DeliveryUnknown, KafkaUnavailable, Stored
from pipeline.stages.stage import Incoming, Stage
from pipeline.stream.lanes import Lanes
from pipeline.stream.logguard import LogGuard
from topics.codec import Headers, encode
from topics.messages import AnyMessage
from topics.registry import Topic

if TYPE_CHECKING:
    from tests.simulation.world import Process

PARTITIONS = 2
SESSION_SECONDS = 6.0
"""A member that is silent for so long is put out of its group."""
COMMIT_SECONDS = 1.0
POLL_RECORDS = 4

Place = tuple[str, int]
"""Topic and partition."""


class Broker:
    """The logs of all topics, and the consumer groups."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self.logs: defaultdict[Place, list[tuple[bytes | None, bytes | None, Headers]]] = defaultdict(list)
        self._times: defaultdict[Place, list[datetime]] = defaultdict(list)
        self.groups: dict[str, Group] = {}
        self.made: defaultdict[str, int] = defaultdict(int)
        """Topic → how often it was made anew."""
        self.on_record: list[Callable[[str, bytes | None], None]] = []

    def group(self, stage: Stage) -> Group:
        topics = tuple(topic.name for topic in stage.topics.values())
        return self.groups.setdefault(stage.name, Group(topics))

    def append(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> Stored:
        partition = zlib.crc32(key or b"") % PARTITIONS
        log = self.logs[topic, partition]
        log.append((key, value, headers))
        self._times[topic, partition].append(self._now())
        for callback in self.on_record:
            callback(topic, value)
        for group in self.groups.values():
            if topic in group.topics:
                group.wake()
        return Stored(partition, len(log) - 1)

    def lose(self, place: Place, count: int) -> int:
        """The newest records are gone, as after an election of a replica that lagged. Returns how many are left."""
        log, times = self.logs[place], self._times[place]
        left = max(0, len(log) - count)
        del log[left:], times[left:]
        return left

    def make_anew(self, topic: str, *, forgets_offsets: bool) -> None:
        """Somebody deletes a topic with all that is in it, and makes it again."""
        self.made[topic] += 1
        for n in range(PARTITIONS):
            self.lose((topic, n), len(self.logs[topic, n]))
            for group in self.groups.values() if forgets_offsets else ():
                group.committed.pop((topic, n), None)

    def look(self, place: Place, offsets: Collection[int]) -> LogNow:
        """As ``pipeline.kafka.logs.look`` sees a partition."""
        log = self.logs[place]
        records = {n: witness(n, as_read(self.sent_ms(place, n)), *log[n][:2]) for n in offsets if n < len(log)}
        return LogNow(f"{place[0]} {self.made[place[0]]}", 0, len(log), records)

    def sent_ms(self, place: Place, offset: int) -> int:
        return round(self._times[place][offset].timestamp() * 1000)

    def sent(self, topics: Collection[str]) -> dict[Place, list[datetime]]:
        """When each record of each partition was sent."""
        return {(topic, n): self._times[topic, n] for topic in topics for n in range(PARTITIONS)}

    def drained(self) -> bool:
        """Every group has committed everything, and nothing that is not there."""
        return all(
            group.committed.get((topic, n), 0) == len(self.logs[topic, n])
            for group in self.groups.values()
            for topic in group.topics
            for n in range(PARTITIONS)
        )


class Group:
    """A consumer group: who has which partitions, and how far it has come. Whoever is not of the present generation
    commits nothing."""

    def __init__(self, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self.generation = 0
        self.members: list[Consumer] = []
        self.committed: dict[Place, int] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def join(self, member: Consumer) -> None:
        if member not in self.members:
            self.members.append(member)
            self.rebalance()

    def leave(self, member: Consumer) -> None:
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def rewind(self) -> None:
        """Begin again at offset 0."""
        self.committed.clear()
        self.rebalance()

    def rebalance(self) -> None:
        self.generation += 1
        self.wake()

    def wake(self) -> None:
        """Let every member look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def something(self) -> None:
        """Wait for a record, a rebalance or something to commit."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def assignment(self, member: Consumer) -> set[Place]:
        """Co-partitioned: the same numbers of all topics."""
        mine = self.members.index(member)
        return {(t, n) for t in self.topics for n in range(PARTITIONS) if n % len(self.members) == mine}

    def commit(self, generation: int, place: Place, offset: int) -> None:
        if generation == self.generation:
            self.committed[place] = offset


class Producer:
    """The part of ``pipeline.kafka.producer.Producer`` that the product uses."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._last: defaultdict[Place, float] = defaultdict(float)

    async def send(self, topic: Topic, message: AnyMessage, traceparent: str | None = None) -> asyncio.Future[Stored]:
        assert message.kind in topic.holds, f"{message.kind} does not belong on {topic.name}"
        record = encode(message, traceparent=traceparent)
        return await self.send_raw(topic, record.key, record.value, record.headers)

    async def send_raw(
        self, topic: Topic, key: bytes | None, value: bytes | None, headers: Headers
    ) -> asyncio.Future[Stored]:
        process, loop = self._process, asyncio.get_running_loop()
        try:
            await process.reach("kafka", "produce")
        except ConnectionError as error:
            raise KafkaUnavailable("Kafka is away") from error
        delivery: asyncio.Future[Stored] = loop.create_future()
        delivery.add_done_callback(lambda done: done.cancelled() or done.exception())
        faults = process.world.faults
        place = topic.name, zlib.crc32(key or b"") % PARTITIONS
        if faults.happens("kafka refuses"):
            delivery.set_exception(DeliveryUnknown("Kafka has not acknowledged a record"))
            return delivery
        silent = faults.happens("kafka keeps silent")

        def lands() -> None:
            stored = self._broker.append(topic.name, key, value, headers)
            if delivery.done():
                return
            if silent:
                delivery.set_exception(DeliveryUnknown("Kafka has not acknowledged a record"))
            else:
                delivery.set_result(stored)

        delay = faults.delay("kafka is slow")
        at = self._last[place] = max(self._last[place], loop.time() + delay)  # one producer's records keep their order
        if at <= loop.time():
            lands()
        else:
            loop.call_at(at, lands)
        return delivery


class Consumer:
    """One member of one stage's group. Its guard is None where Kafka loses nothing."""

    def __init__(self, broker: Broker, process: Process, stage: Stage, *, guarded: bool = False) -> None:
        self.process = process
        self.group = broker.group(stage)
        self._broker = broker
        self._lane_of: dict[str, Lane] = {topic.name: lane for lane, topic in stage.topics.items()}
        self._progress: Progress[Place] = Progress()
        self._positions: dict[Place, int] = {}
        self._generation = 0
        self.lanes = Lanes(
            stage,
            count=process.world.lanes,
            queue_size=50,
            batch_wait_seconds=0.05,
            backfill_share=0.5,
            metrics=process.world.metrics,
            on_done=self._done,
        )
        self.lanes.start()
        self.guard = (
            LogGuard(
                stage.name,
                stage.name,
                self,
                kafka=cast(Any, SimpleNamespace(bootstrap=self)),
                pool=cast(Any, process.pool),
                metrics=process.world.metrics,
            )
            if guarded
            else None
        )

    async def run(self) -> None:
        """Consume until the process ends."""
        self.group.join(self)
        while True:
            await self.process.alive_and_awake()
            self._look_at_the_group()
            idle = True
            for place in sorted(self._positions):
                idle &= not await self._read(place)
            if not await self._commit() and idle:
                await self.group.something()

    def _look_at_the_group(self) -> None:
        if self not in self.group.members:
            self.group.join(self)
        if self._generation == self.group.generation:
            return
        gone = set(self._positions)
        self._progress.close(gone)
        self.lanes.forget(lambda tag: isinstance(tag, tuple) and tag[0] in gone)
        self._generation = self.group.generation
        mine = self.group.assignment(self)
        self._progress.open(mine)
        self._positions = {place: self.group.committed.get(place, 0) for place in mine}
        if self.guard is not None:
            self.guard.revoked(gone)
            self.guard.assigned(mine)
            self.guard.positioned({place: self.group.committed.get(place) for place in mine})

    async def _read(self, place: Place) -> bool:
        log, generation = self._broker.logs[place], self._generation
        end = min(len(log), self._positions[place] + POLL_RECORDS)
        read = False
        while generation == self._generation and self._positions.get(place, end) < min(end, len(log)):
            offset = self._positions[place]
            self._positions[place] += 1
            read = True
            seen = None
            if self.guard is not None:
                seen = witness(offset, self._broker.sent_ms(place, offset), *log[offset][:2])
            token = self._progress.arrived(place, offset, seen)
            if token is not None:
                if self.guard is not None and seen is not None:
                    self.guard.read(place, seen)
                record = Incoming(place[0], place[1], offset, *log[offset], self._lane_of[place[0]])
                await self.lanes.put(record, (place, token))
        return read

    def _done(self, _record: Incoming, tag: Any) -> None:
        place, token = tag
        if self._progress.finished(place, token):
            self.group.wake()

    async def _commit(self) -> bool:
        """Returns whether something was committed after a wait, in which more may have been done."""
        due = {}
        for place in self._positions:
            offset = self._progress.committable(place)
            if offset is not None and offset != self.group.committed.get(place):
                due[place] = offset
        generation = self._generation
        if self.guard is not None and due:
            stamps = {place: token.stamp for place in due if (token := self._progress.last(place)) is not None}
            marked = await self.guard.marked(cast("dict[Place, Witness]", stamps))
            if due.keys() - marked:
                asyncio.get_running_loop().call_later(COMMIT_SECONDS, self.group.wake)
            due = {place: due[place] for place in marked if self._progress.last(place) is not None}
        committed = False
        for place, offset in due.items():
            if self.process.world.faults.happens("a commit is lost"):
                asyncio.get_running_loop().call_later(COMMIT_SECONDS, self.group.wake)
            else:
                self.group.commit(generation, place, offset)
                committed = self.guard is not None
        return committed

    # What the guard has done

    async def take_back(self, offsets: Mapping[Place, int]) -> None:
        self._progress.close(offsets)
        self.lanes.forget(lambda tag: isinstance(tag, tuple) and tag[0] in offsets)
        for place in offsets:
            self._positions.pop(place, None)
        if not await self.is_member():
            raise Retryable("the offsets to go back to were not committed", service="kafka")
        for place, offset in offsets.items():
            self.group.commit(self._generation, place, offset)

    async def read_again(self) -> None:
        await self._reach("rejoin")
        self.group.rebalance()

    async def is_member(self) -> bool:
        await self._reach("heartbeat")
        return self in self.group.members and self._generation == self.group.generation

    async def _reach(self, doing: str) -> None:
        try:
            await self.process.reach("kafka", doing)
        except ConnectionError as error:
            raise Retryable("Kafka is away", service="kafka") from error

    async def look(self, expected: Mapping[Place, Collection[int]]) -> dict[Place, LogNow]:
        """As ``pipeline.kafka.logs.look``."""
        try:
            await self.process.reach("kafka", "look")
        except ConnectionError as error:
            raise LogsUnavailable("Kafka is away") from error
        return {place: self._broker.look(place, offsets) for place, offsets in expected.items()}


@contextmanager
def looked_at() -> Iterator[None]:
    """Around any number of histories: the product's guard looks at the logs here."""
    before = logguard.look, logguard.security  # type: ignore[attr-defined]

    async def look(expected: Mapping[Place, Collection[int]], bootstrap: Consumer, _: object) -> dict[Place, LogNow]:
        return await bootstrap.look(expected)

    logguard.look, logguard.security = cast(Any, look), cast(Any, lambda _: {})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logguard.look, logguard.security = before  # type: ignore[attr-defined]
