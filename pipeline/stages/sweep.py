"""The sweeper: hints again whatever stays pending, announces whatever was missed. A net: hints do the work."""

from __future__ import annotations

import asyncio
from itertools import count

import structlog

from pipeline import tracing
from pipeline.core.errors import PenstockError
from pipeline.ledger import work
from pipeline.stages.announce import Announcer
from pipeline.stages.hints import send_hints
from pipeline.stores.postgres import SWEEPER_LOCK, Pool, translated
from pipeline.telemetry import Metrics
from topics.producer import Producer

log = structlog.get_logger()

SWEEP_LIMIT = 500
"""Documents hinted again in one round."""
ANNOUNCE_EVERY = 5
"""Rounds between two looks for announcements that a crash cut off, a page of documents each."""


class Sweeper:
    """Runs in every detect worker; an advisory lock lets one of them look at a time, and what one has taken is put off
    for the others."""

    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        announcer: Announcer,
        metrics: Metrics,
        *,
        interval_seconds: float,
        again_in_seconds: float,
    ) -> None:
        self._pool = pool
        self._producer = producer
        self._announcer = announcer
        self._metrics = metrics
        self._interval = interval_seconds
        self._again = again_in_seconds

    async def run(self) -> BaseException:
        """Sweep until cancelled; a world that is down is waited for."""
        position = 0
        for round_ in count():
            try:
                await self.sweep()
                if round_ % ANNOUNCE_EVERY == 0:
                    position = await self._announcer.announce_missed(position)
            except PenstockError as error:
                log.warning("sweep_failed", reason=str(error)[:200])
            await asyncio.sleep(self._interval)
        raise AssertionError("unreachable: the count has no end")

    async def sweep(self) -> int:
        """One round; returns how many hints were sent again. Does nothing when another worker is at it."""
        with translated("sweeper"):
            async with self._pool.connection() as connection, connection.transaction():
                cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [SWEEPER_LOCK])
                row = await cursor.fetchone()
                if not (row and row[0]):
                    return 0
                due = await work.due(connection, limit=SWEEP_LIMIT, again_in_seconds=self._again)
        if not due:
            return 0
        # The ledger does not keep the context of the event that it accepted: a rescued document begins a new trace.
        with tracing.begin("sweep", parent="", gathers=True, attributes={"penstock.documents": len(due)}):
            sent = await send_hints(self._producer, [(d.identity, d.generation, d.lane) for d in due])
        if sent:
            self._metrics.rescued.inc(sent)
            log.warning("rescued", hints=sent)
        return sent
