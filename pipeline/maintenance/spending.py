"""Records the cost of embeddings by day: metrics end with their process, and a budget is for a day."""

from __future__ import annotations

import asyncio

import structlog

from pipeline.core.errors import PenstockError
from pipeline.observability.metrics import Metrics, Purpose
from pipeline.stores.postgres import Pool, translated

log = structlog.get_logger()

RECORD_INTERVAL_SECONDS = 15.0
"""A worker that is killed leaves at most its last so many seconds unrecorded."""


class Spending:
    """Runs in every vectors worker. Law: the table has the sum of all workers' metrics, except for the last
    RECORD_INTERVAL_SECONDS of a worker that was killed."""

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._recorded: dict[Purpose, tuple[int, float]] = {}
        """Purpose → (tokens, cost) that the table has of this process."""

    async def run(self) -> BaseException:
        """Record until cancelled. While Postgres is unreachable the amount accumulates in memory."""
        while True:
            await asyncio.sleep(RECORD_INTERVAL_SECONDS)
            await self.record()

    async def record(self) -> None:
        """Add the spending since the previous call to today's row. An unreachable Postgres is logged, not raised."""
        spent = dict(self._metrics.embedding_spent)
        increases = {
            purpose: (tokens - before[0], cost - before[1])
            for purpose, (tokens, cost) in spent.items()
            if (before := self._recorded.get(purpose, (0, 0.0))) != (tokens, cost)
        }
        if not increases:
            return
        try:
            with translated("embedding_days"):
                async with self._pool.connection() as connection:
                    await connection.cursor().executemany(
                        "INSERT INTO embedding_days AS d (day, purpose, tokens, cost)"
                        " VALUES ((clock_timestamp() AT TIME ZONE 'UTC')::date, %s, %s, %s)"
                        " ON CONFLICT (day, purpose) DO UPDATE SET tokens = d.tokens + excluded.tokens,"
                        " cost = d.cost + excluded.cost",
                        [(purpose, tokens, cost) for purpose, (tokens, cost) in sorted(increases.items())],
                    )
        except PenstockError as error:
            log.warning("spending_not_recorded", reason=str(error)[:200])
            return
        self._recorded = spent
