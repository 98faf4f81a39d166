"""How much of a busy worker's time backfill may have beside live work. Arithmetic on given clocks."""

from __future__ import annotations

import math

from pipeline.core.model import Lane

ABOUT_SECONDS = 2.0
"""Live work is about while some is being done, and for so long after: then backfill is done in one lane at a time, so
that what comes next finds the processors free."""
LATE_SECONDS = 1.5
"""Live work that waited so long for its turn is late: the processors, or a store, have more to do than they can …"""
LATE_FOR_SECONDS = 10.0
"""… and stays so for so long: what made it late comes back as soon as nothing holds it."""
REMEMBERED_SECONDS = 10.0
"""Time constant of what backfill took."""


class Share:
    """Law: where no live work has been late for a while, backfill is not held up. While live work is late, backfill is
    at work for ``share`` of the time, in one lane: no more, because a batch of it costs the processors more than a live
    one that takes as long; and no less, so that it does not starve."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._at_work: dict[Lane, int] = {"live": 0, "backfill": 0}
        self._took = 0.0
        self._took_at = -math.inf
        self._live_until = -math.inf
        self._late_until = -math.inf

    def waited(self, seconds: float, *, now: float) -> None:
        """Live work has its turn after so long."""
        if seconds > LATE_SECONDS:
            self._late_until = now + LATE_FOR_SECONDS

    def begins(self, lane: Lane) -> None:
        """A batch is at work now."""
        self._at_work[lane] += 1

    def ends(self, lane: Lane, took: float, *, now: float) -> None:
        """It was so for so long. A batch that waited for a service that was away counts for no more than
        REMEMBERED_SECONDS."""
        self._at_work[lane] -= 1
        if lane == "live":
            self._live_until = now + ABOUT_SECONDS
        else:
            self._took, self._took_at = min(REMEMBERED_SECONDS, self._remembered(now) + took), now

    def admits_backfill(self, *, now: float) -> bool:
        if self._at_work["backfill"] and (self._at_work["live"] or now < self._live_until):
            return False
        return now >= self._late_until or self._remembered(now) < self._share * REMEMBERED_SECONDS

    def _remembered(self, now: float) -> float:
        return self._took * math.exp(-max(0.0, now - self._took_at) / REMEMBERED_SECONDS)
