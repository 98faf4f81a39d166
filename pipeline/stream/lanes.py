"""Lanes: records of one key are handled in order, batches of other keys concurrently, and live goes before backfill.

This module knows nothing of Kafka: a record comes in through ``put``, and ``on_done`` is called for it once, in any
order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
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
"""The number of live batches that may begin one after the other after a pause, without waiting for more records. A
person who saves ten files, or one file twice, waits for no batch to grow; a steady stream has large batches all the
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
class _Queue:
    """The live or the backfill records that wait. They are separate so that live records do not wait for a large batch
    of backfill."""

    kind: Lane
    size: int
    waiting: deque[_Waiting] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """For the lane that gathers a batch."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """For idle lanes: something may be taken now, and nobody gathers."""
    room: asyncio.Event = field(default_factory=asyncio.Event)
    is_gathering: bool = False
    """Whether a lane is gathering a batch. One at a time, so that what comes together is one batch."""
    paced_until: float = -math.inf
    """When the next batch would begin if all so far had come ``batch_wait_seconds`` after the one before, on
    time.monotonic(). At most LIVE_BURST of these times ahead: full batches do not wait, and must not slow those that
    follow a pause."""

    def takeable(self, blocked: Set[bytes | None]) -> Iterator[_Waiting]:
        """The records whose key is not blocked, in order."""
        return (entry for entry in self.waiting if entry.key not in blocked)

    def take(self, count: int, blocked: Set[bytes | None]) -> list[Item]:
        """Take the next batch, of at most ``count`` records, out of the queue. Sources take turns, so that none waits
        for another one that sends much."""
        taken: list[_Waiting] = []
        size = 0
        for entry in _round_robin(self.takeable(blocked)):
            if len(taken) == count or size >= BATCH_BYTES:
                break
            taken.append(entry)
            size += len(entry.item[0].value or b"")
        gone = {id(entry) for entry in taken}
        self.waiting = deque(entry for entry in self.waiting if id(entry) not in gone)
        self.room.set()
        return [entry.item for entry in taken]


@dataclass(slots=True, eq=False)
class _Lane:
    """Handles one batch of its queue after the other."""

    queue: _Queue
    keys: frozenset[bytes | None] = frozenset()
    """The keys of the records that are left of the present batch."""
    parked: Batch | None = None
    """A record that keeps failing, which is tried again between batches. At most one, so that the memory of a lane
    stays bounded."""
    held: deque[Batch] = field(default_factory=deque)
    """The records that wait for the end of a flood of dead letters. Only the first batch of them is tried again, and
    what the others of its topic may hold of memory bounds them (``Consumption``): a lane that waited with them would
    keep a record from its stage that ends the flood, or that revokes somebody's access."""


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


