"""A worker of the streams of documents: its stages, their resources, and a stop that drains."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from typing import Any, Literal

import structlog

from pipeline.core.errors import Fenced, Retryable
from pipeline.core.fence import Use
from pipeline.kafka.client import producer
from pipeline.observability import lineage
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores import datasets
from pipeline.stores.postgres import FENCE_SECONDS, Pool, open_pool, translated
from pipeline.stream.consume import Consumption
from pipeline.stream.parts import Kind, Parts

log = structlog.get_logger()

Stream = Literal["detect", "vectors", "keywords"]
"""The workers that consume the streams of documents."""


class StreamWorker:
    """Implements ``pipeline.runtime.process.Worker``."""

    def __init__(self, name: Stream, settings: Settings, metrics: Metrics) -> None:
        self.name = name
        self._settings = settings
        self._metrics = metrics
        self._consuming: list[Consumption] = []

    @property
    def is_ready(self) -> bool:
        return bool(self._consuming) and all(c.ready for c in self._consuming)

    def report(self) -> list[dict[str, Any]]:
        return [c.report() for c in self._consuming]

    async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
        """Raises Misconfigured when the settings make its work impossible, and RuntimeError when a part of it has
        failed; it should then be started again."""
        try:
            async with AsyncExitStack() as stack:
                await self._run(stack, stop, on_crash)
        finally:
            self._consuming = []
        log.info("worker_stopped", worker=self.name)

    async def _run(self, stack: AsyncExitStack, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
        settings, metrics = self._settings, self._metrics
        use: Use = "intake" if self.name == "detect" else "stores"
        fenced = metrics.fence(self.name)
        pool = await stack.enter_async_context(open_pool(settings.postgres, use, on_fence=fenced))
        if not await _admitted(pool, stop):
            return
        parts = Parts(settings, pool, await stack.enter_async_context(producer(settings.kafka)), metrics, stack)
        kind = _kind(self.name, parts)
        stages = await kind.stages()
        consuming = [
            Consumption(stage, kafka=settings.kafka, stream=settings.stream, metrics=metrics, pool=pool)
            for stage in stages
        ]
        await _all_started(consuming, stack)
        self._consuming = consuming
        if lineage.is_on() and self.name != "detect":
            stack.enter_context(await _reported(self.name, parts))
        ending = [*(c.crashed() for c in consuming), *kind.background(consuming)]
        gc.freeze()  # excludes the modules from garbage collection, which took 3 % of a first load's processor time
        log.info("worker_started", worker=self.name)
        try:
            await _until_stopped(stop, ending)
        except BaseException:
            on_crash()  # the time limit holds after a crash too, because stopping may wait for Kafka
            raise
        log.info("worker_draining", worker=self.name)
        await asyncio.gather(*(c.drain() for c in consuming))


async def _reported(name: str, parts: Parts) -> AbstractContextManager[lineage.Run]:
    """A sink's work as a run in lineage, from the ledger to the stores of all generations of now."""
    settings, written = parts.settings, (await parts.generations()).values()
    stores = (
        [datasets.vectors(settings.postgres, generation) for generation in written]
        if name == "vectors"
        else [datasets.keywords(settings.elasticsearch, generation) for generation in written]
    )
    return lineage.job(
        f"worker.{name}", "WORKER", inputs=[datasets.ledger(settings.postgres)], outputs=dict.fromkeys(stores)
    )


async def _admitted(pool: Pool, stop: asyncio.Event) -> bool:
    """Wait until the ledger may be used; returns False when the worker stops before. Raises Misconfigured."""
    while not stop.is_set():
        try:
            with translated("Postgres"):
                async with pool.connection():
                    return True
        except Retryable as error:  # the ledger is fenced, or Postgres is down, for example during a failover
            log.warning(
                "ledger_fenced" if isinstance(error, Fenced) else "postgres_unreachable", reason=str(error)[:200]
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(FENCE_SECONDS):
                await stop.wait()
    return False


def _kind(name: Stream, parts: Parts) -> Kind:
    """Build the kind of worker with this name. The imports are here because a kind's libraries take up to a second,
    which the other kinds need not spend."""
    match name:
        case "detect":
            from pipeline.stream.detect_worker import DetectWorker

            return DetectWorker(parts)
        case "vectors":
            from pipeline.stream.vectors_worker import VectorsWorker

            return VectorsWorker(parts)
        case "keywords":
            from pipeline.stream.keywords_worker import KeywordsWorker

            return KeywordsWorker(parts)


async def _all_started(consumptions: list[Consumption], stack: AsyncExitStack) -> None:
    """Start all consumptions concurrently, because each waits for the other members of its group. Raises the first
    error after all have started or failed."""
    started = await asyncio.gather(
        *(stack.enter_async_context(c.running()) for c in consumptions), return_exceptions=True
    )
    for result in started:
        if result is not None:
            raise result


async def _until_stopped(stop: asyncio.Event, endings: list[Coroutine[Any, Any, BaseException]]) -> None:
    """Wait for the signal to stop. Raises RuntimeError when a coroutine that should run until then ends before."""
    stopping = asyncio.create_task(stop.wait())
    running = [asyncio.create_task(ending) for ending in endings]
    done, pending = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait(pending)
    for task in done:
        if task is not stopping:
            raise RuntimeError("a part of the worker gave up") from task.result()  # type: ignore[misc]  # an exception
