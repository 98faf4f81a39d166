"""Key lanes: documents of one key one after another, lanes side by side, live before backfill.

No Kafka here: records come in through ``put`` and leave through ``on_done``, exactly once each, in any order.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Lane
from pipeline.core.retry import backoff
from pipeline.stages.stage import Incoming, Stage
from pipeline.telemetry import Metrics

log = structlog.get_logger()

RETRY_BASE_SECONDS = 0.2
RETRY_CAP_SECONDS = 20.0
BATCH_BYTES = 4 * 1024 * 1024
"""A batch is closed when its records reach this: one large document a batch, so that others wait for one only."""


@dataclass(slots=True, eq=False)
class _KeyLane:
    queues: dict[Lane, deque[tuple[Incoming, object]]] = field(
        default_factory=lambda: {"live": deque(), "backfill": deque()}
    )
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    room: dict[Lane, asyncio.Event] = field(
        default_factory=lambda: {"live": asyncio.Event(), "backfill": asyncio.Event()}
    )
    live_batches: int = 0


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
        self._metrics = metrics
        self._on_done = on_done
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(lane), name=f"lane-{n}") for n, lane in enumerate(self._lanes)]

    async def put(self, record: Incoming, tag: object) -> None:
        """Queue a record in its key's lane; waits while that lane is full, which holds back the record's topic."""
        lane = self._lanes[zlib.crc32(record.key) % len(self._lanes)]
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
            batch = await self._gather(lane)
            if not batch:
                continue
            await self._work(batch)

    async def _gather(self, lane: _KeyLane) -> list[tuple[Incoming, object]]:
        """The next batch, all live or all backfill: after a run of live batches one of backfill has its turn."""
        live, backfill = lane.queues["live"], lane.queues["backfill"]
        if not live and not backfill:
            lane.changed.clear()
            await lane.changed.wait()
            if self._batch_wait and not self._stopping.is_set():
                await asyncio.sleep(self._batch_wait)
        if self._stopping.is_set() or not (live or backfill):
            return []
        starved = bool(backfill) and self._live_run > 0 and lane.live_batches >= self._live_run
        name: Lane = "live" if live and not starved else "backfill"
        lane.live_batches = lane.live_batches + 1 if name == "live" else 0
        queue = lane.queues[name]
        batch: list[tuple[Incoming, object]] = []
        size = 0
        while queue and len(batch) < self._stage.batch_size and size < BATCH_BYTES:
            batch.append(queue.popleft())
            size += len(batch[-1][0].value or b"")
        lane.room[name].set()
        return batch

    async def _work(self, batch: Sequence[tuple[Incoming, object]]) -> None:
        """Handle a batch to its end: wait out the world, halve until a failing record stands alone."""
        attempt = 0
        while not self._stopping.is_set():
            try:
                with self._metrics.batch(self._stage.name, len(batch)):
                    await self._stage.handle([record for record, _ in batch])
            except (Retryable, Misconfigured) as error:
                attempt += 1
                await self._wait(attempt, error)
            except Exception as error:  # noqa: BLE001  a record that fails must not take the partition with it
                if len(batch) > 1:
                    half = len(batch) // 2
                    await self._work(batch[:half])
                    await self._work(batch[half:])
                elif not await self._set_aside(batch[0][0], error):
                    continue
                else:
                    self._on_done(*batch[0])
                return
            else:
                for record, tag in batch:
                    self._on_done(record, tag)
                return

    async def _set_aside(self, record: Incoming, error: Exception) -> bool:
        """False when even that failed: the record is tried again later."""
        try:
            await self._stage.set_aside(record, error)
        except Exception as again:  # noqa: BLE001  the world is down: the record stays where it is
            self._metrics.retries.labels(self._stage.name).inc()
            log.warning("set_aside_failed", stage=self._stage.name, error=type(again).__name__, reason=str(again)[:200])
            await self._pause(RETRY_CAP_SECONDS / 4)
            return False
        return True

    async def _wait(self, attempt: int, error: Retryable | Misconfigured) -> None:
        self._metrics.retries.labels(self._stage.name).inc()
        after = error.retry_after if isinstance(error, Retryable) else None
        seconds = backoff(
            attempt, base=RETRY_BASE_SECONDS, cap=RETRY_CAP_SECONDS, retry_after=after,
            random=random.random(),  # noqa: S311  jitter
        )  # fmt: skip
        log.warning(
            "waiting", stage=self._stage.name, attempt=attempt, seconds=round(seconds, 2), reason=str(error)[:300]
        )
        await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
