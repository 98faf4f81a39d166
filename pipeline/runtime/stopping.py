"""The end of a process by a signal, which does not wait for ever for services that are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


async def run_until_stopped(
    name: str,
    run: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    *,
    finish_seconds: float,
    end_seconds: float,
) -> None:
    """Run until SIGTERM or SIGINT sets the event that ``run`` receives. Raises what it raises.

    finish_seconds: the time that it has from then on before it is cancelled, which must lose no more than a kill.
    end_seconds: the time after which the process ends anyway, because what ``run`` closes may wait for its services.
    """
    stop = asyncio.Event()
    deadline = threading.Timer(end_seconds, end_anyway, [name, end_seconds])
    deadline.daemon = True
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(run(stop), name=name)

    def begin_stop() -> None:
        if not stop.is_set():
            stop.set()
            deadline.start()
            loop.call_later(finish_seconds, task.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin_stop)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()  # if this function was cancelled
        await asyncio.wait([task])
        if stop.is_set():  # a thread that reads a share or resolves a name may hang, and the process waits for it
            await loop.shutdown_default_executor()
        deadline.cancel()
    if not (task.cancelled() and stop.is_set()):
        task.result()


def end_anyway(name: str, after_seconds: float) -> None:
    log.error("worker_stop_overdue", worker=name, after_seconds=after_seconds)
    sys.stderr.flush()
    os._exit(1)
