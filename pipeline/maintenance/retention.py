"""Erases what is retained for a limited time: one task, a small batch of each kind at a time, by index."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import UUID

import structlog
from psycopg.errors import LockNotAvailable

from pipeline.core.errors import PenstockError
from pipeline.ledger.personal import PLACES, SETS_AT_ONCE, erase_rest_of_documents, erase_unused_access_sets
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import RetentionSettings
from pipeline.stores.leader import lead_transaction
from pipeline.stores.postgres import RETENTION_LOCK, Pool, translated

log = structlog.get_logger()

MOST = 500
"""Rows of one table that are erased at once, in some tens of milliseconds."""
IDLE_SECONDS = 60.0
BUSY_SECONDS = 1.0
"""The pause between two batches while there is more to erase: at most 500 rows of each table a second."""
SETS_LOOKED_AT = 10_000
"""How many access sets a turn examines for those that no document has: some tens of milliseconds."""
ERASED_LOOKED_AT = 1_000
"""How many erased documents a turn examines for what is left of them: some tens of milliseconds."""
SPENDING_DAYS = 400
"""For how long the spending of each day is kept."""


class Retention:
    """Erases in every detect worker; an advisory lock lets one of them work at a time."""

    def __init__(self, pool: Pool, metrics: Metrics, settings: RetentionSettings, *, most: int = MOST) -> None:
        self._pool = pool
        self._metrics = metrics
        self._settings = settings
        self._most = most
        self._looked_to = 0
        """The last access set that was looked at."""
        self._erased_to = UUID(int=0)
        """The last erased document that was looked at."""

    async def run(self) -> BaseException:
        """Erase until cancelled; outages are waited for."""
        while True:
            more = False
            try:
                more = await self.turn()
            except PenstockError as error:
                log.warning("retention_failed", reason=str(error)[:200])
            await asyncio.sleep(BUSY_SECONDS if more else IDLE_SECONDS)

    async def turn(self) -> bool:
        """Erase a batch of each table, each in a transaction of its own, and return whether there may be more. Does
        nothing while another worker erases. Raises Retryable."""
        more = False
        for place in PLACES:
            if place.age is None or not (days := getattr(self._settings, place.age.setting)):
                continue
            with translated("retention"):
                async with self._pool.connection() as connection:
                    try:
                        with translated("retention"):
                            async with connection.transaction():
                                if not await lead_transaction(connection, RETENTION_LOCK):
                                    return False
                                done = await connection.execute(place.age.statement, {"days": days, "most": self._most})
                    except PenstockError as error:  # such as a right that is missing, or a time limit
                        log.warning("retention_failed", table=place.table, reason=str(error)[:200])
                        continue  # all others are erased
            if done.rowcount:
                self._metrics.retention_erased.labels(table=place.table).inc(done.rowcount)
                log.info("rows_erased", table=place.table, rows=done.rowcount)
            more |= done.rowcount >= self._most
        return await self._leftovers() or more

    async def _leftovers(self) -> bool:
        """Erase what nothing else would end: what earlier versions left of erased documents, access sets that no
        document has, and the spending of days that are long past. Returns whether there may be more."""
        with translated("retention"):
            async with self._pool.connection() as connection, connection.transaction():
                if not await lead_transaction(connection, RETENTION_LOCK):
                    return False
                await connection.execute(
                    "DELETE FROM embedding_days WHERE day < (clock_timestamp() AT TIME ZONE 'UTC')::date - %s::integer",
                    [SPENDING_DAYS],
                )
                self._erased_to, events = await erase_rest_of_documents(connection, self._erased_to, ERASED_LOOKED_AT)
                sets = 0
                with suppress(LockNotAvailable):  # whoever accepts events has the table; the next turn tries again
                    self._looked_to, sets = await erase_unused_access_sets(connection, self._looked_to, SETS_LOOKED_AT)
        for table, rows in (("document_events", events), ("access_sets", sets)):
            if rows:
                self._metrics.retention_erased.labels(table=table).inc(rows)
                log.info("rows_erased", table=table, rows=rows)
        return events > 0 or sets == SETS_AT_ONCE
