"""Undo what a bulk request wrote that reached Elasticsearch long after its sender died or stopped waiting for it.

Versions order all writes of one entry, but Elasticsearch remembers the version of a deleted entry for
``index.gc_deletes`` only. A write that is older than the delete and arrives after that is accepted: an entry of a
deleted or revoked text, which nothing would ever remove. So a bulk whose outcome is unknown stays recorded
(``pipeline.ledger.bulks``), and as long as it may arrive, its entries that the ledger does not want are deleted again.
Each such delete also renews Elasticsearch's memory of it, so that a late write is normally refused. A delete needs no
claim: at the version that it carries the ledger does not want the entry, and whatever is wanted later has a higher one.
But what the ledger holds to stand there is no longer confirmed from then on, in the transaction that judged it: were it
wanted again before its delete is processed, it would count as unchanged.
See docs/adr/0039-open-bulks.md.
"""

from __future__ import annotations

import asyncio

import structlog

from pipeline.core.errors import PenstockError
from pipeline.ledger import bulks, work
from pipeline.ledger.bulks import OpenBulk
from pipeline.stores.keywords import Keywords, Write
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics

log = structlog.get_logger()

INTERVAL_SECONDS = 30.0
"""Between two looks for bulks whose check is due."""
CHECK_SECONDS = 240.0
"""Between two checks of one bulk: well below ``index.gc_deletes`` (pipeline.stores.elasticsearch.GC_DELETES), so that a
delete is repeated before it is forgotten."""
SEND_SECONDS = 3_600.0
"""A worker that has not sent a bulk so long after its claim claims again. It bounds how late a bulk can be sent …"""
EXPIRE_SECONDS = 86_400.0
"""… and how long its arrival is reckoned with after the claim: a day, far beyond what kernels, proxies and the server's
queues hold a request (minutes)."""
BULKS_PER_ROUND = 20


class LateBulks:
    """Runs in every keywords worker; they share the checks that are due."""

    def __init__(
        self,
        pool: Pool,
        keywords: Keywords,
        metrics: Metrics,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        check_seconds: float = CHECK_SECONDS,
        expire_seconds: float = EXPIRE_SECONDS,
    ) -> None:
        self._pool = pool
        self._keywords = keywords
        self._metrics = metrics
        self._interval = interval_seconds
        self._check = check_seconds
        self._expire = expire_seconds

    async def run(self) -> BaseException:
        """Check until cancelled. A service that is down is waited for: a check that failed is due again later."""
        while True:
            try:
                await self.check_due()
            except PenstockError as error:
                log.warning("open_bulks_not_read", reason=str(error)[:200])
            await asyncio.sleep(self._interval)

    async def check_due(self) -> int:
        """Check every bulk that is due; returns how many entries were removed. Raises Retryable or Misconfigured when
        Postgres cannot be asked."""
        removed = 0
        while True:
            with translated("open bulks"):
                async with self._pool.connection() as connection:
                    taken = await bulks.due(
                        connection,
                        limit=BULKS_PER_ROUND,
                        again_in_seconds=self._check,
                        expire_after_seconds=self._expire,
                    )
            for bulk in taken:
                try:
                    removed += await self._check_one(bulk)
                except PenstockError as error:
                    log.warning("open_bulk_not_checked", index=bulk.keyword_index, reason=str(error)[:200])
            if len(taken) < BULKS_PER_ROUND:
                return removed

    async def _check_one(self, bulk: OpenBulk) -> int:
        with translated("open bulks"):
            async with self._pool.connection() as connection:
                generation = await bulks.user_of(connection, bulk.keyword_index)
                if generation is None:
                    await bulks.forget(connection, bulk.id)
                    return 0
                await work.lock_wants(connection, generation, "keywords", [entry.document for entry in bulk.entries])
                unwanted = await bulks.unwanted(connection, bulk)
                await work.reopen_keywords(
                    connection, generation, [(entry.document, entry.seq, [entry.chunk]) for entry in unwanted.confirmed]
                )
        removed = 0
        if unwanted.entries:
            deletes = [Write(bulk.keyword_index, entry.chunk, entry.seq, None) for entry in unwanted.entries]
            removed = sum(outcome.removed for outcome in await self._keywords.apply(deletes))
        if removed:
            await self._keywords.refreshed(bulk.keyword_index)
            self._metrics.late_entries.inc(removed)
            documents = {entry.document for entry in unwanted.entries}
            log.warning("late_bulk_undone", index=bulk.keyword_index, entries=removed, documents=len(documents))
        if bulk.expired and unwanted.complete:
            with translated("open bulks"):
                async with self._pool.connection() as connection:
                    await bulks.forget(connection, bulk.id)
        return removed
