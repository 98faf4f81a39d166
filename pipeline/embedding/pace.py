"""One client's manners towards its server: so many requests at once, and when one is sent away, all of them wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.core.errors import Deferred, Retryable
from pipeline.core.retry import backoff

CAP_SECONDS = 8.0

T = TypeVar("T")


class Throttled(Deferred):
    """The server asks the whole client, not one request, to slow down."""


class Pace:
    """Law: after one request was throttled, or told when to come back, no request of this client starts before it."""

    def __init__(self, *, parallel: int, base_seconds: float) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._base = base_seconds
        self._not_before = 0.0

    async def run(self, request: Callable[[], Awaitable[T]], *, deadline: float) -> T:
        """The request's result, tried again after every Retryable until ``deadline`` (of time.monotonic) would pass
        while waiting; then raises the last Retryable, with the time that is left to wait."""
        attempt = 0
        while True:
            async with self._places:
                await self._allowed(deadline)
                try:
                    return await request()
                except Retryable as error:
                    failure = error
            wait = self._pause(failure, attempt)
            if time.monotonic() + wait >= deadline:
                kind = Deferred if isinstance(failure, Deferred) else Retryable
                raise kind(str(failure), retry_after=wait, service="embedding") from failure
            await asyncio.sleep(wait)
            attempt += 1

    async def _allowed(self, deadline: float) -> None:
        while (wait := self._not_before - time.monotonic()) > 0:
            if self._not_before >= deadline:
                raise Deferred("the embedding server asked this client to wait", retry_after=wait, service="embedding")
            await asyncio.sleep(wait)

    def _pause(self, failure: Retryable, attempt: int) -> float:
        """Seconds until this request may try again; where the server meant the whole client, nobody starts before."""
        wait = backoff(
            attempt,
            base=self._base,
            cap=CAP_SECONDS,
            retry_after=failure.retry_after,
            random=random.random(),  # noqa: S311 — jitter, no secret
        )
        if isinstance(failure, Throttled) or failure.retry_after is not None:
            self._not_before = max(self._not_before, time.monotonic() + wait)
        return wait
