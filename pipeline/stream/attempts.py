"""Handling of a batch that fails: wait for the service, or set one record aside because the others succeed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

import structlog

from pipeline.core.breaker import Breaker, Trouble
from pipeline.core.errors import Deferred, Misconfigured, Retryable, Service
from pipeline.core.retry import backoff
from pipeline.observability import traced_records as traced
from pipeline.observability.metrics import Metrics
from pipeline.observability.tracing import Span
from pipeline.stages.stage import SERVICES_USED, Flooded, Incoming, Stage

log = structlog.get_logger()

RETRY_BASE_SECONDS = 0.2
RETRY_CAP_SECONDS = 20.0
SET_ASIDE_AFTER = 6
"""Tries (about six seconds of waiting) before a batch may count as being at fault itself."""
OTHERS_SUCCEEDED = 3
"""It then is at fault if so many other batches got through the same service since it first failed."""
SPLIT_EVERY = 10
"""Without such evidence (nobody else has work) a batch is halved after so many tries: one half may get through."""

Item = tuple[Incoming, object]
Outcome = Literal["done", "again", "split"]


@dataclass(slots=True, eq=False)
class Batch:
    items: Sequence[Item]
    tries: int = 0
    proved: Counter[Service | None] = field(default_factory=Counter)
    """How often other batches had got through each service when it first failed."""
    not_before: float = 0.0
    """On time.monotonic()."""

    refused: Sequence[Incoming] = ()
    """The records whose dead letters are too many; the others are handled."""

    @property
    def flooded(self) -> bool:
        """True while it only waits until its dead letters may be sent."""
        return bool(self.refused)

    def parts(self) -> tuple[Batch, Batch]:
        """The records that were not refused and those that were; two halves where none was refused."""
        if self.refused:
            rest = [item for item in self.items if item[0] not in self.refused]
            refused = [item for item in self.items if item[0] in self.refused]
            return Batch(rest), Batch(refused, self.tries, self.proved, self.not_before, self.refused)
        middle = len(self.items) // 2
        tries = 0 if self.tries and self.tries % SPLIT_EVERY == 0 else self.tries
        first, second = (Batch(half, tries, self.proved) for half in (self.items[:middle], self.items[middle:]))
        return first, second


class Attempts:
    """Law: "done" is said of a batch that was handled, or whose one record was made visible and kept (``set_aside``).
    A world that is down is waited for, however long; what asks us to come back later (429) is no failure of a record.
    """

    def __init__(self, stage: Stage, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._stage = stage
        self._metrics = metrics
        self._stopping = stopping
        self._proved: Counter[Service | None] = Counter()
        self._flood: Trouble | None = None
        self.breaker = Breaker()

    @property
    def trouble(self) -> Trouble | None:
        """The trouble that the stage, or a lane of it, is waiting out."""
        return self.breaker.trouble or self._flood

    async def once(self, batch: Batch) -> Outcome:
        """Try it once. "again": not before ``batch.not_before``; "split": each of its parts by itself."""
        if not await self._admitted():
            return "again"
        records = [record for record, _ in batch.items]
        with traced.batch(self._stage.name, records, tries=batch.tries) as span:
            return await self._once(batch, records, span)

    async def _once(self, batch: Batch, records: Sequence[Incoming], span: Span) -> Outcome:
        used: set[Service] = {"postgres"}
        token = SERVICES_USED.set(used)
        try:
            with self._metrics.batch(self._stage.name, len(records)):
                await self._stage.handle(records)
        except (Retryable, Misconfigured, OSError, MemoryError) as error:
            span.failed(error)
            if _service(error) == "dead-letters":
                self._ended(used)
            self._note(batch, error)
            if isinstance(error, Flooded):
                batch.tries, batch.refused = 0, error.records  # that it waited says nothing against it later
                return "split" if len(error.records) < len(batch.items) else "again"
            batch.refused = ()
            if self._at_fault(batch, error):
                return await self._blame(batch, error)
            if batch.tries % SPLIT_EVERY == 0 and len(batch.items) > 1:
                return "split"
            return "again"
        except Exception as error:  # noqa: BLE001  a record that fails must not take the partition with it
            span.failed(error)
            self._ended(used)
            return await self._blame(batch, error)
        finally:
            SERVICES_USED.reset(token)
        self._ended(used)
        if batch.flooded:
            self._flood = None
        self._proved.update([None, *used])
        return "done"

    async def pause(self, seconds: float) -> None:
        """Sleep, or less when the stage is told to stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _admitted(self) -> bool:
        while not self._stopping.is_set():
            wait = self.breaker.enter(monotonic())
            if wait == 0:
                return True
            await self.pause(wait)
        return False

    def _note(self, batch: Batch, error: Retryable | Misconfigured | OSError | MemoryError) -> None:
        service, after = _service(error), error.retry_after if isinstance(error, Retryable) else None
        if batch.tries == 0:
            batch.proved = self._proved.copy()
        batch.tries += 1
        seconds = backoff(
            batch.tries,
            base=RETRY_BASE_SECONDS,
            cap=RETRY_CAP_SECONDS,
            retry_after=after,
            random=random.random(),  # noqa: S311  jitter
        )
        batch.not_before = monotonic() + seconds
        reason = str(error)[:300] if isinstance(error, Retryable | Misconfigured) else type(error).__name__
        self._metrics.retries.labels(stage=self._stage.name).inc()
        log.warning(
            "batch_delayed", stage=self._stage.name, tries=batch.tries, seconds=round(seconds, 2), reason=reason
        )
        if service == "dead-letters":  # records that are not part of the flood continue
            self._flooded(reason)
            return
        closed = self.breaker.trouble is None
        first = batch.items[0][0]
        self.breaker.failed(
            (first.topic, first.partition, first.offset),
            service,
            reason,
            now=monotonic(),
            retry_after=after,
            random=random.random(),  # noqa: S311  jitter
        )
        if closed and self.breaker.trouble is not None:
            self._metrics.breaker(self._stage.name, service, is_open=True)
            log.error("breaker_opened", stage=self._stage.name, service=service, reason=reason)

    def _flooded(self, reason: str) -> None:
        """There are too many dead letters: some lanes wait, which is no reason for the others to."""
        before = self._flood
        self._flood = Trouble(
            "dead-letters", reason, before.since if before else monotonic(), before.trials + 1 if before else 0
        )

    def _ended(self, used: set[Service]) -> None:
        if "dead-letters" in used:
            self._flood = None
        before = self.breaker.trouble
        self.breaker.ended(used)
        if before is not None and self.breaker.trouble is None:
            self._metrics.breaker(self._stage.name, before.service, is_open=False)
            log.info("breaker_closed", stage=self._stage.name, service=before.service)

    def _at_fault(self, batch: Batch, error: Exception) -> bool:
        """It keeps failing while others get through the very service that it fails at."""
        service = _service(error)
        others = self._proved[service] - batch.proved[service]
        return not isinstance(error, Deferred) and batch.tries >= SET_ASIDE_AFTER and others >= OTHERS_SUCCEEDED

    async def _blame(self, batch: Batch, error: Exception) -> Outcome:
        """Halve until the one failing record stands alone; that one is set aside."""
        if len(batch.items) > 1:
            return "split"
        try:
            await self._stage.set_aside(batch.items[0][0], error)
        except Exception as again:  # noqa: BLE001  the world is down: the record stays where it is
            self._metrics.retries.labels(stage=self._stage.name).inc()
            log.warning("set_aside_failed", stage=self._stage.name, error=type(again).__name__, reason=str(again)[:200])
            after = again.retry_after if isinstance(again, Retryable) else None
            if isinstance(again, Flooded):
                self._flooded(str(again)[:300])
                batch.refused = again.records
            batch.not_before = monotonic() + (after or RETRY_CAP_SECONDS / 4)
            return "again"
        return "done"


def _service(error: Exception) -> Service | None:
    return error.service if isinstance(error, Retryable | Misconfigured) else None
