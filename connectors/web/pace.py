"""One client's manners towards a source: when it is sent away, all its tasks wait, and they do not return as a herd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar

throttled: ContextVar[Callable[[str, float], None]] = ContextVar("throttled", default=lambda name, seconds: None)
"""Told the connector's name and by how many seconds a source has made it wait longer, each second once, however many
tasks wait. Whoever runs sources sets it before making them (``penstock_source_throttled_seconds_total``)."""


class Gate:
    """Law: nobody passes before ``until``; the first who passes after a refusal passes alone."""

    def __init__(self) -> None:
        self._until = 0.0
        self._wary = False
        self._alone = asyncio.Lock()

    def left(self) -> float:
        """Seconds that it stays closed; 0 or less: open."""
        return self._until - time.monotonic()

    def close(self, seconds: float, *, refused: bool) -> float:
        """refused: somebody was sent away; not only told that the budget is spent. Returns the seconds added."""
        now = time.monotonic()
        added = max(0.0, now + seconds - max(self._until, now))
        self._until = max(self._until, now + seconds)
        self._wary |= refused
        return added

    def wary(self) -> bool:
        """Whether somebody was sent away and nobody has passed since."""
        return self._wary

    def passed(self) -> None:
        """Somebody was let in by the source."""
        self._wary = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.wary():
                await stack.enter_async_context(self._alone)
                if not self.wary():  # whoever was alone before us came through
                    await stack.aclose()
            yield


class Pace:
    """Gates by host and bucket. A request passes the gate of its host and the one of its bucket there."""

    def __init__(self, *, parallel: int) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._gates: dict[tuple[str, str | None], Gate] = {}

    def gates(self, host: str, bucket: str | None) -> Sequence[Gate]:
        """The last one is closed by what a request of this host and bucket is told."""
        keys = [(host, None)] if bucket is None else [(host, None), (host, bucket)]
        return [self._gates.setdefault(key, Gate()) for key in keys]

    @asynccontextmanager
    async def place(self, gates: Sequence[Gate]) -> AsyncIterator[bool]:
        """Yields whether the gates are open, once there is a place. False: wait, and come again."""
        async with AsyncExitStack() as stack:
            for gate in gates:
                await stack.enter_async_context(gate.turn())
            await stack.enter_async_context(self._places)
            yield all(gate.left() <= 0 for gate in gates)
