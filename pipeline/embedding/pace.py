"""The requests of one client: a limited number at once; when one is throttled, all of them wait, and from then on they
start no faster, and carry no more, than the server was measured to answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from pipeline.core.errors import Deferred, Retryable
from pipeline.core.retry import backoff
from pipeline.embedding.failures import Failures
from pipeline.embedding.rate import Rate, RequestSize

CAP_SECONDS = 8.0
LEAST_SECONDS = 0.01
"""The most that is added to the first wait that a server asks for; twice that to the next, and so on."""

Probe = Callable[["Place"], Awaitable[object]]

T = TypeVar("T")

log = structlog.get_logger()


class Throttled(Deferred):
    """The server asks the whole client, not one request, to slow down: more came than it allows."""


class TooLarge(Throttled):
    """The server refuses requests of this size for so long that they have to be divided."""


class Place:
    """One of the requests that may run at once."""

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
        """Release the place before the end of the request: as soon as the answer has arrived, the server is free for
        the next one. Without this call it is released at the end."""
        if self._held:
            self._held = False
            self._places.release()


class Pace:
    """Law: after the server has throttled a request, or named a time for the next one, no request of this client starts
    earlier, except after one that keeps failing while others are answered: that one alone waits."""

    def __init__(self, *, parallel: int, base_seconds: float) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._base = base_seconds
        self._not_before = 0.0
        self._rate = Rate()
        self._largest = RequestSize()
        self._failures = Failures()
        self._running = 0

    @property
    def most(self) -> float:
        """The most that one request should carry, in the unit of ``run``'s size."""
        return self._largest.most

    async def run(
        self,
        request: Callable[[Place], Awaitable[T]],
        *,
        size: int,
        deadline: float,
        of: bytes | None = None,
        probe: Probe | None = None,
        suspect: bool = False,
        divisible: bool = False,
    ) -> T:
        """The request's result, tried again after every Retryable until ``deadline`` (of time.monotonic) would pass
        while waiting; then raises the last Retryable, with the time that is left to wait. Raises Alone where the
        failures seem to be its own. size: of what it carries, in any unit that is the same for all requests. of:
        what it carries, where that may be sent again. probe: what the server answers whenever it is there. suspect:
        whether it is a part of a request that failed alone, and is to be divided again as soon as it fails before the
        deadline, unless the server asks to wait, or seems to answer nobody. divisible: raise TooLarge where the server
        refuses requests of this size."""
        if not self._running:
            self._rate.wakes(time.monotonic())
        self._running += 1
        try:
            return await self._until(request, size, deadline, of, probe, suspect, divisible)
        finally:
            self._running -= 1
            if not self._running:
                self._rate.rests(time.monotonic())

    async def _until(
        self,
        request: Callable[[Place], Awaitable[T]],
        size: int,
        deadline: float,
        of: bytes | None,
        probe: Probe | None,
        suspect: bool,
        divisible: bool,
    ) -> T:
        attempt, history = 0, self._failures.known(of)
        failure: Retryable | None = None
        try:
            while True:
                async with Place(self._places) as place:
                    await self._allowed(size, deadline)
                    began = time.monotonic()
                    history = history or self._failures.history()
                    own, sent = failure, None
                    if own is not None and not isinstance(own, Deferred) and history.has_failed_enough(suspect):
                        sent, probe = probe, None  # once, and instead of a try: an outage gets no request more
                    try:
                        if sent is None:
                            result = await request(place)
                        else:
                            await sent(place)
                    except Retryable as error:
                        failure = error
                    else:
                        if sent is not None and own is not None:
                            history = None
                            self._failures.probe_answered()
                            raise self._failures.error(own, None if suspect else of)
                        self._failures.answered(of)
                        self._rate.answered(size)
                        self._largest.answered(size)
                        return result
                attempt += 1
                # A request that the server does not answer at all is tried once, for longer than the deadline.
                late = time.monotonic() >= deadline and not isinstance(failure, Deferred)
                self._failures.failed(history)
                is_too_large = divisible and isinstance(failure, Throttled) and self._is_too_large(size, began)
                is_part = suspect and self._failures.may_divide(failure, late=late)
                if not is_too_large and (is_part or self._failures.is_alone(history, of, late=late)):
                    history = None
                    raise self._failures.error(failure, None if is_part else of)
                wait = self._pause(failure, attempt - 1)
                if is_too_large:
                    history = None
                    raise TooLarge(str(failure), retry_after=wait, service="embedding") from failure
                if time.monotonic() + wait >= deadline:
                    kind = Deferred if isinstance(failure, Deferred) else Retryable
                    raise kind(str(failure), retry_after=wait, service="embedding") from failure
                await asyncio.sleep(wait)
        except Retryable:
            if history is not None and of is not None:
                self._failures.remember(of, history)
            raise

    def _is_too_large(self, size: int, began: float) -> bool:
        """Note that a request was throttled. Return whether it is larger than what the server seems to allow."""
        if self._largest.refused(size, sent=began, now=time.monotonic()):
            log.warning("embedding_requests_made_smaller", refused_tokens=size, most_tokens=round(self.most))
        return size > self.most

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

    def _beyond(self, retry_after: float, attempt: int) -> float:
        """Most seconds to wait beyond what the server asked for. Servers that ask for short waits count in them: half a
        second more would waste what they allow. A server that says "now" again and again gets ever fewer requests."""
        return min(self._base, retry_after / 4 + LEAST_SECONDS * 2.0 ** min(attempt, 16))

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
