"""Running, cancelling and limiting asyncio tasks, and calling functions that block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from pipeline.core.errors import Retryable

P = ParamSpec("P")
T = TypeVar("T")

CANCEL_AGAIN_SECONDS = 8.0
"""A cancelled task may have to clean up first."""


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until all have ended, whatever their result. A task that has been cancelled already gets
    CANCEL_AGAIN_SECONDS to clean up: psycopg closes a connection whose cancelling is cancelled.

    Once is not enough: in Python 3.11 asyncio.wait_for, by which psycopg's pool and aiokafka wait, returns its result
    and forgets the cancellation when both come in the same moment (python/cpython#86296). A stopping worker
    then waited for its sweeper until it was killed.
    """
    all_tasks = list(tasks)
    waiting = {task for task in all_tasks if not task.done()}
    fresh = {task for task in waiting if not task.cancelling()}
    while waiting:
        for task in fresh:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=CANCEL_AGAIN_SECONDS)
        fresh = waiting
    await asyncio.gather(*all_tasks, return_exceptions=True)  # seen: marks their exceptions as retrieved


async def gather_or_cancel(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently, started in this order, and return their results. When one fails, the others are
    cancelled before its error is raised.

    (A TaskGroup would raise a group of errors, which no caller here catches.)
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


@asynccontextmanager
async def time_limit(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises Retryable when the body takes longer than ``seconds``. what: the subject of its message."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Retryable(f"{what} did not answer within {seconds:g} s") from error


async def in_threads(threads: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that blocks in one of these threads, with the values of the caller's context variables."""
    call = partial(copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(threads, call)
