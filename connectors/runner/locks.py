"""One at a time for each document, however many tasks have to do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager


class Locks:
    """Law: whoever holds some ids is alone with them, and nobody waits for ids that he did not ask for."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def held(self, ids: Collection[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for one in sorted(set(ids)):  # in one order for everybody: nobody waits in a circle
                await stack.enter_async_context(self._one(one))
            yield

    @asynccontextmanager
    async def _one(self, one: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(one, (asyncio.Lock(), 0))
        self._locks[one] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[one]
            if users == 1:
                del self._locks[one]
            else:
                self._locks[one] = (lock, users - 1)
