"""Learns what the limits of a server allow: how soon the next request may start, and how much it may carry. Pure."""

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
        self._size += max(1, size)  # a tokenizer may find nothing in a text of invisible characters

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


SHRINK_SECONDS = 60.0
"""Limits are counted by the minute at most: what is refused for longer, while nothing as large is answered, is too
large."""
SHRINK_REFUSALS = 3
"""The least number of refusals, one after another, before a request counts as too large. They suffice where requests
were too large before and none as large has been answered since."""
GROWTH, REGROWTH = 1.05, 2.0
"""The factors by which requests grow after each answer to one of nearly the largest size: the second one until a size
is refused of which the half is answered, as after an outage in which everything was refused."""
HELD_ANSWERS, MOST_HELD_ANSWERS = 20, 320
"""So many answers of nearly the largest size come before requests grow beyond one that was answered while the next
larger ones were refused, and twice as many after each attempt, up to the second number: the limit is known then, and
each attempt to exceed it costs SHRINK_REFUSALS waits."""
MARGIN = 1.2
"""The next larger size, or its double, is one that is larger by this factor at most: texts do not fill a request."""


class RequestSize:
    """The most that one request may carry: no limit until a server has refused all large ones for a minute. A limit per
    minute that is smaller than a request refuses it whenever it comes, so that waiting alone never helps."""

    def __init__(self) -> None:
        self.most = inf
        self._largest_answered = 0
        """Since a size that had been answered before became too large."""
        self._smallest_refused = inf
        self._refused_since = inf
        self._counted_at = -inf
        self._refusals = 0
        self._held = 0
        """The answers that are to come before requests grow again."""
        self._hold = HELD_ANSWERS
        """As many come after the next attempt."""
        self._growth = REGROWTH

    def answered(self, size: int) -> None:
        self._largest_answered = max(self._largest_answered, size)
        if size >= self._smallest_refused:
            self._forget()
        if size * 2 <= self.most:
            return
        if self._held:
            self._held -= 1
        else:
            self.most = max(self.most, min(self.most * self._growth, self._smallest_refused))

    def refused(self, size: int, *, sent: float, now: float) -> bool:
        """A request of this size, which started at ``sent``, was refused. Return whether requests are to be smaller
        from now on. Refusals of requests that ran at the same time count once."""
        self._smallest_refused = min(self._smallest_refused, size)
        self._refused_since = min(self._refused_since, now)
        if sent >= self._counted_at:
            self._counted_at = now
            self._refusals += 1
        answered_before = self._largest_answered >= self._smallest_refused
        patience = SHRINK_SECONDS if answered_before or self.most == inf else 0.0
        if self._refusals < SHRINK_REFUSALS or now - self._refused_since < patience:
            return False
        if answered_before:
            self._largest_answered = 0
        self.most = max(1.0, self._largest_answered, self._smallest_refused / 2)
        excess = self._smallest_refused / max(1, self._largest_answered)
        if excess <= MARGIN:
            self._held, self._hold = self._hold, min(2 * self._hold, MOST_HELD_ANSWERS)
        else:
            self._held, self._hold = 0, HELD_ANSWERS
        self._growth = GROWTH if excess <= REGROWTH * MARGIN else REGROWTH
        self._forget()
        return True

    def _forget(self) -> None:
        self._refusals, self._refused_since, self._smallest_refused = 0, inf, inf
