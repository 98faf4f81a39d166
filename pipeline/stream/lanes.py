"""Key lanes: documents of one key one after another, lanes side by side, live before backfill.

No Kafka here: records come in through ``put`` and leave through ``on_done``, exactly once each, in any order.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from pipeline.core.breaker import Trouble
from pipeline.core.model import Lane
from pipeline.stages.stage import Incoming, Stage
from pipeline.stream.attempts import Attempts, Batch, Item
from pipeline.telemetry import Metrics

BATCH_BYTES = 4 * 1024 * 1024
"""A batch is closed when its records reach this: one large document a batch, so that others wait for one only."""
TOGETHER_SECONDS = 0.02
"""What comes first after a pause waits so long for what was published with it."""
PARK_AFTER = 3
"""Tries of a single record before the lane goes on with what waits behind it, and comes back to it in between."""


@dataclass(slots=True, eq=False)
class _KeyLane:
    queues: dict[Lane, deque[Item]] = field(default_factory=lambda: {"live": deque(), "backfill": deque()})
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    room: dict[Lane, asyncio.Event] = field(
        default_factory=lambda: {"live": asyncio.Event(), "backfill": asyncio.Event()}
    )
    live_batches: int = 0
    began: float = -math.inf
    """The last batch, on time.monotonic()."""
    parked: Batch | None = None
    """A record that keeps failing, tried again between other work. One at most: a lane stays bounded."""

    @property
    def waiting(self) -> bool:
        return any(self.queues.values())

    def full(self, size: int) -> bool:
        return any(len(queue) >= size for queue in self.queues.values())


class Lanes:
    """``count`` lanes over one stage. ``on_done(record, tag)`` is called for every record that is finished with."""

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
        self._lanes = [_KeyLane() for _ in range(count)]
        self._queue_size = queue_size
        self._batch_wait = batch_wait_seconds
        self._live_run = max(1, round(1 / backfill_share) - 1) if backfill_share > 0 else 0
        self._on_done = on_done
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._attempts = Attempts(stage, metrics, self._stopping)

    @property
    def trouble(self) -> Trouble | None:
        """What the stage is waiting for, if it stands still."""
        return self._attempts.breaker.trouble

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(lane), name=f"lane-{n}") for n, lane in enumerate(self._lanes)]

    async def put(self, record: Incoming, tag: object) -> None:
        """Queue a record in its key's lane; waits while that lane is full, which holds back the record's topic."""
        lane = self._lanes[zlib.crc32(record.key or b"") % len(self._lanes)]
        queue, room = lane.queues[record.lane], lane.room[record.lane]
        while len(queue) >= self._queue_size and not self._stopping.is_set():
            room.clear()
            await room.wait()
        queue.append((record, tag))
        lane.changed.set()

    def forget(self, stale: Callable[[object], bool]) -> None:
        """Drop waiting records whose tag is stale (their partition was revoked: the broker sends them again)."""
        for lane in self._lanes:
            for name, queue in lane.queues.items():
                kept = [item for item in queue if not stale(item[1])]
                queue.clear()
                queue.extend(kept)
                lane.room[name].set()
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
            for room in lane.room.values():
                room.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, lane: _KeyLane) -> None:
        while not self._stopping.is_set():
            batch = await self._next(lane)
            if batch is not None:
                await self._work(lane, batch)

    async def _next(self, lane: _KeyLane) -> Batch | None:
        """The parked record when its time has come, else what waits."""
        parked = lane.parked
        if parked is None:
            return await self._gather(lane)
        wait = parked.not_before - monotonic()
        if wait > 0 and not lane.waiting:
            lane.changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await lane.changed.wait()
            except TimeoutError:
                wait = 0.0
        if wait <= 0:
            lane.parked = None
            return parked
        return await self._gather(lane) if lane.waiting else None

    async def _work(self, lane: _KeyLane, batch: Batch) -> None:
        """Handle a batch to its end, or leave one failing record parked. The parts of a batch that was halved wait for
        each other as little as records in the queue do."""
        parts = [batch]
        while parts and not self._stopping.is_set():
            part = min(parts, key=lambda p: p.not_before)
            if (wait := part.not_before - monotonic()) > 0:
                await self._attempts.pause(wait)
            outcome = await self._attempts.once(part)
            if outcome == "done":
                parts.remove(part)
                for record, tag in part.items:
                    self._on_done(record, tag)
            elif outcome == "split":
                parts.remove(part)
                parts += part.halves()
            elif self._parks(lane, part, others=lane.waiting or len(parts) > 1):
                parts.remove(part)
                lane.parked = part

    @staticmethod
    def _parks(lane: _KeyLane, part: Batch, *, others: bool) -> bool:
        return others and len(part.items) == 1 and part.tries >= PARK_AFTER and lane.parked is None

    async def _gather(self, lane: _KeyLane) -> Batch | None:
        """The next batch, all live or all backfill: after a run of live batches one of backfill has its turn."""
        live, backfill = lane.queues["live"], lane.queues["backfill"]
        if not live and not backfill:
            lane.changed.clear()
            await lane.changed.wait()
        await self._company(lane)
        if self._stopping.is_set() or not (live or backfill):
            return None
        starved = bool(backfill) and self._live_run > 0 and lane.live_batches >= self._live_run
        name: Lane = "live" if live and not starved else "backfill"
        lane.began = monotonic()
        lane.live_batches = lane.live_batches + 1 if name == "live" else 0
        queue = lane.queues[name]
        items: list[Item] = []
        size = 0
        while queue and len(items) < self._stage.batch_size and size < BATCH_BYTES:
            items.append(queue.popleft())
            size += len(items[-1][0].value or b"")
        lane.room[name].set()
        return Batch(items)

    async def _company(self, lane: _KeyLane) -> None:
        """Let a small batch grow: until it is full, or ``batch_wait_seconds`` after the last one began. A steady stream
        is handled in few batches of many, which cost little more than one of one; what comes alone does not wait."""
        wait = min(self._batch_wait, max(TOGETHER_SECONDS, lane.began + self._batch_wait - monotonic()))
        try:
            async with asyncio.timeout(wait):
                while not (self._stopping.is_set() or lane.full(self._stage.batch_size)):
                    lane.changed.clear()
                    await lane.changed.wait()
        except TimeoutError:
            return
