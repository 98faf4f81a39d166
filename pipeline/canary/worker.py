"""The process ``penstock worker canary``: which canaries there are, who looks after them, and their end.

It writes to ``documents.live.v1`` and otherwise only reads, as the query service does: its roles are the query
service's, with that one topic.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import cast

import structlog

from pipeline.canary.question import Reference
from pipeline.canary.telemetry import CanaryMetrics
from pipeline.canary.watch import Watch
from pipeline.core.canary import EXTERNAL_ID, MARK, Canary
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.health import health
from pipeline.kafka import publisher
from pipeline.settings import CanarySettings, Settings
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection, Pool, open_pool, translated
from pipeline.tasks import ended
from query.retrieval import Search
from query.settings import RetrievalSettings

log = structlog.get_logger()

CANARY_LOCK = 7_300_010
"""Held by the one process that publishes canaries: two would overwrite each other's."""
LIST_SECONDS = 30.0
"""Between two looks at which sources there are, and at whether it is our turn."""
MOST = 500
"""Canaries. Of more sources, the first ones by name."""
PIPELINE = Canary("default", "pipeline")
"""Where no source is known."""


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; then the canaries are removed. Raises Misconfigured at once when nothing could work."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    declared(settings.canary)
    metrics = CanaryMetrics()
    ready = asyncio.Event()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(health(settings, metrics, ready.is_set, lambda: {"stages": []}))
        pool = await stack.enter_async_context(open_pool(settings.postgres))
        es = connect(settings.elasticsearch)
        stack.push_async_callback(es.close)
        # Nothing is remembered from one look to the next: it shall be a search like anybody's first.
        search = Search(pool, es, Reference(pool), settings=RetrievalSettings(cached_queries=0, feedback=False))
        kafka = await stack.enter_async_context(publisher(settings))
        canaries = Canaries(pool, Watch(search, kafka, metrics, settings.canary), metrics, settings.canary)
        ready.set()
        log.info("worker_started", worker="canary")
        await canaries.run(stop)
    log.info("worker_stopped", worker="canary")


def declared(settings: CanarySettings) -> list[Canary]:
    """Those that the settings name. Raises Misconfigured."""
    found = [Canary(*one.split("/")) for one in settings.sources if one.count("/") == 1 and all(one.split("/"))]
    if len(found) < len(settings.sources):
        raise Misconfigured("PENSTOCK_CANARY_SOURCES: write each as tenant/source")
    return found


class Canaries:
    def __init__(self, pool: Pool, watch: Watch, metrics: CanaryMetrics, settings: CanarySettings) -> None:
        self._pool = pool
        self._watch = watch
        self._metrics = metrics
        self._settings = settings
        self._following: dict[Canary, asyncio.Task[None]] = {}
        self._told_of_another = False
        # Known before Postgres can say more; where no source is known one stands for the pipeline.
        metrics.wanted.set(0 if settings.every_seconds == 0 else max(1, len(declared(settings)[:MOST])))

    async def run(self, stop: asyncio.Event) -> None:
        """Look after them whenever this process is the one to. A world that is down is waited for."""
        while not stop.is_set():
            try:
                with translated("canaries"):
                    async with self._pool.connection() as connection:
                        await self._lead(connection, stop)
            except PenstockError as error:
                log.warning("canaries_failed", reason=str(error)[:200])
            finally:
                await self._cancel(list(self._following))
                self._metrics.canaries.set(0)
            await _pause(stop)

    async def _lead(self, connection: Connection, stop: asyncio.Event) -> None:
        """For as long as no other process does. Raises Retryable when the connection that says so is lost."""
        async with connection.transaction():
            row = await (await connection.execute("SELECT pg_try_advisory_lock(%s)", [CANARY_LOCK])).fetchone()
        if not (row and row[0]):
            if not self._told_of_another:
                log.info("canaries_elsewhere", reason="another process holds their lock; this one stands by")
            self._told_of_another = True
            return
        self._told_of_another = False
        try:
            self._watch.keep_time(await _clock(connection))
            await self._watch.remove(await self._left(connection))
            while not stop.is_set():
                self._watch.keep_time(await _clock(connection))
                await self._adjust(await self._wanted(connection))
                await _pause(stop)
            following = list(self._following)
            await self._cancel(following)
            await self._watch.remove(following)
        finally:
            if not connection.closed and not connection.broken:
                await connection.rollback()
                await connection.execute("SELECT pg_advisory_unlock(%s)", [CANARY_LOCK])
                await connection.commit()

    async def _adjust(self, wanted: list[Canary]) -> None:
        """Follow these and no others. Raises Retryable."""
        self._metrics.wanted.set(len(wanted))
        gone = [one for one in self._following if one not in wanted]
        await self._cancel(gone)
        for one in gone:
            self._watch.forget(one)
        await self._watch.remove(gone)
        for one in wanted:
            if one not in self._following:
                self._following[one] = asyncio.create_task(self._watch.follow(one), name=f"canary {one.stands_for}")
        self._metrics.canaries.set(len(self._following))
        for task in self._following.values():
            if task.done():  # it never should
                raise RuntimeError("a canary's rounds gave up") from task.exception()

    async def _cancel(self, canaries: list[Canary]) -> None:
        await ended([self._following.pop(one) for one in canaries])

    async def _wanted(self, connection: Connection) -> list[Canary]:
        if self._settings.every_seconds == 0:
            return []
        if self._settings.sources:
            return declared(self._settings)[:MOST]
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT tenant, source FROM connectors WHERE removed_at IS NULL ORDER BY tenant, source LIMIT %s",
                [MOST],
            )
            return [Canary(tenant, source) for tenant, source in await cursor.fetchall()] or [PIPELINE]

    async def _left(self, connection: Connection) -> list[Canary]:
        """Those that a process which was killed has left behind. Reads the whole table, once a start."""
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT tenant, source FROM overview_documents"  # rows of `documents` are divided by tenant
                " WHERE external_id = %s AND starts_with(source, %s) AND deleted_at IS NULL",
                [EXTERNAL_ID, MARK],
            )
            return [Canary(tenant, source.removeprefix(MARK)) for tenant, source in await cursor.fetchall()]


async def _clock(connection: Connection) -> datetime:
    async with connection.transaction():
        row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    return cast("datetime", row[0])


async def _pause(stop: asyncio.Event) -> None:
    """Until it is time to look again, or to stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LIST_SECONDS):
            await stop.wait()
