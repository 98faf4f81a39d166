"""Driving a coroutine await by await."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


@types.coroutine
def stepped(
    work: Coroutine[Any, Any, None], at: Callable[[int], asyncio.Future[None] | None]
) -> Generator[Any, Any, None]:
    """Drive a coroutine. ``at(n)`` is asked when its n-th await is over and before its code goes on, and may return a
    future to stand still for."""
    step = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        error, step = None, step + 1
        try:
            yield awaited
        except BaseException as thrown:  # noqa: BLE001  it belongs to the coroutine
            error = thrown
        while (still := at(step)) is not None:
            try:
                yield from still
            except BaseException as thrown:  # noqa: BLE001
                error = thrown
