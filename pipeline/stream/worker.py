"""A worker process: its stages, their resources, its health port, and a stop that drains."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from typing import Any, Literal

import structlog

from pipeline.core.errors import Fenced, Retryable
from pipeline.core.fence import Use
from pipeline.kafka.client import producer
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import Metrics
from pipeline.runtime.health import health
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores import datasets
from pipeline.stores.postgres import FENCE_SECONDS, Pool, open_pool, translated
from pipeline.stream.consume import Consumption
from pipeline.stream.parts import Kind, Parts

log = structlog.get_logger()

Stream = Literal["detect", "vectors", "keywords"]
"""The workers that consume the streams of documents."""
STOP_SECONDS = 28.0
"""The longest time from the signal to the end of the process; Kubernetes kills it after 30. Without this limit a
library that waits for Kafka would delay the end for minutes. What is not drained by then is left to the next worker, as
after any kill."""


async def run(name: Stream, settings: Settings) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises Misconfigured when the settings make its work impossible, and
    RuntimeError when a part of it has failed; the supervisor then starts the process again."""
    stop = asyncio.Event()
    deadline = threading.Timer(STOP_SECONDS, _end_anyway, [name])
    deadline.daemon = True

    def on_stop_signal() -> None:
        if not stop.is_set():
            stop.set()
            deadline.start()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop_signal)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running(name))
        stack.enter_context(lineage.running(metrics.lineage))
        consuming: list[Consumption] = []
        await stack.enter_async_context(
            health(
                settings,
                metrics,
                lambda: bool(consuming) and all(c.ready for c in consuming),
                lambda: {"stages": [c.report() for c in consuming]},
            )
        )
        use: Use = "intake" if name == "detect" else "stores"
        pool = await stack.enter_async_context(open_pool(settings.postgres, use, on_fence=metrics.ledger_fenced.set))
        if not await _admitted(pool, stop):
            deadline.cancel()
            return
        parts = Parts(settings, pool, await stack.enter_async_context(producer(settings.kafka)), metrics, stack)
        kind = _kind(name, parts)
        stages = await kind.stages()
        starting = [
            Consumption(stage, kafka=settings.kafka, stream=settings.stream, metrics=metrics, pool=pool)
            for stage in stages
        ]
        await _all_started(starting, stack)
        consuming += starting
        if lineage.is_on() and name != "detect":
            stack.enter_context(await _reported(name, parts))
        ending = [*(c.crashed() for c in consuming), *kind.background(consuming)]
        gc.freeze()  # excludes the modules from garbage collection, which took 3 % of a first load's processor time
        log.info("worker_started", worker=name)
        try:
            await _until_stopped(stop, ending)
        except BaseException:
            on_stop_signal()  # the time limit holds after a crash too, because stopping may wait for Kafka
            raise
        log.info("worker_draining", worker=name)
        await asyncio.gather(*(c.drain() for c in consuming))
    deadline.cancel()
    log.info("worker_stopped", worker=name)


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


def _kind(name: str, parts: Parts) -> Kind:
    """Build the kind of worker with this name. The imports are here because a kind's libraries take up to a second,
    which the other kinds need not spend."""
    match name:
        case "detect":
            from pipeline.stream.detect_worker import DetectWorker

            return DetectWorker(parts)
        case "vectors":
            from pipeline.stream.vectors_worker import VectorsWorker

            return VectorsWorker(parts)
        case _:
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


def _end_anyway(name: str) -> None:
    log.error("worker_stop_overdue", worker=name, after_seconds=STOP_SECONDS)
    sys.stderr.flush()
    os._exit(1)


async def _until_stopped(stop: asyncio.Event, endings: list[Coroutine[Any, Any, BaseException]]) -> None:
    """Wait for the signal to stop. Raises RuntimeError when a coroutine that should run until then ends before."""
    stopping = asyncio.create_task(stop.wait())
    running = [asyncio.create_task(ending) for ending in endings]
    done, pending = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait(pending)
    for task in done:
        if task is not stopping:
            raise RuntimeError("a part of the worker gave up") from task.result()  # type: ignore[misc]  # an exception
