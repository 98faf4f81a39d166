"""The process ``penstock worker canary``: which canaries there are, who looks after them, and their end.

It writes to ``documents.live.v1`` and otherwise only reads. In Postgres it reads views of SCHEMA, which have the names
of tables and show canaries alone (migration 0116); in Elasticsearch it has the query service's role.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import cast

import structlog

from canary.question import Reference
from canary.telemetry import CanaryMetrics
from canary.watch import Watch
from pipeline.core.canary import LIST_SECONDS, MARK, Canary
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.kafka.client import publisher
from pipeline.runtime.health import health
from pipeline.runtime.settings import CanarySettings, Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.elasticsearch import connect
from pipeline.stores.leader import leading
from pipeline.stores.postgres import CANARY_LOCK, Connection, Pool, open_pool, translated
from query.retrieval.search import Search
from query.settings import RetrievalSettings

log = structlog.get_logger()

SCHEMA = "canaries"
"""A login that may not use it, as that of the query service, reads the tables themselves."""
MAX_CANARIES = 500
"""With more sources, the first ones by name have a canary."""
PIPELINE = Canary("default", "pipeline")
"""The canary where no source is known."""


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT, then remove the canaries. Raises Misconfigured at once for wrong settings."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    declared(settings.canary)
    metrics = CanaryMetrics()
    ready = asyncio.Event()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(health(settings, metrics, ready.is_set, lambda: {"stages": []}))
        pool = await stack.enter_async_context(open_pool(settings.postgres, schema=SCHEMA))
        es = connect(settings.elasticsearch)
        stack.push_async_callback(es.close)
        # Nothing is cached: each search shall be like anybody's first one. And whether the canary's text is relevant is
        # not the question, which with an unusual model it might not be.
        searching = RetrievalSettings(cached_queries=0, feedback=False, cosine_floor=-1)
        search = Search(pool, es, Reference(pool), settings=searching)
        kafka = await stack.enter_async_context(publisher(settings))
        canaries = Canaries(pool, Watch(search, kafka, metrics, settings.canary), metrics, settings.canary)
        ready.set()
        log.info("worker_started", worker="canary")
        await canaries.run(stop)
    log.info("worker_stopped", worker="canary")


def declared(settings: CanarySettings) -> list[Canary]:
    """The canaries that the settings name. Raises Misconfigured."""
    canaries = [
        Canary(*source.split("/")) for source in settings.sources if source.count("/") == 1 and all(source.split("/"))
    ]
    if len(canaries) < len(settings.sources):
        raise Misconfigured("PENSTOCK_CANARY_SOURCES: write each as tenant/source")
    return canaries


class Canaries:
    def __init__(self, pool: Pool, watch: Watch, metrics: CanaryMetrics, settings: CanarySettings) -> None:
        self._pool = pool
        self._watch = watch
        self._metrics = metrics
        self._settings = settings
        self._following: dict[Canary, asyncio.Task[None]] = {}
        self._has_logged_another = False
        # Set before Postgres answers; where no source is known there is one canary for the pipeline.
        metrics.desired.set(0 if settings.every_seconds == 0 else max(1, len(declared(settings)[:MAX_CANARIES])))

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the canaries while this process is the leader; waits while Postgres or Kafka is away."""
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
        """Follow the canaries while this process holds the lock. Raises Retryable when its connection is lost."""
        async with leading(connection, CANARY_LOCK) as is_leader:
            if not is_leader:
                if not self._has_logged_another:
                    log.info("canaries_skipped", reason="another process holds their lock; this one stands by")
                self._has_logged_another = True
                return
            self._has_logged_another = False
            self._watch.keep_time(await _clock(connection))
            await self._watch.remove(await self._left(connection))
            while not stop.is_set():
                self._watch.keep_time(await _clock(connection))
                await self._adjust(await self._desired(connection))
                await _pause(stop)
            following = list(self._following)
            await self._cancel(following)
            await self._watch.remove(following)

    async def _adjust(self, desired: list[Canary]) -> None:
        """Follow exactly the desired canaries. Raises Retryable."""
        self._metrics.desired.set(len(desired))
        gone = [canary for canary in self._following if canary not in desired]
        await self._cancel(gone)
        for canary in gone:
            self._watch.forget(canary)
        await self._watch.remove(gone)
        for canary in desired:
            if canary not in self._following:
                self._following[canary] = asyncio.create_task(
                    self._watch.follow(canary), name=f"canary {canary.stands_for}"
                )
        self._metrics.canaries.set(len(self._following))
        for task in self._following.values():
            if task.done():  # a round never ends with an exception
                raise RuntimeError("a canary's rounds gave up") from task.exception()

    async def _cancel(self, canaries: list[Canary]) -> None:
        await cancel_and_wait([self._following.pop(canary) for canary in canaries])

    async def _desired(self, connection: Connection) -> list[Canary]:
        if self._settings.every_seconds == 0:
            return []
        if self._settings.sources:
            return declared(self._settings)[:MAX_CANARIES]
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT tenant, source FROM connectors WHERE removed_at IS NULL ORDER BY tenant, source LIMIT %s",
                [MAX_CANARIES],
            )
            return [Canary(tenant, source) for tenant, source in await cursor.fetchall()] or [PIPELINE]

    async def _left(self, connection: Connection) -> list[Canary]:
        """Canaries that a killed process has left."""
        async with connection.transaction():
            cursor = await connection.execute(  # rows of `documents` are divided by tenant
                "SELECT tenant, source FROM overview_canaries WHERE deleted_at IS NULL"
            )
            return [Canary(tenant, source.removeprefix(MARK)) for tenant, source in await cursor.fetchall()]


async def _clock(connection: Connection) -> datetime:
    async with connection.transaction():
        row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    return cast("datetime", row[0])


async def _pause(stop: asyncio.Event) -> None:
    """Wait until the list of sources is read again, and leadership is tried, or until ``stop`` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LIST_SECONDS):
            await stop.wait()
