"""A worker process: its workers, their one health port, the signals, and an end that does not wait for ever.

Most processes run one worker. Several in one process share its event loop, its modules and its port, and nothing else:
each has its own consumers, connections and failures.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from time import monotonic
from typing import Any, Protocol

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.retry import backoff
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import Metrics
from pipeline.runtime.health import health
from pipeline.runtime.settings import Settings
from pipeline.runtime.stopping import end_anyway

log = structlog.get_logger()

STOP_SECONDS = 28.0
"""The longest time from the signal to the end of the process; Kubernetes kills it after 30. Without this limit a
library that waits for Kafka would delay the end for minutes. What is not drained by then is left to the next worker, as
after any kill."""
AGAIN_SECONDS, AGAIN_AT_MOST_SECONDS = 2.0, 30.0
"""The pause before one of several workers is started again after a failure. It doubles with each further failure: a
start takes the interpreter from the other workers, and partitions from other processes."""
LASTING_SECONDS = 60.0
"""A worker that has run for this long has recovered: its next failure counts as its first."""
THREADS_A_WORKER = 8
"""Threads of the event loop's pool for each of several workers, so that none waits for those of another: the texts of
large documents are cut there, and some lanes may do that at the same time."""
SWITCH_SECONDS = 0.001
"""The time after which a thread that computes lets another one have the interpreter, where the event loop waits for the
threads of several workers. With Python's default of 5 ms, a loop beside three computing threads was late by 28 to 46 ms
at the median and 206 to 229 at p99; with this one, by 4 to 9 and 40 to 61 (in turns, two processors, a load of 19)."""


class Worker(Protocol):
    """A worker that runs in a process, alone or beside others."""

    @property
    def name(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    def report(self) -> list[dict[str, Any]]:
        """The state of its stages, for `penstock status`."""
        ...

    async def run(self, stop: asyncio.Event, on_crash: Callable[[], None]) -> None:
        """Run until ``stop`` is set, then drain. on_crash: called when it fails after its start, before it closes what
        it opened, which may wait for ever. Raises Misconfigured when the settings make its work impossible, and any
        other error when a part of it has failed. It may be run again after that."""
        ...


async def run(name: str, settings: Settings, make: Callable[[Metrics], Sequence[Worker]]) -> None:
    """Run these workers until SIGTERM or SIGINT. name: of the process. Raises what made one of them fail: a single one
    at any time, one of several at its first start. Later, one of several is started again while the others work on."""
    stop = asyncio.Event()
    deadline = threading.Timer(STOP_SECONDS, end_anyway, [name, STOP_SECONDS])
    deadline.daemon = True

    def begin_stop() -> None:
        if not stop.is_set():
            stop.set()
            deadline.start()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin_stop)
    metrics = Metrics()
    workers = make(metrics)
    if len(workers) > 1:
        sys.setswitchinterval(SWITCH_SECONDS)
        loop.set_default_executor(ThreadPoolExecutor(THREADS_A_WORKER * len(workers), thread_name_prefix="asyncio"))
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running(name))
        stack.enter_context(lineage.running(metrics.lineage))
        await stack.enter_async_context(
            health(
                settings,
                metrics,
                lambda: all(worker.is_ready for worker in workers),
                lambda: {"stages": [stage for worker in workers for stage in worker.report()]},
            )
        )
        if len(workers) == 1:
            await workers[0].run(stop, begin_stop)
        else:
            await _run_concurrently(workers, stop, begin_stop)
    deadline.cancel()


async def _run_concurrently(workers: Sequence[Worker], stop: asyncio.Event, begin_stop: Callable[[], None]) -> None:
    """Run several workers. The first error of one that never was ready stops the others in good order."""

    async def run_one(worker: Worker) -> None:
        try:
            await _run_repeatedly(worker, stop)
        except BaseException:
            begin_stop()
            raise

    ended = await asyncio.gather(*map(run_one, workers), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error


async def _run_repeatedly(worker: Worker, stop: asyncio.Event) -> None:
    """Run one of several workers, again after each failure. Raises that of its first start."""
    has_started, failures = False, 0
    while not stop.is_set():
        began, pause = monotonic(), AGAIN_SECONDS
        limit = threading.Timer(STOP_SECONDS, end_anyway, [worker.name, STOP_SECONDS])
        limit.daemon = True

        def on_crash(limit: threading.Timer = limit) -> None:
            nonlocal has_started
            has_started = True
            limit.start()

        try:
            await worker.run(stop, on_crash)
        except Exception as error:
            if not has_started:
                raise
            failures = 0 if monotonic() - began > LASTING_SECONDS else failures
            pause = backoff(failures, base=AGAIN_SECONDS, cap=AGAIN_AT_MOST_SECONDS, random=1.0)
            failures += 1
            reason = str(error) if isinstance(error, PenstockError) else type(error.__cause__ or error).__name__
            log.error("worker_restarts", worker=worker.name, reason=reason[:200], after_seconds=pause)
        finally:
            limit.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stop.wait()
        if not stop.is_set():
            _collect_garbage()


def _collect_garbage() -> None:
    """Free what a worker that has ended has left behind. It froze all objects when it had started, and the next start
    freezes what is not collected by then."""
    gc.unfreeze()
    gc.collect()
