"""How much at once: each caller's share, the places for work, and the waiting room before them. All of it is this
process's own: two processes behind a balancer allow twice as much."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from query.http.problems import Problem
from query.http.who import Who
from query.settings import ServeSettings
from query.telemetry import QueryMetrics


class Limits:
    def __init__(self, settings: ServeSettings, metrics: QueryMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        self._window = MovingWindowRateLimiter(MemoryStorage())
        self._at_once: Counter[tuple[str, ...]] = Counter()
        self._places = asyncio.Semaphore(settings.concurrent)
        self._waiting = 0

    def count(self, who: Who) -> None:
        """One more request of this caller. Raises Problem (429)."""
        if self._window.hit(self._rate, repr(who.id)):
            return
        resets_at, _ = self._window.get_window_stats(self._rate, repr(who.id))
        self._metrics.shed.labels("rate").inc()
        raise Problem(
            "rate-limited",
            f"at most {self._settings.requests_per_minute} requests a minute are taken",
            headers={"Retry-After": str(max(1, math.ceil(resets_at - time())))},
        )

    @asynccontextmanager
    async def place(self, who: Who) -> AsyncIterator[None]:
        """Wait for a place to work at, and hold it. Raises Problem (429, 503)."""
        if self._at_once[who.id] >= self._settings.concurrent_per_caller:
            self._metrics.shed.labels("caller").inc()
            raise Problem(
                "too-many-at-once",
                f"at most {self._settings.concurrent_per_caller} requests of one caller are taken at once",
                headers={"Retry-After": "1"},
            )
        self._at_once[who.id] += 1
        try:
            await self._enter()
            self._metrics.in_work.inc()
            try:
                yield
            finally:
                self._metrics.in_work.dec()
                self._places.release()
        finally:
            self._at_once[who.id] -= 1
            if not self._at_once[who.id]:
                del self._at_once[who.id]

    async def _enter(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        if self._waiting >= self._settings.waiting:
            raise self._busy("busy")
        self._waiting += 1
        self._metrics.waiting.inc()
        try:
            async with asyncio.timeout(self._settings.waiting_seconds):
                await self._places.acquire()
        except TimeoutError as error:
            raise self._busy("waited") from error
        finally:
            self._waiting -= 1
            self._metrics.waiting.dec()

    def _busy(self, reason: str) -> Problem:
        self._metrics.shed.labels(reason).inc()
        return Problem("busy", "every place is taken: ask again in a moment", headers={"Retry-After": "1"})
