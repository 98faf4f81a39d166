"""Key lanes: documents of one key one after another, lanes side by side, live before backfill.

No Kafka here: records come in through ``put`` and leave through ``on_done``, exactly once each, in any order.
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
"""A batch is closed when its records reach this: one large document a batch, so that others wait for one only."""
TOGETHER_SECONDS = 0.02
"""The first record after a pause waits so long for those that were published with it."""
PARK_AFTER = 3
"""Tries of a single record before the lane goes on with what waits behind it, and comes back to it in between."""
ASK_SECONDS = 0.1
"""Between two looks whether backfill may go on."""


class _Waiting(NamedTuple):
    item: Item
    since: float
    """On time.monotonic()."""

    @property
    def key(self) -> bytes | None:
        return self.item[0].key


@dataclass(slots=True, eq=False)
class _KeyLane:
    """Live or backfill of some keys: a large batch of the one keeps nothing of the other waiting."""

    kind: Lane
    queue: deque[_Waiting] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = -math.inf
    """The last batch, on time.monotonic()."""
    at_work: frozenset[bytes | None] = frozenset()
    """Keys of what is left of the present batch."""
    sibling: _KeyLane | None = None
    """The lane of the same keys and the other kind: keys that are at work there wait here."""
    parked: Batch | None = None
    """A record that keeps failing, tried again between other work. One at most: a lane stays bounded."""

    @property
    def waiting(self) -> bool:
        return any(True for _ in self.free())

    @property
    def due(self) -> bool:
        """Whether the parked record may be tried again."""
        parked = self.parked
        return parked is not None and parked.not_before <= monotonic() and not self.elsewhere(parked.items[0][0].key)

    def elsewhere(self, key: bytes | None) -> bool:
        """Whether the other lane of these keys is at work on this one."""
        return self.sibling is not None and key in self.sibling.at_work

    def hold(self, parts: Sequence[Batch]) -> None:
        """Say what is at work now; what is not any more may go on beside. Bad records that wait for a flood to end
        keep no valid one of their document waiting."""
        self.at_work = frozenset(record.key for part in parts if not part.flooded for record, _ in part.items)
        if self.sibling is not None:
            self.sibling.changed.set()

    def awaited(self, part: Batch) -> bool:
        """Whether a record of the other lane waits until this part is done."""
        keys = {record.key for record, _ in part.items}
        return self.sibling is not None and any(entry.key in keys for entry in self.sibling.queue)

    def free(self) -> Iterator[_Waiting]:
        """The waiting records that may be taken, in order."""
        return (entry for entry in self.queue if not self.elsewhere(entry.key))

    def take(self, count: int) -> list[Item]:
        """The next batch out of the queue. The sources take turns: one that sends much keeps no other one waiting."""
        taken: list[_Waiting] = []
        size = 0
        for entry in _in_turns(self.free()):
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


def _in_turns(waiting: Iterable[_Waiting]) -> Iterator[_Waiting]:
    """One of each source after another; of each in order."""
    by_source: dict[bytes, deque[_Waiting]] = {}
    for entry in waiting:
        by_source.setdefault(source_of(entry.key), deque()).append(entry)
    while by_source:
        for source, of_source in list(by_source.items()):
            yield of_source.popleft()
            if not of_source:
                del by_source[source]


def _pair() -> tuple[_KeyLane, _KeyLane]:
    live, backfill = _KeyLane("live"), _KeyLane("backfill")
    live.sibling, backfill.sibling = backfill, live
    return live, backfill


class Lanes:
    """``count`` pairs of lanes over one stage. ``on_done(record, tag)`` is called for every record that is finished
    with."""

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
        self._stage = stage
        self._pairs = [_pair() for _ in range(count)]
        self._lanes = [lane for pair in self._pairs for lane in pair]
        self._queue_size = queue_size
        self._batch_wait = batch_wait_seconds
        self._throttle = BackfillThrottle(backfill_share)
        self._on_done = on_done
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._attempts = Attempts(stage, metrics, self._stopping)

    @property
    def trouble(self) -> Trouble | None:
        """The trouble that the stage is waiting out, if it stands still."""
        return self._attempts.trouble

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(lane), name=f"lane-{n}-{lane.kind}")
            for n, pair in enumerate(self._pairs)
            for lane in pair
        ]

    async def put(self, record: Incoming, tag: object) -> None:
        """Queue a record in its key's lane; waits while that lane is full, which holds back the record's topic."""
        live, backfill = self._pairs[zlib.crc32(record.key or b"") % len(self._pairs)]
        lane = live if record.lane == "live" else backfill
        while len(lane.queue) >= self._queue_size and not self._stopping.is_set():
            lane.room.clear()
            await lane.room.wait()
        lane.queue.append(_Waiting((record, tag), monotonic()))
        lane.changed.set()

    def forget(self, stale: Callable[[object], bool]) -> None:
        """Drop waiting records whose tag is stale (their partition was revoked: the broker sends them again)."""
        for lane in self._lanes:
            lane.queue = deque(entry for entry in lane.queue if not stale(entry.item[1]))
            lane.room.set()
            if lane.parked is not None and stale(lane.parked.items[0][1]):
                lane.parked = None

    async def failed(self) -> BaseException:
        """Return when a lane ended although nobody stopped it: a fault of ours, not of a record."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    return error
            if self._stopping.is_set():
                break
        return await asyncio.Future()

    async def stop(self, *, within_seconds: float) -> None:
        """Finish the batches at work, start no other, drop what waits. Unfinished records are not done: the broker
        sends them again."""
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
                    lane.hold([])

    async def _next(self, lane: _KeyLane) -> Batch | None:
        """The parked record when its time has come, else what waits."""
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
        """Handle a batch to its end, or leave one failing record parked. The parts of a batch that was halved wait for
        each other as little as records in the queue do."""
        parts = [batch]
        while parts and not self._stopping.is_set():
            lane.hold(parts)
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
            elif self._parks(lane, part, others=lane.waiting or lane.awaited(part) or len(parts) > 1):
                parts.remove(part)
                lane.parked = part

    async def _once(self, lane: _KeyLane, part: Batch) -> Outcome:
        """Try a batch. What it waits between its tries is not work."""
        began = monotonic()
        self._throttle.batch_started(lane.kind)
        try:
            return await self._attempts.once(part)
        finally:
            now = monotonic()
            self._throttle.batch_ended(lane.kind, now - began, now=now)

    @staticmethod
    def _parks(lane: _KeyLane, part: Batch, *, others: bool) -> bool:
        held = part.flooded or part.tries >= PARK_AFTER
        return others and len(part.items) == 1 and held and lane.parked is None

    async def _gather(self, lane: _KeyLane) -> Batch | None:
        """The next batch."""
        while not (lane.waiting or self._stopping.is_set()):
            lane.changed.clear()
            await lane.changed.wait()
        await self._company(lane)
        if lane.kind == "backfill":
            while not (self._stopping.is_set() or await self._admits_backfill()):
                await self._attempts.pause(ASK_SECONDS)
        if self._stopping.is_set() or not lane.waiting:
            return None
        lane.began = monotonic()
        if lane.kind == "live":
            self._throttle.live_waited(lane.began - next(lane.free()).since, now=lane.began)
        return Batch(lane.take(self._stage.batch_size))

    async def _company(self, lane: _KeyLane) -> None:
        """Let a small batch grow: until it is full, or ``batch_wait_seconds`` after the last one began. A steady stream
        is handled in few batches of many, which cost little more than one of one; what comes alone does not wait."""
        wait = min(self._batch_wait, max(TOGETHER_SECONDS, lane.began + self._batch_wait - monotonic()))
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
            and self._throttle.admits_backfill(now=monotonic())  # another lane may have begun while that was asked
        )
