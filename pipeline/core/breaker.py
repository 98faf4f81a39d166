"""When a stage stands still because a service is down, and when it may try again. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from pipeline.core.errors import Service

THRESHOLD = 5
"""Failures in a row, over all lanes of a stage: fewer are a hiccup that each lane waits out by itself."""
DIFFERENT = 3
"""So many batches must be among them before the others are held back: one bad document harms no other."""
BASE_SECONDS, CAP_SECONDS = 1.0, 30.0
"""Between two trials, doubled each time. The cap is what an outage costs in freshness after it has ended."""
TRIAL_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a breaker is open, for people and dashboards."""

    service: Service | None
    reason: str
    since: float
    trials: int


class Breaker:
    """Law: while DIFFERENT batches fail, at most one at a time is tried, and none before the time that was asked for.

    There is trouble after THRESHOLD failures in a row; it ends when the service that failed was used with success.
    """

    def __init__(self) -> None:
        self._row = 0
        self._failing: set[Hashable] = set()
        self._trouble: Trouble | None = None
        self._not_before = 0.0
        self._trial = False

    @property
    def trouble(self) -> Trouble | None:
        """None: all is well."""
        return self._trouble

    def enter(self, now: float) -> float:
        """Seconds to wait before asking again; 0: go on, and report by ``failed`` or ``ended``."""
        if self._trouble is None or len(self._failing) < DIFFERENT:
            return 0.0
        if self._not_before > now:
            return self._not_before - now
        if self._trial:
            return TRIAL_POLL_SECONDS
        self._trial = True
        return 0.0

    def failed(
        self,
        who: Hashable,
        service: Service | None,
        reason: str,
        *,
        now: float,
        random: float,
        retry_after: float | None = None,
    ) -> None:
        """The batch called ``who`` met a failure that may heal. random: in [0, 1)."""
        self._row += 1
        if len(self._failing) < DIFFERENT:
            self._failing.add(who)
        if self._trouble is None and self._row < THRESHOLD:
            return
        before = self._trouble
        trials = before.trials + 1 if before is not None and self._trial else before.trials if before else 0
        since = before.since if before is not None else now
        self._trouble = Trouble(service, reason, since, trials)
        self._trial = False
        pause = min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(trials, 16)) * (0.5 + random / 2)
        self._not_before = max(self._not_before, now + max(pause, retry_after or 0.0))

    def ended(self, used: Collection[Service]) -> None:
        """A batch came to an end otherwise; ``used``: what answered it well."""
        self._trial = False
        if self._trouble is None or self._trouble.service is None or self._trouble.service in used:
            self._row = 0
            self._failing.clear()
            self._trouble = None
            self._not_before = 0.0
