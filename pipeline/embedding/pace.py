"""The request rate of one client: a limited number at once; when one is throttled, all of them wait, and from then on
they start no faster than the server was measured to answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pipeline.core.errors import Deferred, Retryable
from pipeline.core.retry import backoff

if TYPE_CHECKING:  # a tenth of a second to import
    from pipeline.embedding.port import Vectors

CAP_SECONDS = 8.0
LEAST_SECONDS = 0.01
"""The most that is added to the first wait that a server asks for; twice that to the next, and so on."""

ALONE_AFTER_TRIES, ALONE_AFTER_ANSWERS = 3, 3
"""A request that has failed so often, while so many others were answered, is not tried until its deadline: the server
is there, and the other documents in it wait no longer than they must. Where fewer were answered, a probe takes the next
turn, except after a 429: a limit may have room for a probe alone."""
PARTS_AFTER_FAILURES = 16
"""When so many requests in a row have failed, a part is halved only after a probe was answered: in an outage, each part
would become as many requests as it has texts, all tried until the deadline."""
MAX_SUSPECTS = 1_000
"""The most requests that are remembered because they fail alone, and because they failed until their deadline."""
SUSPECT_BASE_SECONDS, SUSPECT_CAP_SECONDS = 0.25, 20.0
"""The least wait after a failure of a request that fails alone, doubled each time up to the cap."""

Probe = Callable[["Place"], Awaitable[object]]

T = TypeVar("T")
V = TypeVar("V")


class Throttled(Deferred):
    """The server asks the whole client, not one request, to slow down: more came than it allows."""


class Alone(Retryable):
    """A request failed again and again while others were answered."""

    alone = True
    arrived: Mapping[int, Vectors] = MappingProxyType({})
    """The vectors of those texts of the call that were embedded, by index."""


class ThrottledAlone(Alone, Deferred):
    """The same for one that was throttled: a server may refuse what is too large for its limit with a 429."""


@dataclass(slots=True)
class _Failures:
    """The failures of one request, and what happened to others since the first of them."""

    tries: int
    answered_before: int
    failed_before: int


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
        self._running = 0
        self._answered = 0
        self._failed = 0
        self._failed_in_row = 0
        self._suspects: dict[int, int] = {}
        """Hashes of requests that fail alone → how often each has. The oldest are forgotten first."""
        self._unanswered: dict[int, _Failures] = {}
        """Hashes of requests that failed until their deadline. The oldest are forgotten first."""

    async def run(
        self,
        request: Callable[[Place], Awaitable[T]],
        *,
        size: int,
        deadline: float,
        of: bytes | None = None,
        probe: Probe | None = None,
        suspect: bool = False,
    ) -> T:
        """The request's result, tried again after every Retryable until ``deadline`` (of time.monotonic) would pass
        while waiting; then raises the last Retryable, with the time that is left to wait. Raises Alone where the
        failures seem to be its own. size: of what it carries, in any unit that is the same for all requests. of:
        what it carries, where that may be sent again. probe: what the server answers whenever it is there. suspect:
        whether it is a part of a request that failed alone, and is to be divided again as soon as it fails before the
        deadline, unless the server asks to wait, or seems to answer nobody."""
        if not self._running:
            self._rate.wakes(time.monotonic())
        self._running += 1
        try:
            return await self._until(request, size, deadline, of, probe, suspect)
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
    ) -> T:
        attempt, failures = 0, self._known_failures(of)
        failure: Retryable | None = None
        try:
            while True:
                async with Place(self._places) as place:
                    await self._allowed(size, deadline)
                    if failures is None:
                        failures = _Failures(0, self._answered, self._failed)
                    own, sent = failure, None
                    enough = 1 if suspect else ALONE_AFTER_TRIES
                    if own is not None and not isinstance(own, Deferred) and failures.tries >= enough:
                        sent, probe = probe, None  # once, and instead of a try: an outage gets no request more
                    try:
                        if sent is None:
                            result = await request(place)
                        else:
                            await sent(place)
                    except Retryable as error:
                        failure = error
                    else:
                        self._failed_in_row = 0
                        if sent is not None and own is not None:
                            failures = None
                            raise self._alone(own, None if suspect else of)
                        self._answered += 1
                        if self._suspects:  # a megabyte takes a millisecond to hash
                            self._suspects.pop(hash(of), None)
                        self._rate.answered(size)
                        return result
                attempt += 1
                self._failed += 1
                self._failed_in_row += 1
                failures.tries += 1
                # A request that the server does not answer at all is tried once, for longer than the deadline.
                late = time.monotonic() >= deadline and not isinstance(failure, Deferred)
                often = failures.tries >= ALONE_AFTER_TRIES or late
                answered = self._answered - failures.answered_before
                may_divide = failure.retry_after is None and not isinstance(failure, Deferred) and not late
                is_part = suspect and may_divide and self._failed_in_row <= PARTS_AFTER_FAILURES
                if is_part or hash(of) in self._suspects or (often and answered >= ALONE_AFTER_ANSWERS):
                    failures = None
                    raise self._alone(failure, None if is_part else of)
                wait = self._pause(failure, attempt - 1)
                if time.monotonic() + wait >= deadline:
                    kind = Deferred if isinstance(failure, Deferred) else Retryable
                    raise kind(str(failure), retry_after=wait, service="embedding") from failure
                await asyncio.sleep(wait)
        except Retryable:
            if failures is not None and failures.tries and of is not None:
                _remember(self._unanswered, hash(of), failures)
            raise

    def _known_failures(self, of: bytes | None) -> _Failures | None:
        """The failures of earlier calls with the same request: where little else is embedded, three others are not
        answered within one call. None if there are none, or others failed more often than they were answered since:
        the server may mean everybody."""
        known = self._unanswered.pop(hash(of), None) if self._unanswered else None
        if known is None:
            return None
        others_failed = self._failed - known.failed_before - known.tries
        return known if self._answered - known.answered_before >= others_failed else None

    def _alone(self, failure: Retryable, of: bytes | None) -> Alone:
        """The error for a request that fails alone, which waits longer each time."""
        times = self._suspects.pop(hash(of), 0)
        if of is not None:
            _remember(self._suspects, hash(of), times + 1)
        wait = max(failure.retry_after or 0.0, min(SUSPECT_CAP_SECONDS, SUSPECT_BASE_SECONDS * 2.0 ** min(times, 16)))
        kind = ThrottledAlone if isinstance(failure, Deferred) else Alone
        error = kind(str(failure), retry_after=wait, service="embedding")
        error.__cause__ = failure
        return error

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


def _remember(known: dict[int, V], key: int, value: V) -> None:
    known[key] = value
    while len(known) > MAX_SUSPECTS:
        del known[next(iter(known))]


ENOUGH = 10
"""Answers that make a measurement. A server that refuses from the start has said nothing of a rate."""
IDLE_SECONDS = 1.0
"""A longer pause in which nobody wanted anything is not part of a measurement."""
DOUBLED_SECONDS = 30.0
"""After a refusal the rate grows by (t / DOUBLED_SECONDS)³: hardly at all near what was learned, for a refusal costs a
second's wait with most servers; fast later, so that what was learned in a bad moment is forgotten in a minute."""
DOUBLED_SECONDS_UNSURE = 5.0
"""The same as long as nothing but one measurement is known: a wait of a second is in it, and it may be far too low."""
SURE = 2.0
"""A rate that is refused before it has grown so much was about right."""
ONE_SECOND = 1.0
"""A server that asks for a shorter wait counts in fractions of a second, and the wait is about what one request costs.
Most servers round up."""
BACK, BACK_UNSURE = 0.9, 0.8
"""The share of a refused rate that is tried next, unless the server was measured to answer more; a rate that grows fast
has gone further beyond the limit before it is refused."""


