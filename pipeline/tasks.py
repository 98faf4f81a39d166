"""Asyncio tasks that end together, or that would run for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_SECONDS = 8.0
"""What is cancelled may have something to put in order first."""


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended, whatever they ended with. Who has been cancelled already is given time to put in
    order what it held: psycopg closes a connection whose cancelling is cancelled.

    Once is not enough: in Python 3.11 asyncio.wait_for, by which psycopg's pool and aiokafka wait, returns its result
    and forgets the cancellation when both come in the same moment (python/cpython#86296). A worker that was told to
    stop then waited for its sweeper until it was killed.
    """
    those = list(tasks)
    waiting = {task for task in those if not task.done()}
    fresh = {task for task in waiting if not task.cancelling()}
    while waiting:
        for task in fresh:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=CANCEL_AGAIN_SECONDS)
        fresh = waiting
    await asyncio.gather(*those, return_exceptions=True)  # seen: nobody asks for their exceptions


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Side by side, begun in this order; their results. When one fails the others are ended before its error is raised.

    (A TaskGroup would raise a group of errors, which nobody here catches.)
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await ended(tasks)
