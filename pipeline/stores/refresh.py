"""Refreshes of one Elasticsearch index, shared by all tasks of the process that wait for one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Retryable
from pipeline.stores.elasticsearch import translated

INTERVAL_SECONDS = 0.5
"""Average time between the starts of two refreshes, each of which costs the index a new segment. It is doubled while
all waiting tasks are patient and others still write: for a first load of 1,000 documents that saves an eighth of the
time. When all writing tasks wait, nobody else can join, and the refresh starts."""
AT_ONCE, AT_ONCE_INTERVALS = 5, 0.2
"""After a pause, so many more refreshes may follow at this fraction of the interval: ten documents that were changed
together come in several lanes, and those that miss the first refresh by a few milliseconds would wait half a second."""


class Refresher:
    """Law: ``refreshed`` returns only after a refresh that *started* after the call. One refresh runs at a time."""

    def __init__(self, es: AsyncElasticsearch, index: str, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._es = es
        self._index = index
        self._interval = interval_seconds
        self._running = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """The refresh that has not started yet; new callers wait for it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = -math.inf
        self._due = -math.inf
        """When the next refresh would start at an even pace."""
        self._writing = 0
        self._waiting = 0
        """Callers that wait for the next refresh."""
        self._impatient = False
        """One of these callers is not patient."""
        self._go = asyncio.Event()
        """Waiting longer gains nothing: a caller is not patient, or all that might join already wait."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes and the wait for their refresh: patient ones wait for each other."""
        self._writing += 1
        self._update_go()
        try:
            yield
        finally:
            self._writing -= 1
            self._update_go()

    def _update_go(self) -> None:
        if self._impatient or (self._waiting and self._waiting >= self._writing):
            self._go.set()
        else:
            self._go.clear()

    async def refreshed(self, *, patient: bool = False) -> None:
        if self._next is None:
            self._next = asyncio.create_task(self._tick(), name=f"refresh {self._index}")
            self._tasks.add(self._next)
            self._next.add_done_callback(self._done)
        mine = self._next
        self._waiting += 1
        self._impatient |= not patient
        self._update_go()
        try:
            await asyncio.wait([mine])  # my cancellation is not the other callers'
        except asyncio.CancelledError:
            if self._next is mine:
                self._waiting -= 1
            raise
        if mine.cancelled():
            raise Retryable(f"refresh {self._index}: stopped before it was done", service="elasticsearch")
        mine.result()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._running:
            soonest = max(self._began + AT_ONCE_INTERVALS * self._interval, self._due - AT_ONCE * self._interval)
            await asyncio.sleep(soonest - loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._began + 2 * self._interval):
                    await self._go.wait()
            self._waiting, self._impatient = 0, False
            self._go.clear()
            self._next = None
            self._began = loop.time()
            self._due = max(self._due, self._began) + self._interval
            await self._refresh()

    async def _refresh(self) -> None:
        doing = f"refresh {self._index}"
        with translated(doing):
            shards = (await self._es.indices.refresh(index=self._index))["_shards"]
            if shards["failed"]:
                raise Retryable(
                    f"{doing}: {shards['failed']} of {shards['total']} shards failed", service="elasticsearch"
                )
            if shards["successful"] < shards["total"]:
                # A missing replica is fine. A missing primary is not, yet counts as no failure (200, after a minute).
                health = await self._es.cluster.health(index=self._index, level="indices")
                if health["status"] == "red":
                    raise Retryable(f"{doing}: not all of its shards are there", service="elasticsearch")

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen by the callers, if any is left

    async def aclose(self) -> None:
        """Cancel the refreshes that have not finished; their callers get Retryable."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
