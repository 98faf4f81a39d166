"""The process ``penstock worker analysis``: runs its tasks, each with its own consumer."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import structlog

from pipeline.analysis.loop import Loop
from pipeline.analysis.task import Services, Task
from pipeline.kafka.client import producer
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import Metrics
from pipeline.runtime.health import health
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import open_pool

log = structlog.get_logger()


async def run(settings: Settings, tasks: Sequence[Callable[[Services], Task]]) -> None:
    """Run these tasks until SIGTERM or SIGINT. Raises Misconfigured when the settings make the work impossible."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics()
    loops: list[Loop] = []
    ready = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("analysis"))
        stack.enter_context(lineage.running(metrics.lineage))
        await stack.enter_async_context(
            health(settings, metrics, ready.is_set, lambda: {"stages": [loop.report() for loop in loops]})
        )
        pool = await stack.enter_async_context(open_pool(settings.postgres, on_fence=metrics.ledger_fenced.set))
        kafka = await stack.enter_async_context(producer(settings.kafka))
        services = Services(settings, pool, kafka, metrics)
        loops += [Loop(make(services), settings.kafka, metrics) for make in tasks]
        running = [asyncio.create_task(loop.run(), name=loop.task.name) for loop in loops]
        gc.freeze()  # the modules are not garbage
        ready.set()
        log.info("worker_started", worker="analysis", tasks=[loop.task.name for loop in loops])
        try:
            await _until_stopped(stop, running)
        finally:
            await cancel_and_wait(running)
    log.info("worker_stopped", worker="analysis")


async def _until_stopped(stop: asyncio.Event, running: list[asyncio.Task[None]]) -> None:
    """Wait for the signal. Raises when a task ends before it, which never should happen."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        raise RuntimeError(f"the task {task.get_name()} of the analysis worker has ended") from task.exception()