class Lanes:
    """A live and a backfill queue, from which lanes hand the records of one stage to it, batch by batch.

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
        """count: the live lanes. A stage that is in BACKFILL_LANES has no more backfill lanes than it says. queue_size:
        the records that may wait, for each lane."""
        self._stage = stage
        counts: dict[Lane, int] = {"live": count, "backfill": min(count, BACKFILL_LANES.get(stage.name, count))}
        self._queues = {kind: _Queue(kind, size=queue_size * lanes) for kind, lanes in counts.items()}
        self._lanes = [_Lane(queue) for kind, queue in self._queues.items() for _ in range(counts[kind])]
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
            asyncio.create_task(self._run(lane), name=f"lane-{n}-{lane.queue.kind}")
            for n, lane in enumerate(self._lanes)
        ]

    async def put(self, record: Incoming, tag: object) -> None:
        """Queue a record. Waits while the queue is full, so that no more is read from the topic."""
        queue = self._queues[record.lane]
        while len(queue.waiting) >= queue.size and not self._stopping.is_set():
            queue.room.clear()
            await queue.room.wait()
        queue.waiting.append(_Waiting((record, tag), monotonic()))
        queue.arrived.set()
        if not queue.is_gathering:
            queue.changed.set()

    def forget(self, stale: Callable[[object], bool]) -> None:
        """Drop the queued records whose tag is stale, because their partition was revoked. Its next owner reads
        them."""
        for queue in self._queues.values():
            queue.waiting = deque(entry for entry in queue.waiting if not stale(entry.item[1]))
            queue.room.set()
        for lane in self._lanes:
            if lane.parked is not None and stale(lane.parked.items[0][1]):
                lane.parked = None
            for batch in lane.held:
                batch.forget(stale)
            lane.held = deque(batch for batch in lane.held if batch.items)

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
        for queue in self._queues.values():
            queue.arrived.set()
            queue.changed.set()
            queue.room.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_seconds)
            await cancel_and_wait(late)

    async def _run(self, lane: _Lane) -> None:
        while not self._stopping.is_set():
            batch = await self._next(lane)
            if batch is not None:
                try:
                    await self._work(lane, batch)
                finally:
                    self._set_in_progress(lane, [])

    async def _next(self, lane: _Lane) -> Batch | None:
        """Take out what waits in the lane and is due, otherwise the next batch of the queue. Returns None when the lane
        is stopping, or there is nothing to take any more."""
        queue = lane.queue
        while not self._stopping.is_set():
            due, wait = self._take_due(lane)
            if due is not None:
                return due
            if not queue.is_gathering and any(queue.takeable(self._in_progress())):
                return await self._gather(queue)
            queue.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await queue.changed.wait()
        return None

    def _take_due(self, lane: _Lane) -> tuple[Batch | None, float | None]:
        """Take out the parked record, or the first of the batches that are held, if it is due; or return the seconds
        until one may be (None: only after something has changed)."""
        waits, now = list[float](), monotonic()
        if lane.parked is not None:
            if lane.parked.not_before > now:
                waits.append(lane.parked.not_before - now)
            elif lane.parked.items[0][0].key not in self._in_progress():
                parked, lane.parked = lane.parked, None
                return parked, None
        if lane.held:
            if lane.held[0].not_before <= now:
                return lane.held.popleft(), None
            waits.append(lane.held[0].not_before - now)
        return None, min(waits, default=None)

    def _in_progress(self, *, besides: _Lane | None = None) -> set[bytes | None]:
        """The keys of which a lane is handling a record."""
        return {key for lane in self._lanes if lane is not besides for key in lane.keys}

    def _set_in_progress(self, lane: _Lane, parts: Sequence[Batch]) -> None:
        """Set the parts of a batch that are in progress, and let idle lanes take the other keys. Records that wait for
        the end of a flood do not count: valid records of their documents go on."""
        lane.keys = frozenset(record.key for part in parts if not part.flooded for record, _ in part.items)
        for queue in self._queues.values():
            queue.changed.set()

    async def _work(self, lane: _Lane, batch: Batch) -> None:
        """Handle a batch until all of it is done, parked or held. The parts of a batch that was split do not wait for
        each other: the one with the earliest next try comes first."""
        parts, was_held = [batch], batch.flooded
        while parts and not self._stopping.is_set():
            self._set_in_progress(lane, parts)
            part = min(parts, key=lambda p: p.not_before)
            if (wait := part.not_before - monotonic()) > 0:
                await self._attempts.pause(wait)
            outcome = await self._once(lane, part)
            if outcome == "done":
                parts.remove(part)
                for record, tag in part.items:
                    self._on_done(record, tag)
                if was_held:  # the flood has ended, or other letters are admitted now
                    for held in lane.held:
                        held.not_before = 0.0
            elif outcome == "split" or part.flooded:
                parts.remove(part)
                pieces = part.parts() if outcome == "split" else [part]
                parts += [piece for piece in pieces if not piece.flooded]
                hold = lane.held.extendleft if was_held else lane.held.extend
                hold(piece for piece in pieces if piece.flooded)
            elif self._should_park(lane, part, others=len(parts) > 1 or self._delays_others(lane, part)):
                parts.remove(part)
                lane.parked = part

    def _delays_others(self, lane: _Lane, part: Batch) -> bool:
        """Whether a record waits that this lane, or any lane after this part, could handle."""
        keys = {record.key for record, _ in part.items}
        return any(lane.queue.takeable(self._in_progress(besides=lane))) or any(
            entry.key in keys for queue in self._queues.values() for entry in queue.waiting
        )

    async def _once(self, lane: _Lane, part: Batch) -> Outcome:
        """Try a batch once, and count the time of this try, without pauses, for the backfill throttle."""
        began = monotonic()
        self._throttle.batch_started(lane.queue.kind)
        try:
            return await self._attempts.once(part)
        finally:
            now = monotonic()
            self._throttle.batch_ended(lane.queue.kind, now - began, now=now)

    @staticmethod
    def _should_park(lane: _Lane, part: Batch, *, others: bool) -> bool:
        """Whether to park this part. others: there are other records to go on with."""
        keeps_failing = part.alone or part.tries >= PARK_AFTER_TRIES
        return (others or part.alone) and len(part.items) == 1 and keeps_failing and lane.parked is None

    async def _gather(self, queue: _Queue) -> Batch | None:
        """Let the next batch of the queue grow, and take it out; None: the lane is stopping, or there is nothing to
        take any more."""
        queue.is_gathering = True
        try:
            await self._let_batch_grow(queue)
            if queue.kind == "backfill":
                while not (self._stopping.is_set() or await self._admits_backfill()):
                    await self._attempts.pause(BACKFILL_POLL_SECONDS)
            blocked, now = self._in_progress(), monotonic()
            oldest = next(queue.takeable(blocked), None)
            if self._stopping.is_set() or oldest is None:
                return None
            if queue.kind == "live":
                self._throttle.live_waited(now - oldest.since, now=now)
            paced = max(queue.paced_until, now) + self._batch_wait
            queue.paced_until = min(paced, now + LIVE_BURST * self._batch_wait)
            return Batch(queue.take(self._stage.batch_size, blocked))
        finally:
            queue.is_gathering = False
            queue.changed.set()

    async def _let_batch_grow(self, queue: _Queue) -> None:
        """Wait for more records until the batch is full, or as long as keeps the queue at a batch every
        ``batch_wait_seconds`` on average. A large batch costs little more than a small one, so a steady stream is
        handled in few large batches; live records that come after a pause wait only for GATHER_SECONDS, several times
        in a row."""
        ahead = (LIVE_BURST - 1) * self._batch_wait if queue.kind == "live" else 0.0
        wait = min(self._batch_wait, max(GATHER_SECONDS, queue.paced_until - ahead - monotonic()))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not (self._stopping.is_set() or len(queue.waiting) >= min(self._stage.batch_size, queue.size)):
                    queue.arrived.clear()
                    await queue.arrived.wait()

    async def _admits_backfill(self) -> bool:
        return (
            self._throttle.admits_backfill(now=monotonic())
            and not await self._stage.is_backlogged()
            and self._throttle.admits_backfill(now=monotonic())  # again: another lane may have begun a batch meanwhile
        )
