"""Handling a batch that may fail: wait out an outage, or find the record that is at fault and set it aside."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, TypeGuard

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
SET_ASIDE_AFTER_TRIES = 6
"""A batch may be found at fault after this many tries, which are about six seconds of waiting."""
MIN_OTHER_SUCCESSES = 3
"""It then is at fault if the service that it fails at has served this many other batches since its first failure."""
SPLIT_EVERY_TRIES = 10
"""Without such evidence, because there are no other batches, a batch is halved each time it has failed this often: one
half may succeed. It is halved at once where the service is known to answer others."""

PUT_OFF_AFTER_SECONDS = 10.0
"""A record that fails alone is put off at once if it may come back only after so long."""

Item = tuple[Incoming, object]
Outcome = Literal["done", "again", "split"]


@dataclass(slots=True, eq=False)
class Batch:
    """Records that are handled together, and what their earlier tries have shown."""

    items: Sequence[Item]
    tries: int = 0
    successes_before: Counter[Service | None] = field(default_factory=Counter)
    """How many batches each service had served when this one first failed; under None, all batches."""
    not_before: float = 0.0
    """The time of the next try, on time.monotonic()."""

    refused: Sequence[Incoming] = ()
    """The records that exceed the limit on dead letters; the other records of the batch are handled."""
    alone: bool = False
    """True if it failed while the service is known to answer others."""

    @property
    def flooded(self) -> bool:
        """True while it waits only until its dead letters may be sent."""
        return bool(self.refused)

    def forget(self, stale: Callable[[object], bool]) -> None:
        """Drop the records whose tag is stale."""
        self.items = [item for item in self.items if not stale(item[1])]
        left = {id(record) for record, _ in self.items}
        self.refused = [record for record in self.refused if id(record) in left]

    def parts(self) -> tuple[Batch, Batch]:
        """Split the batch into the records that were not refused and those that were, or into halves if none was."""
        if self.refused:
            rest = [item for item in self.items if item[0] not in self.refused]
            refused = [item for item in self.items if item[0] in self.refused]
            return Batch(rest), Batch(refused, self.tries, self.successes_before, self.not_before, self.refused)
        middle = len(self.items) // 2
        tries = 0 if self.tries and self.tries % SPLIT_EVERY_TRIES == 0 else self.tries
        first, second = (
            Batch(half, tries, self.successes_before) for half in (self.items[:middle], self.items[middle:])
        )
        return first, second


class Attempts:
    """Tries the batches of one stage.

    Law: a batch is "done" only if it was handled, or if its only record was set aside. A batch never counts as at fault
    during an outage, however long, nor because of an answer that asks us to come back later (429).
    """

    def __init__(self, stage: Stage, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._stage = stage
        self._metrics = metrics
        self._stopping = stopping
        self._successes: Counter[Service | None] = Counter()
        self._flood: Trouble | None = None
        self.breaker = Breaker()

    @property
    def trouble(self) -> Trouble | None:
        """The outage or flood of dead letters that the stage, or one of its lanes, waits for; None: there is none."""
        return self.breaker.trouble or self._flood

    async def once(self, batch: Batch) -> Outcome:
        """Try a batch once. Returns "done", "again" (try it again at ``batch.not_before``), or "split" (try each of its
        ``parts`` on its own)."""
        if not await self._wait_for_breaker():
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
                self._record_end(used)
            self._record_failure(batch, error)
            if isinstance(error, Flooded):
                batch.tries, batch.refused = 0, error.records  # tries during a flood are no evidence against the batch
                return "split" if len(error.records) < len(batch.items) else "again"
            batch.refused = ()
            if self._is_at_fault(batch, error):
                return await self._split_or_set_aside(batch, error)
            if self._fails_alone(error, batch):
                if not isinstance(error, Deferred):
                    return await self._split_or_set_aside(batch, error)
                if await self._is_put_off(batch, error):
                    return "done"
            if len(batch.items) > 1 and (batch.alone or batch.tries % SPLIT_EVERY_TRIES == 0):
                return "split"
            return "again"
        except Exception as error:  # noqa: BLE001  a failing record must not stop its partition
            span.failed(error)
            self._record_end(used)
            return await self._split_or_set_aside(batch, error)
        finally:
            SERVICES_USED.reset(token)
        self._record_end(used)
        if batch.flooded:
            self._flood = None
        self._successes.update([None, *used])
        return "done"

    async def pause(self, seconds: float) -> None:
        """Sleep for this time, or until the stage stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _wait_for_breaker(self) -> bool:
        """Wait until the circuit breaker permits a try; returns False when the stage stops before."""
        while not self._stopping.is_set():
            wait = self.breaker.enter(monotonic())
            if wait == 0:
                return True
            await self.pause(wait)
        return False

    def _record_failure(self, batch: Batch, error: Retryable | Misconfigured | OSError | MemoryError) -> None:
        """Count a failed try, choose the time of the next one, and report the failure to the circuit breaker."""
        service, after = _service(error), error.retry_after if isinstance(error, Retryable) else None
        batch.alone = isinstance(error, Retryable) and error.alone
        if batch.tries == 0:
            batch.successes_before = self._successes.copy()
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
        if service == "dead-letters":  # no outage: records that are not part of the flood go on
            self._record_flood(reason)
            return
        if batch.alone:  # no outage: the service answers others
            self._record_end(set())
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

    def _record_flood(self, reason: str) -> None:
        """Record that there are too many dead letters. The circuit breaker does not count it: only some lanes wait."""
        before = self._flood
        self._flood = Trouble(
            "dead-letters", reason, before.since if before else monotonic(), before.trials + 1 if before else 0
        )

    def _record_end(self, used: set[Service]) -> None:
        """Report a batch that ended without an outage. used: the services that have answered it."""
        if "dead-letters" in used:
            self._flood = None
        before = self.breaker.trouble
        self.breaker.ended(used)
        if before is not None and self.breaker.trouble is None:
            self._metrics.breaker(self._stage.name, before.service, is_open=False)
            log.info("breaker_closed", stage=self._stage.name, service=before.service)

    def _is_at_fault(self, batch: Batch, error: Exception) -> bool:
        """Whether this batch keeps failing although the service that it fails at serves others."""
        service = _service(error)
        others = self._successes[service] - batch.successes_before[service]
        return (
            not isinstance(error, Deferred) and batch.tries >= SET_ASIDE_AFTER_TRIES and others >= MIN_OTHER_SUCCESSES
        )

    def _fails_alone(self, error: Exception, batch: Batch) -> TypeGuard[Retryable]:
        """Whether this is a record that fails alone again and again, or is to come back late."""
        if not (isinstance(error, Retryable) and batch.alone and len(batch.items) == 1):
            return False
        return batch.tries >= SET_ASIDE_AFTER_TRIES or (error.retry_after or 0.0) >= PUT_OFF_AFTER_SECONDS

    async def _is_put_off(self, batch: Batch, error: Retryable) -> bool:
        """Have a record put off that fails alone: no lane keeps it, and an operator sees it."""
        try:
            return await self._stage.put_off(batch.items[0][0], error)
        except Exception as again:  # noqa: BLE001  an outage, for example: the record stays in its lane
            log.warning("set_aside_failed", stage=self._stage.name, error=type(again).__name__, reason=str(again)[:200])
            return False

    async def _split_or_set_aside(self, batch: Batch, error: Exception) -> Outcome:
        """Ask for a batch of several records to be halved; set a single record aside."""
        if len(batch.items) > 1:
            batch.refused = ()  # it no longer fails because of them
            return "split"
        try:
            await self._stage.set_aside(batch.items[0][0], error)
        except Exception as again:  # noqa: BLE001  an outage, for example: the record is tried again
            self._metrics.retries.labels(stage=self._stage.name).inc()
            log.warning("set_aside_failed", stage=self._stage.name, error=type(again).__name__, reason=str(again)[:200])
            after = again.retry_after if isinstance(again, Retryable) else None
            if isinstance(again, Flooded):
                self._record_flood(str(again)[:300])
                batch.refused = again.records
            batch.not_before = monotonic() + (after or RETRY_CAP_SECONDS / 4)
            return "again"
        if batch.flooded:
            self._flood = None
        return "done"


def _service(error: Exception) -> Service | None:
    return error.service if isinstance(error, Retryable | Misconfigured) else None
