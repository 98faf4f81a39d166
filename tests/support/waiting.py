"""Waiting for what becomes true by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable

PATIENCE_SECONDS = 120.0
"""Much longer than anything takes: the machine may be busy with other tests."""


async def until(
    condition: Callable[[], object], within_seconds: float = PATIENCE_SECONDS, *, every_seconds: float = 0.02
) -> None:
    """Wait until the condition (a function or a coroutine function) returns something true. Raises TimeoutError."""
    async with asyncio.timeout(within_seconds):
        while True:
            met = condition()
            if await met if isawaitable(met) else met:
                return
            await asyncio.sleep(every_seconds)
