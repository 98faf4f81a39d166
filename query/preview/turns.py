"""Turns of something that runs once at a time in a process, for all tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Busy(Exception):
    """The tenant has a turn or waits for one already, or the turns of others took too long."""


class Turns:
    """Law: a tenant that has just had its turn gets the next one after every other tenant that waits. So none can keep
    others out, however often it asks. Safe to share between tasks."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served
        self._tenants: set[str] = set()
        """Those that have a turn or wait for one."""

    @asynccontextmanager
    async def of(self, tenant: str, waiting_seconds: float) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and have it. Raises Busy."""
        if tenant in self._tenants:
            raise Busy
        self._tenants.add(tenant)
        try:
            try:
                async with asyncio.timeout(waiting_seconds):
                    await self._turn.acquire()
            except TimeoutError as error:
                raise Busy from error
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._tenants.discard(tenant)
