"""How live work and backfill share a worker. BackfillThrottle gives live work the processors first; LiveBudget limits
how many documents of one source are handled live; rest_after slows work in the background. Pure: the caller passes the
time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from pipeline.core.model import Lane

LIVE_ACTIVE_SECONDS = 2.0
"""Live work counts as active while a batch runs and for so long afterwards. Meanwhile backfill has one lane, so that
the next live batch finds the processors free."""
LATE_SECONDS = 1.5
"""Live work that waited longer than this for its turn is late: the processors or a store are overloaded."""
LATE_FOR_SECONDS = 10.0
"""Live work counts as late for so long after one late batch: the cause returns as soon as backfill is admitted."""
BACKFILL_DECAY_SECONDS = 10.0
"""Time constant of the moving average of the time that backfill took."""


class BackfillThrottle:
    """Law: backfill runs freely while no live work has been late recently. While live work is late, backfill runs for
    ``share`` of the time, in one lane: not more, because a backfill batch costs the processors more than a live one of
    the same duration, and not less, so that it does not starve."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._running: dict[Lane, int] = {"live": 0, "backfill": 0}
        self._backfill_seconds = 0.0
        self._measured_at = -math.inf
        self._live_until = -math.inf
        self._late_until = -math.inf

    def live_waited(self, seconds: float, *, now: float) -> None:
        """Record how long live work waited for its turn."""
        if seconds > LATE_SECONDS:
            self._late_until = now + LATE_FOR_SECONDS

    def batch_started(self, lane: Lane) -> None:
        self._running[lane] += 1

    def batch_ended(self, lane: Lane, seconds: float, *, now: float) -> None:
        """Record a batch that ran for ``seconds``. Backfill that waited for an outage to end counts for no more than
        BACKFILL_DECAY_SECONDS."""
        self._running[lane] -= 1
        if lane == "live":
            self._live_until = now + LIVE_ACTIVE_SECONDS
        else:
            total = self._decayed(now) + seconds
            self._backfill_seconds, self._measured_at = min(BACKFILL_DECAY_SECONDS, total), now

    def admits_backfill(self, *, now: float) -> bool:
        if self._running["backfill"] and (self._running["live"] or now < self._live_until):
            return False
        return now >= self._late_until or self._decayed(now) < self._share * BACKFILL_DECAY_SECONDS

    def _decayed(self, now: float) -> float:
        age = max(0.0, now - self._measured_at)
        return self._backfill_seconds * math.exp(-age / BACKFILL_DECAY_SECONDS)


def rest_after(worked_seconds: float, share: float) -> float:
    """The seconds to rest after work in the background, so that it takes no more than this share of the time."""
    return worked_seconds * (1 / share - 1)


BURST_SECONDS = 10.0
"""A source that was quiet may send so many seconds' worth at once."""
SOURCES_PER_GROUP = 5
"""A tenant or a producer has the budget of so many sources, however many names of sources it invents: about what one
detect worker takes in (docs/adr/0037-floods-by-source.md)."""
MAX_SOURCES = 10_000
"""Sources, tenants and producers remembered, the latest ones. A forgotten one begins with a full budget."""
MAX_ADMITTED_RECORDS = 10_000
"""The most admitted records remembered; there are fewer in flight at once."""


class LiveBudget:
    """Token buckets. Law: in any t seconds the admitted documents of a source cost at most
    ``per_second * (t + BURST_SECONDS)`` and what the last one of them costs, and those of a group SOURCES_PER_GROUP as
    much. A rate of 0 admits everything."""

    def __init__(self, per_second: float) -> None:
        """per_second: the cost of documents of one source."""
        self._per_second = per_second
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """name → (tokens left, when they were counted), the most recently used last."""
        self._admitted: OrderedDict[Hashable, None] = OrderedDict()

    def admit(
        self,
        source: Hashable,
        now: float,
        *,
        cost: float = 1,
        groups: Sequence[Hashable] = (),
        record: Hashable = None,
    ) -> bool:
        """Whether one more document of the source is handled live. now: seconds on a clock that never goes back. cost:
        in small documents; it may exceed what is left, which is then owed. groups: those that the source belongs to.
        record: identifies a retry, which costs nothing."""
        if not self._per_second or record in self._admitted:
            return True
        left = self._tokens_left(source, now, groups)
        admitted = min(left.values()) >= 1
        for name, tokens in left.items():
            self._left[name] = tokens - cost * admitted, now
        while len(self._left) > MAX_SOURCES:
            self._left.popitem(last=False)
        if admitted and record is not None:
            self._admitted[record] = None
            if len(self._admitted) > MAX_ADMITTED_RECORDS:
                self._admitted.popitem(last=False)
        return admitted

    def charge(self, source: Hashable, now: float, *, cost: float, groups: Sequence[Hashable] = ()) -> None:
        """Charge an admitted document of the source for what it has cost beyond what was expected."""
        for name, tokens in self._tokens_left(source, now, groups).items() if self._per_second else ():
            self._left[name] = tokens - cost, now

    def _tokens_left(self, source: Hashable, now: float, groups: Sequence[Hashable]) -> dict[Hashable, float]:
        """Take the tokens of a source and of its groups out of ``_left``."""
        rates: dict[Hashable, float] = {("source", source): self._per_second}
        rates |= {("group", group): self._per_second * SOURCES_PER_GROUP for group in groups}
        return {name: self._tokens(name, rate, now) for name, rate in rates.items()}

    def _tokens(self, name: Hashable, rate: float, now: float) -> float:
        capacity = rate * BURST_SECONDS
        left, counted = self._left.pop(name, (capacity, now))
        return min(capacity, left + (now - counted) * rate)
