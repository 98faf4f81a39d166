"""The circuit breaker of a stage: it stops tries while a service is down. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from pipeline.core.errors import Service

THRESHOLD = 5
"""Failures in a row, over all lanes of a stage, that open the breaker. Fewer are waited out by each lane on its own."""
MIN_FAILING_BATCHES = 3
"""How many different batches must be failing before other batches are held back, so that one bad document does not
delay the others."""
BASE_SECONDS, CAP_SECONDS = 1.0, 30.0
"""The pause between two trials, doubled each time up to the cap: so long may work wait after an outage has ended."""
TRIAL_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why and since when (on the caller's clock) a breaker is open."""

    service: Service | None
    reason: str
    since: float
    trials: int


class Breaker:
    """A circuit breaker over all lanes of a stage.

    It opens after THRESHOLD failures in a row, and closes when the service that failed has answered a batch.

    Law: while it is open and MIN_FAILING_BATCHES fail, one batch at a time is tried, and none before the time that the
    service has asked for.
    """

    def __init__(self) -> None:
        self._failures_in_a_row = 0
        self._failing: set[Hashable] = set()
        self._trouble: Trouble | None = None
        self._not_before = 0.0
        self._trial = False

    @property
    def trouble(self) -> Trouble | None:
        """Why the breaker is open; None: it is closed."""
        return self._trouble

    def enter(self, now: float) -> float:
        """Ask to try a batch. Returns 0 when it may be tried now, and must then be reported to ``failed`` or ``ended``;
        otherwise the seconds after which to ask again."""
        if self._trouble is None or len(self._failing) < MIN_FAILING_BATCHES:
            return 0.0
        if self._not_before > now:
            return self._not_before - now
        if self._trial:
            return TRIAL_POLL_SECONDS
        self._trial = True
        return 0.0

    def failed(
        self,
        batch: Hashable,
        service: Service | None,
        reason: str,
        *,
        now: float,
        random: float,
        retry_after: float | None = None,
    ) -> None:
        """Report that a try has failed, and that a later one may succeed. batch: identifies the batch. retry_after: the
        seconds that the service has asked for. random: in [0, 1)."""
        self._failures_in_a_row += 1
        if len(self._failing) < MIN_FAILING_BATCHES:
            self._failing.add(batch)
        if self._trouble is None and self._failures_in_a_row < THRESHOLD:
            return
        before = self._trouble
        trials = before.trials + 1 if before is not None and self._trial else before.trials if before else 0
        since = before.since if before is not None else now
        self._trouble = Trouble(service, reason, since, trials)
        self._trial = False
        pause = min(CAP_SECONDS, BASE_SECONDS * 2.0 ** min(trials, 16)) * (0.5 + random / 2)
        self._not_before = max(self._not_before, now + max(pause, retry_after or 0.0))

    def ended(self, used: Collection[Service]) -> None:
        """Report that a try has ended in another way. used: the services that have answered it without an error."""
        self._trial = False
        if self._trouble is None or self._trouble.service is None or self._trouble.service in used:
            self._failures_in_a_row = 0
            self._failing.clear()
            self._trouble = None
            self._not_before = 0.0
