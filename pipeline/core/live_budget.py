"""How many live documents of one source a process handles before the rest waits with the backfill. Pure: the caller
tells the time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

BURST_SECONDS = 10.0
"""A source that was quiet may send so many seconds' worth at once."""
MAX_SOURCES = 10_000
"""Sources remembered, the latest ones. A forgotten source begins with a full budget."""


class LiveBudget:
    """A token bucket for each source. Law: in any t seconds at most ``per_second * (t + BURST_SECONDS)`` documents of
    a source are admitted. A rate of 0 admits everything."""

    def __init__(self, per_second: float) -> None:
        """per_second: documents of one source."""
        self._per_second = per_second
        self._capacity = per_second * BURST_SECONDS
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """source → (tokens left, when they were counted); the source heard of last comes last."""

    def admit(self, source: Hashable, now: float) -> bool:
        """Whether one more document of the source is handled live. now: seconds on a clock that never goes back."""
        if not self._per_second:
            return True
        left, counted = self._left.pop(source, (self._capacity, now))
        left = min(self._capacity, left + (now - counted) * self._per_second)
        admitted = left >= 1
        self._left[source] = left - admitted, now
        if len(self._left) > MAX_SOURCES:
            self._left.popitem(last=False)
        return admitted
