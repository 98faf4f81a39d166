"""How many dead letters are too many. Pure: the caller tells the time.

One bad record is set aside and the others go on. When every record is bad, the fault is not theirs (a bad deploy, here
or at a connector), and setting them all aside would leave somebody with the world in letters: better to stand still.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3600.0
"""Doubled from trip to trip: with 60 letters a minute a night of ten hours leaves less than a thousand, and somebody
who mends it is not waited on for longer than an hour (a restart ends the pause at once)."""
QUIET_SECONDS = 600.0
"""So long after a pause without another trip, and the next trip is the first again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    seconds: float
    """Until a letter may be asked for again."""
    trips: int
    """How often in a row the limit has been met."""
    new: bool
    """This request is the one that met it."""


class Flood:
    """Law: of distinct letters at most ``limit`` are admitted in any minute, and none during a pause. A letter that was
    admitted within the last minute is admitted again at no cost. A limit of 0 admits none."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted: deque[tuple[float, str]] = deque()
        self._ids: set[str] = set()
        self._until: float | None = None
        """The end of the last pause; None: there was none."""
        self._trips = 0

    def admit(self, letter: str, now: float) -> Refusal | None:
        """None: send it. now: seconds on a clock that never goes back."""
        while self._admitted and now - self._admitted[0][0] >= WINDOW_SECONDS:
            self._ids.discard(self._admitted.popleft()[1])
        if letter in self._ids:
            return None
        if (left := self.pause(now)) > 0:
            return Refusal(left, self._trips, new=False)
        if len(self._admitted) < self._limit:
            self._admitted.append((now, letter))
            self._ids.add(letter)
            return None
        in_a_row = self._until is not None and now - self._until < QUIET_SECONDS
        self._trips = self._trips + 1 if in_a_row else 1
        seconds = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._trips - 1, 16))
        self._until = now + seconds
        return Refusal(seconds, self._trips, new=True)

    def pause(self, now: float) -> float:
        """Seconds that the present pause still lasts; 0 when there is none."""
        return max(0.0, self._until - now) if self._until is not None else 0.0
