"""What embedding costs, written down day by day: the metrics forget with their process, and a budget is a day's."""

from __future__ import annotations

import asyncio

import structlog

from pipeline.core.errors import PenstockError
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics

log = structlog.get_logger()

EVERY_SECONDS = 15.0
"""What a worker that is killed may leave uncounted."""
TOKENS, COST = "penstock_embedding_tokens_total", "penstock_embedding_cost_total"
UNNAMED = "document"
"""The purpose of what does not say another."""


class Spending:
    """Runs in every vectors worker. Law: over all workers the table says what their metrics say, but for the last
    EVERY_SECONDS of one that was killed."""

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._noted: dict[str, tuple[float, float]] = {}
        """By purpose: (tokens, cost) that are in the table."""

    async def run(self) -> BaseException:
        """Write it down until cancelled; a Postgres that is away is waited for, and nothing is forgotten meanwhile."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.note()

    async def note(self) -> None:
        """Add what has come since the last time. Never raises because Postgres is away."""
        now = self._spent()
        news = {
            purpose: (tokens - before[0], cost - before[1])
            for purpose, (tokens, cost) in now.items()
            if (before := self._noted.get(purpose, (0.0, 0.0))) != (tokens, cost)
        }
        if not news:
            return
        try:
            with translated("embedding_days"):
                async with self._pool.connection() as connection:
                    await connection.cursor().executemany(
                        "INSERT INTO embedding_days AS d (day, purpose, tokens, cost)"
                        " VALUES ((clock_timestamp() AT TIME ZONE 'UTC')::date, %s, %s, %s)"
                        " ON CONFLICT (day, purpose) DO UPDATE SET tokens = d.tokens + excluded.tokens,"
                        " cost = d.cost + excluded.cost",
                        [(purpose, round(tokens), cost) for purpose, (tokens, cost) in sorted(news.items())],
                    )
        except PenstockError as error:
            log.warning("spending_not_noted", reason=str(error)[:200])
            return
        self._noted = now

    def _spent(self) -> dict[str, tuple[float, float]]:
        """(tokens, cost) of this process, by what they were for."""
        found: dict[str, list[float]] = {}
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                if sample.name in (TOKENS, COST):
                    both = found.setdefault(sample.labels.get("purpose", UNNAMED), [0.0, 0.0])
                    both[sample.name == COST] += sample.value
        return {purpose: (tokens, cost) for purpose, (tokens, cost) in found.items()}
