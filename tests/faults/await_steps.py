"""Drives a coroutine await by await."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


@types.coroutine
def run_in_steps(
    work: Coroutine[Any, Any, None], at: Callable[[int], asyncio.Future[None] | None]
) -> Generator[Any, Any, None]:
    """Drive a coroutine. ``at(n)`` is called when its n-th await is completed, before its code continues, and may
    return a future to wait for."""
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
        while (paused := at(step)) is not None:
            try:
                yield from paused
            except BaseException as thrown:  # noqa: BLE001
                error = thrown
