"""Several things at the same time, none of which outlives the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first failure ends all the rest, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise _first(failed) from failed
    return [task.result() for task in tasks]


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    found = failed.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