class Rate:
    """When the next request may start. No limit until a server refuses one; from then on about as fast as it was
    measured to answer, waiting times included, and carefully faster.

    A limit may be of requests or of what is in them, and the two are not retry_after apart: both are measured, and each
    request is spaced by what allows more. Were that too much, it is learned again.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._since = 0.0
        self._requests = 0
        self._size = 0
        self._seconds_per_request = 0.0
        self._seconds_per_size = 0.0
        self._sure = False
        self._refused_until = 0.0
        self._idle_from = float("-inf")

    def wakes(self, now: float) -> None:
        """The first request starts after none was running."""
        if now - self._idle_from > IDLE_SECONDS:
            self._measure_from(now)

    def rests(self, now: float) -> None:
        """The last running request has ended."""
        self._idle_from = max(self._idle_from, now)

    def next(self, now: float) -> float:
        return max(now, self._next)

    def start(self, at: float, size: int) -> None:
        """A request of this size takes the turn at ``at``."""
        spacing = min(self._seconds_per_request, size * self._seconds_per_size)
        self._next = at + spacing / self._grown(at)

    def answered(self, size: int) -> None:
        self._requests += 1
        self._size += size

    def refused(self, now: float, until: float, retry_after: float | None = None) -> None:
        """A request was refused, and none starts before ``until``. Further refusals of requests that ran at the same
        time only make the wait longer. retry_after: seconds that the server asked to wait."""
        if now >= self._refused_until:
            grown = self._grown(now)
            slower = 1 / ((BACK if self._sure else BACK_UNSURE) * grown)
            self._sure = self._seconds_per_request > 0 and grown < SURE
            self._seconds_per_request *= slower
            self._seconds_per_size *= slower
            if self._requests >= ENOUGH:
                seconds = until - self._since
                self._seconds_per_request = _shorter(self._seconds_per_request, seconds / self._requests)
                self._seconds_per_size = _shorter(self._seconds_per_size, seconds / self._size)
                self._measure_from(until)
            elif not self._seconds_per_request and retry_after is not None and 0 < retry_after < ONE_SECOND:
                self._seconds_per_request, self._seconds_per_size = retry_after, inf
        self._refused_until = max(self._refused_until, until)
        self._next = max(self._next, until)
        self._idle_from = max(self._idle_from, until)

    def _grown(self, now: float) -> float:
        doubled = DOUBLED_SECONDS if self._sure else DOUBLED_SECONDS_UNSURE
        return 1.0 + (max(0.0, now - self._refused_until) / doubled) ** 3

    def _measure_from(self, moment: float) -> None:
        self._since = moment
        self._requests = self._size = 0


def _shorter(learned: float, measured: float) -> float:
    """The shorter of two spacings. learned: 0 where nothing was learned."""
    return min(learned, measured) if learned else measured
