"""Key lanes: records of one key are handled in order, different lanes run concurrently, and live goes before backfill.

This module knows nothing of Kafka: a record comes in through ``put``, and ``on_done`` is called for it once, in any
order.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from pipeline.core.breaker import Trouble
from pipeline.core.identity import source_of
from pipeline.core.model import Lane
from pipeline.core.throttle import BackfillThrottle
from pipeline.observability.metrics import Metrics
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stages.stage import Incoming, Stage
from pipeline.stream.attempts import Attempts, Batch, Item, Outcome

BATCH_BYTES = 4 * 1024 * 1024
"""A batch takes no more records when they have reached this size, so that a batch has at most one large document, and
other documents wait for one only."""
GATHER_SECONDS = 0.01
"""How long the first record after a pause waits for others that were published with it."""
LIVE_BURST = 4
"""The number of batches that a live lane may begin one after the other after a pause, without waiting for more records.
A person who saves ten files, or one file twice, waits for no batch to grow; a steady stream has large batches all the
same."""
PARK_AFTER_TRIES = 3
"""A single record that has failed this often is parked: the lane goes on with other records, and tries it in
between."""
BACKFILL_LANES = {"detect": 3, "vectors": 4, "keywords": 3}
"""The most backfill lanes of these stages. With as many as live ones, their batches were a third as large, and a large
batch costs little more than a small one, above all in Elasticsearch. Vectors have four, the default of
EmbeddingSettings.parallel_requests: with more requests at once, each has the texts of fewer documents."""
BACKFILL_POLL_SECONDS = 0.1
"""Pause between two checks whether backfill may go on."""


class _Waiting(NamedTuple):
    """A queued record, and since when it has been queued."""

    item: Item
    since: float
    """On time.monotonic()."""

    @property
    def key(self) -> bytes | None:
        return self.item[0].key


@dataclass(slots=True, eq=False)
class _KeyLane:
    """The live or the backfill queue of some keys. They are separate so that live records do not wait for a large batch
    of backfill."""

    kind: Lane
    queue: deque[_Waiting] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    paced_until: float = -math.inf
    """When all batches so far would have begun if each had come ``batch_wait_seconds`` after the one before, on
    time.monotonic()."""
    keys_in_progress: frozenset[bytes | None] = frozenset()
    """The keys of the records that are left of the present batch."""
    siblings: list[_KeyLane] = field(default_factory=list)
    """The queues of the other kind with some of the same keys. A key that is in progress there waits here."""
    parked: Batch | None = None
    """A record that keeps failing, which is tried again between batches. At most one, so that the memory of a lane
    stays bounded."""

    @property
    def waiting(self) -> bool:
        """Whether a record may be taken."""
        return any(True for _ in self.takeable())

    @property
    def due(self) -> bool:
        """Whether the parked record may be tried again."""
        parked = self.parked
        return (
            parked is not None and parked.not_before <= monotonic() and not self.is_in_sibling(parked.items[0][0].key)
        )

    def is_in_sibling(self, key: bytes | None) -> bool:
        """Whether a sibling is handling a record of this key."""
        return any(key in sibling.keys_in_progress for sibling in self.siblings)

    def set_in_progress(self, parts: Sequence[Batch]) -> None:
        """Set the parts of a batch that are in progress, and let the siblings take the other keys. Records that wait
        for the end of a flood do not count: valid records of their documents go on."""
        self.keys_in_progress = frozenset(record.key for part in parts if not part.flooded for record, _ in part.items)
        for sibling in self.siblings:
            sibling.changed.set()

    def blocks_sibling(self, part: Batch) -> bool:
        """Whether a record of a sibling waits until this part is done."""
        keys = {record.key for record, _ in part.items}
        return any(entry.key in keys for sibling in self.siblings for entry in sibling.queue)

    def takeable(self) -> Iterator[_Waiting]:
        """The queued records whose key is not in progress in a sibling, in order."""
        return (entry for entry in self.queue if not self.is_in_sibling(entry.key))

    def take(self, count: int) -> list[Item]:
        """Take the next batch, of at most ``count`` records, out of the queue. Sources take turns, so that none waits
        for another one that sends much."""
        taken: list[_Waiting] = []
        size = 0
        for entry in _round_robin(self.takeable()):
            if len(taken) == count or size >= BATCH_BYTES:
                break
            taken.append(entry)
            size += len(entry.item[0].value or b"")
        if len(taken) == len(self.queue):
            self.queue.clear()
        else:
            gone = {id(entry) for entry in taken}
            self.queue = deque(entry for entry in self.queue if id(entry) not in gone)
        self.room.set()
        return [entry.item for entry in taken]


def _round_robin(waiting: Iterable[_Waiting]) -> Iterator[_Waiting]:
    """Take one record of each source after the other; the records of a source stay in order."""
    by_source: dict[bytes, deque[_Waiting]] = {}
    for entry in waiting:
        by_source.setdefault(source_of(entry.key), deque()).append(entry)
    while by_source:
        for source, of_source in list(by_source.items()):
            yield of_source.popleft()
            if not of_source:
                del by_source[source]


def _lanes(count: int, backfill_count: int) -> tuple[list[_KeyLane], list[_KeyLane]]:
    """The live lanes and the backfill lanes, which are no more. Each backfill lane has the keys of one or more live
    ones."""
    live = [_KeyLane("live") for _ in range(count)]
    backfill = [_KeyLane("backfill") for _ in range(min(count, backfill_count))]
    for n, lane in enumerate(live):
        sibling = backfill[n % len(backfill)]
        lane.siblings.append(sibling)
        sibling.siblings.append(lane)
    return live, backfill


class Lanes:
    """Live and backfill queues, which hand the records of one stage to it.

    ``on_done(record, tag)`` is called for every record that was handled or set aside.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        count: int,
        queue_size: int,
        batch_wait_seconds: float,
        backfill_share: float,
        metrics: Metrics,
        on_done: Callable[[Incoming, object], None],
    ) -> None:
        """count: the live lanes. A stage that is in BACKFILL_LANES has no more backfill lanes than it says."""
        self._stage = stage
        self._live, self._backfill = _lanes(count, BACKFILL_LANES.get(stage.name, count))
        self._lanes = [*self._live, *self._backfill]
        self._queue_size = queue_size
        self._batch_wait = batch_wait_seconds
        self._throttle = BackfillThrottle(backfill_share)
        self._on_done = on_done
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._attempts = Attempts(stage, metrics, self._stopping)

    @property
    def trouble(self) -> Trouble | None:
        """The outage or flood of dead letters that the stage waits for; None: there is none."""
        return self._attempts.trouble

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(lane), name=f"lane-{n}-{lane.kind}")
            for lanes in (self._live, self._backfill)
            for n, lane in enumerate(lanes)
        ]

    async def put(self, record: Incoming, tag: object) -> None:
        """Queue a record in its key's lane. Waits while that lane is full, so that no more is read from the topic."""
        n = zlib.crc32(record.key or b"") % len(self._live)
        lane = self._live[n] if record.lane == "live" else self._live[n].siblings[0]
        while len(lane.queue) >= self._queue_size and not self._stopping.is_set():
            lane.room.clear()
            await lane.room.wait()
        lane.queue.append(_Waiting((record, tag), monotonic()))
        lane.changed.set()

    def forget(self, stale: Callable[[object], bool]) -> None:
        """Drop the queued records whose tag is stale, because their partition was revoked. Its next owner reads
        them."""
        for lane in self._lanes:
            lane.queue = deque(entry for entry in lane.queue if not stale(entry.item[1]))
            lane.room.set()
            if lane.parked is not None and stale(lane.parked.items[0][1]):
                lane.parked = None

    async def failed(self) -> BaseException:
        """Return the error of a lane that ended without being stopped, which is a bug. Otherwise never returns."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    return error
            if self._stopping.is_set():
                break
        return await asyncio.Future()

    async def stop(self, *, within_seconds: float) -> None:
        """Finish the batches in progress, start no other, and cancel what is left after ``within_seconds``. Records
        that are not done are not committed, and are read again."""
        self._stopping.set()
        for lane in self._lanes:
            lane.changed.set()
            lane.room.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_seconds)
            await cancel_and_wait(late)

    async def _run(self, lane: _KeyLane) -> None:
        while not self._stopping.is_set():
            batch = await self._next(lane)
            if batch is not None:
                try:
                    await self._work(lane, batch)
                finally:
                    lane.set_in_progress([])

    async def _next(self, lane: _KeyLane) -> Batch | None:
        """The parked record if it is due, otherwise the next batch of the queue; None: the lane is stopping, or a key
        went into progress in a sibling meanwhile."""
        while (parked := lane.parked) is not None and not (lane.due or lane.waiting or self._stopping.is_set()):
            wait = parked.not_before - monotonic()
            lane.changed.clear()
            try:
                async with asyncio.timeout(wait if wait > 0 else None):
                    await lane.changed.wait()
            except TimeoutError:
                continue
        if lane.due:
            lane.parked = None
            return parked
        return None if self._stopping.is_set() else await self._gather(lane)

    async def _work(self, lane: _KeyLane, batch: Batch) -> None:
        """Handle a batch until all of it is done, or only a parked record is left. The parts of a batch that was split
        do not wait for each other: the one with the earliest next try comes first."""
        parts = [batch]
        while parts and not self._stopping.is_set():
            lane.set_in_progress(parts)
            part = min(parts, key=lambda p: p.not_before)
            if (wait := part.not_before - monotonic()) > 0:
                await self._attempts.pause(wait)
            outcome = await self._once(lane, part)
            if outcome == "done":
                parts.remove(part)
                for record, tag in part.items:
                    self._on_done(record, tag)
            elif outcome == "split":
                parts.remove(part)
                parts += part.parts()
            elif self._should_park(lane, part, others=lane.waiting or lane.blocks_sibling(part) or len(parts) > 1):
                parts.remove(part)
                lane.parked = part

    async def _once(self, lane: _KeyLane, part: Batch) -> Outcome:
        """Try a batch once, and count the time of this try, without pauses, for the backfill throttle."""
        began = monotonic()
        self._throttle.batch_started(lane.kind)
        try:
            return await self._attempts.once(part)
        finally:
            now = monotonic()
            self._throttle.batch_ended(lane.kind, now - began, now=now)

    @staticmethod
    def _should_park(lane: _KeyLane, part: Batch, *, others: bool) -> bool:
        """Whether to park this part. others: there are other records to go on with."""
        keeps_failing = part.flooded or part.tries >= PARK_AFTER_TRIES
        return others and len(part.items) == 1 and keeps_failing and lane.parked is None

    async def _gather(self, lane: _KeyLane) -> Batch | None:
        """Wait for the next batch and take it out of the queue; None: the lane is stopping, or nothing may be taken."""
        while not (lane.waiting or self._stopping.is_set()):
            lane.changed.clear()
            await lane.changed.wait()
        await self._let_batch_grow(lane)
        if lane.kind == "backfill":
            while not (self._stopping.is_set() or await self._admits_backfill()):
                await self._attempts.pause(BACKFILL_POLL_SECONDS)
        if self._stopping.is_set() or not lane.waiting:
            return None
        now = monotonic()
        lane.paced_until = max(lane.paced_until, now) + self._batch_wait
        if lane.kind == "live":
            self._throttle.live_waited(now - next(lane.takeable()).since, now=now)
        return Batch(lane.take(self._stage.batch_size))

    async def _let_batch_grow(self, lane: _KeyLane) -> None:
        """Wait for more records until the batch is full, or as long as keeps the lane at a batch every
        ``batch_wait_seconds`` on average. A large batch costs little more than a small one, so a steady stream is
        handled in few large batches; records that come after a pause wait only for GATHER_SECONDS, several times in a
        row in a live lane."""
        ahead = (LIVE_BURST - 1) * self._batch_wait if lane.kind == "live" else 0.0
        wait = min(self._batch_wait, max(GATHER_SECONDS, lane.paced_until - ahead - monotonic()))
        try:
            async with asyncio.timeout(wait):
                full = min(self._stage.batch_size, self._queue_size)
                while not (self._stopping.is_set() or len(lane.queue) >= full):
                    lane.changed.clear()
                    await lane.changed.wait()
        except TimeoutError:
            return

    async def _admits_backfill(self) -> bool:
        return (
            self._throttle.admits_backfill(now=monotonic())
            and not await self._stage.is_backlogged()
            and self._throttle.admits_backfill(now=monotonic())  # again: another lane may have begun a batch meanwhile
        )
