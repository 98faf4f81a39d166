"""One client's manners towards its server: so many requests at once; when one is sent away, all of them wait, and from
then on they come no faster than the server was seen to answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.core.errors import Deferred, Retryable
from pipeline.core.retry import backoff
from pipeline.embedding.rate import Rate

CAP_SECONDS = 8.0
LEAST_SECONDS = 0.01
"""Added at most to the first wait that a server tells; twice that to the next, and so on."""

T = TypeVar("T")


class Throttled(Deferred):
    """The server asks the whole client, not one request, to slow down: more came than it allows."""


class Place:
    """One of the requests that may be under way at once."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._held = False

    async def __aenter__(self) -> Place:
        await self._places.acquire()
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """When the answer has arrived, before the work on it: the server is free for the next one. At the end of the
        request it happens by itself."""
        if self._held:
            self._held = False
            self._places.release()


class Pace:
    """Law: after one request was throttled, or told when to come back, no request of this client starts before it."""

    def __init__(self, *, parallel: int, base_seconds: float) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._base = base_seconds
        self._not_before = 0.0
        self._rate = Rate()
        self._running = 0

    async def run(self, request: Callable[[Place], Awaitable[T]], *, size: int, deadline: float) -> T:
        """The request's result, tried again after every Retryable until ``deadline`` (of time.monotonic) would pass
        while waiting; then raises the last Retryable, with the time that is left to wait. size: of what it carries, in
        any unit that is the same for all requests."""
        if not self._running:
            self._rate.wakes(time.monotonic())
        self._running += 1
        try:
            return await self._until(request, size, deadline)
        finally:
            self._running -= 1
            if not self._running:
                self._rate.rests(time.monotonic())

    async def _until(self, request: Callable[[Place], Awaitable[T]], size: int, deadline: float) -> T:
        attempt = 0
        while True:
            async with Place(self._places) as place:
                await self._allowed(size, deadline)
                try:
                    result = await request(place)
                except Retryable as error:
                    failure = error
                else:
                    self._rate.answered(size)
                    return result
            wait = self._pause(failure, attempt)
            if time.monotonic() + wait >= deadline:
                kind = Deferred if isinstance(failure, Deferred) else Retryable
                raise kind(str(failure), retry_after=wait, service="embedding") from failure
            await asyncio.sleep(wait)
            attempt += 1

    async def _allowed(self, size: int, deadline: float) -> None:
        """Wait for this request's turn. Raises Deferred when that comes after the deadline."""
        at: float | None = None
        while at is None or at < self._not_before or time.monotonic() < at:
            now = time.monotonic()
            if at is None or at < self._not_before:  # no turn yet, or somebody was sent away since it was given
                at = max(self._not_before, self._rate.next(now))
                if now < at and deadline <= at:
                    raise Deferred(
                        "the embedding server asked this client to wait", retry_after=at - now, service="embedding"
                    )
                self._rate.start(at, size)
            await asyncio.sleep(at - now)

    def _beyond(self, told: float, attempt: int) -> float:
        """Most seconds to wait beyond what the server told. Short waits are told by servers that count in them: half a
        second more would waste what they allow. One that says "now" again and again is asked less and less."""
        return min(self._base, told / 4 + LEAST_SECONDS * 2.0 ** min(attempt, 16))

    def _pause(self, failure: Retryable, attempt: int) -> float:
        """Seconds until this request may try again; where the server meant the whole client, nobody starts before."""
        wait = backoff(
            attempt,
            base=self._base if failure.retry_after is None else self._beyond(failure.retry_after, attempt),
            cap=CAP_SECONDS,
            retry_after=failure.retry_after,
            random=random.random(),  # noqa: S311 — jitter, no secret
        )
        if isinstance(failure, Throttled) or failure.retry_after is not None:
            self._not_before = max(self._not_before, time.monotonic() + wait)
        if isinstance(failure, Throttled):
            self._rate.refused(time.monotonic(), self._not_before, failure.retry_after)
        return wait
