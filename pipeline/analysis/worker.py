"""The worker ``analysis``: runs its tasks, each with its own consumer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import structlog

from pipeline.analysis.loop import Loop
from pipeline.analysis.task import Services, Task
from pipeline.kafka.client import producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import open_pool

log = structlog.get_logger()


class AnalysisWorker:
    """Implements ``pipeline.runtime.process.Worker``."""

    name = "analysis"

    def __init__(self, tasks: Sequence[Callable[[Services], Task]], settings: Settings, metrics: Metrics) -> None:
        self._tasks = tasks
        self._settings = settings
        self._metrics = metrics
        self._loops: list[Loop] = []
        self.is_ready = False

    def report(self) -> list[dict[str, Any]]:
        return [loop.report() for loop in self._loops]

    async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
        """Raises Misconfigured when the settings make the work impossible."""
        settings, metrics = self._settings, self._metrics
        async with AsyncExitStack() as stack:
            fenced = metrics.fence(self.name)
            pool = await stack.enter_async_context(open_pool(settings.postgres, on_fence=fenced))
            kafka = await stack.enter_async_context(producer(settings.kafka))
            services = Services(settings, pool, kafka, metrics)
            self._loops = [Loop(make(services), settings.kafka, metrics) for make in self._tasks]
            running = [asyncio.create_task(loop.run(), name=loop.task.name) for loop in self._loops]
            gc.freeze()  # the modules are not garbage
            self.is_ready = True
            log.info("worker_started", worker=self.name, tasks=[loop.task.name for loop in self._loops])
            try:
                await _until_stopped(stop, running)
            except BaseException:
                on_crash()
                raise
            finally:
                self.is_ready = False
                await cancel_and_wait(running)
        log.info("worker_stopped", worker=self.name)


async def _until_stopped(stop: asyncio.Event, running: list[asyncio.Task[None]]) -> None:
    """Wait for the signal. Raises when a task ends before it, which never should happen."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        raise RuntimeError(f"the task {task.get_name()} of the analysis worker has ended") from task.exception()
