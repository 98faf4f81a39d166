"""What a server allows, learned from its refusals: pure; times are seconds of one monotonic clock."""

from __future__ import annotations

from math import inf

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
"""A shorter wait was told by a server that counts in less, and is about what one request costs. Most round up."""
BACK, BACK_UNSURE = 0.9, 0.8
"""Of the rate at which a server refused, what is tried next, unless it was measured to answer more; a rate that grows
fast has gone further beyond the limit before it is refused."""


class Rate:
    """When the next request may start. No limit until a server refuses one; from then on about as fast as it was
    measured to answer, waiting times included, and carefully faster.

    A limit may be of requests or of what is in them, and the two are not told apart: both are measured, and each
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
        """Somebody wants something, and nobody did before."""
        if now - self._idle_from > IDLE_SECONDS:
            self._measure_from(now)

    def rests(self, now: float) -> None:
        """Nobody wants anything any more."""
        self._idle_from = max(self._idle_from, now)

    def next(self, now: float) -> float:
        return max(now, self._next)

    def start(self, at: float, size: int) -> None:
        """One is taken: a request of that size starts then."""
        spacing = min(self._seconds_per_request, size * self._seconds_per_size)
        self._next = at + spacing / self._grown(at)

    def answered(self, size: int) -> None:
        self._requests += 1
        self._size += size

    def refused(self, now: float, until: float, told: float | None = None) -> None:
        """One was, and none starts before ``until``. Those that were under way with it only make the wait longer.
        told: seconds to wait, in the server's own words."""
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
            elif not self._seconds_per_request and told is not None and 0 < told < ONE_SECOND:
                self._seconds_per_request, self._seconds_per_size = told, inf
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
    """learned: 0 where nothing is."""
    return min(learned, measured) if learned else measured
