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
"""Time constant of what the work of each kind took."""


class Share:
    """Law: without live work backfill is never held up. While live work is late, backfill has ``share`` of what both
    take, and at least that share of one lane's time, so that neither starves."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._at_work: dict[Lane, int] = {"live": 0, "backfill": 0}
        self._took: dict[Lane, float] = {"live": 0.0, "backfill": 0.0}
        self._at = -math.inf
        self._live_until = -math.inf
        self._late_until = -math.inf

    def begins(self, lane: Lane, waited: float, *, now: float) -> None:
        """A batch has its turn, after its first record waited for so long."""
        self._at_work[lane] += 1
        if lane == "live" and waited > LATE_SECONDS:
            self._late_until = now + LATE_FOR_SECONDS

    def ends(self, lane: Lane, took: float, *, now: float) -> None:
        """That batch was at work for so long."""
        self._forget(now)
        self._at_work[lane] -= 1
        self._took[lane] += took
        if lane == "live":
            self._live_until = now + ABOUT_SECONDS

    def admits_backfill(self, *, now: float) -> bool:
        if self._at_work["backfill"] and (self._at_work["live"] or now < self._live_until):
            return False
        if now >= self._late_until or self._share >= 1:
            return True
        self._forget(now)
        of_both = self._took["live"] * self._share / (1 - self._share)
        return self._took["backfill"] <= max(of_both, self._share * REMEMBERED_SECONDS)

    def _forget(self, now: float) -> None:
        kept = math.exp(-max(0.0, now - self._at) / REMEMBERED_SECONDS)
        self._took = {lane: took * kept for lane, took in self._took.items()}
        self._at = now
