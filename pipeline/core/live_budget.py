"""How many live documents a process handles before the rest waits with the backfill: of one source, and of all sources
of one tenant or producer together. Pure: the caller tells the time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BURST_SECONDS = 10.0
"""Whoever was quiet may send so many seconds' worth at once."""
GROUP_TIMES = 5
"""A tenant or a producer has the budget of so many sources, however many names of sources it invents: about what one
detect worker takes in (docs/adr/0037-floods-by-source.md)."""
MAX_SOURCES = 10_000
"""Sources, tenants and producers remembered, the latest ones. A forgotten one begins with a full budget."""
MAX_RECORDS = 10_000
"""Admitted records remembered: more than are under way at once."""


class LiveBudget:
    """Token buckets. Law: in any t seconds at most ``per_second * (t + BURST_SECONDS)`` documents of a source are
    admitted, and GROUP_TIMES as many of a group. A rate of 0 admits everything."""

    def __init__(self, per_second: float) -> None:
        """per_second: documents of one source."""
        self._per_second = per_second
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """name → (tokens left, when they were counted); the one heard of last comes last."""
        self._admitted: OrderedDict[Hashable, None] = OrderedDict()

    def admit(self, source: Hashable, now: float, *, groups: Sequence[Hashable] = (), record: Hashable = None) -> bool:
        """Whether one more document of the source is handled live. now: seconds on a clock that never goes back.
        groups: to which the source belongs. record: what it is known by when it is tried again, which costs nothing."""
        if not self._per_second or record in self._admitted:
            return True
        rates = {("source", source): self._per_second}
        rates |= {("group", group): self._per_second * GROUP_TIMES for group in groups}
        left = {name: self._tokens(name, rate, now) for name, rate in rates.items()}
        admitted = min(left.values()) >= 1
        for name, tokens in left.items():
            self._left[name] = tokens - admitted, now
        while len(self._left) > MAX_SOURCES:
            self._left.popitem(last=False)
        if admitted and record is not None:
            self._admitted[record] = None
            if len(self._admitted) > MAX_RECORDS:
                self._admitted.popitem(last=False)
        return admitted

    def _tokens(self, name: Hashable, rate: float, now: float) -> float:
        capacity = rate * BURST_SECONDS
        left, counted = self._left.pop(name, (capacity, now))
        return min(capacity, left + (now - counted) * rate)
