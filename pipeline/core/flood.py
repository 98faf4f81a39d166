"""The limit on dead letters: how many are too many. Pure: the caller passes the time.

While some sources succeed, and no more sources fail than succeed, the fault is *confined* to the failing ones: each of
their poison records becomes a dead letter, however many they are. Otherwise the fault may be a general one, such as a
bad release of ours or of the connectors. Then the number of letters is limited and records wait in their topics,
because an operator would have to replay all of them after the repair.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3600.0
"""The pause after the limit was met; it doubles each time. With 60 letters a minute a night of ten hours leaves less
than a thousand letters, and after a repair work goes on within an hour (at once after a restart)."""
QUIET_SECONDS = 600.0
"""When the limit was not met for this long after a pause, the next pause is the first one again. A source that has sent
nothing for this long is no longer evidence."""
MAX_SCORE = 10
"""A source's score rises with valid and falls with poison records, up to this absolute value: ten records of the other
kind always change its sign."""
MAX_SOURCES = 10_000
"""The most sources remembered, the latest ones. A broken producer may invent a new name for each record."""

MAX_LETTERS = 10_000
"""The most letters remembered, those requested last: as many as there may be records in flight."""


@dataclass(frozen=True, slots=True)
class Refusal:
    seconds: float
    """Time until letters are admitted again, unless the fault turns out to be confined before."""
    trips: int
    """How often in a row the limit has been met."""
    new: bool
    """Whether this request has met the limit; False: an earlier one has."""


class Sources:
    """Counts the sources that succeed and those that fail, by the signs of their scores."""

    def __init__(self) -> None:
        self._scores: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """By source: (score, time of its latest record); the source with the latest record comes last."""
        self._succeeding = self._failing = 0

    def add(self, source: Hashable, score: int, now: float) -> None:
        """Change a source's score. score: the number of valid records minus that of poison records."""
        before, _ = self._scores.pop(source, (0, 0.0))
        after = max(-MAX_SCORE, min(MAX_SCORE, before + score))
        self._scores[source] = after, now
        self._count(before, -1)
        self._count(after, 1)
        if len(self._scores) > MAX_SOURCES:
            self._forget_first()

    def confined(self, now: float) -> bool:
        """Whether some source succeeds, and no more sources fail than succeed."""
        while self._scores and now - next(iter(self._scores.values()))[1] >= QUIET_SECONDS:
            self._forget_first()
        return 0 < self._succeeding >= self._failing

    def _forget_first(self) -> None:
        _, (score, _) = self._scores.popitem(last=False)
        self._count(score, -1)

    def _count(self, score: int, change: int) -> None:
        self._succeeding += change * (score > 0)
        self._failing += change * (score < 0)


class Flood:
    """The limit on the dead letters of one stage.

    Law: unless the fault is confined to some sources, at most ``limit`` different letters are admitted in any minute,
    and none during a pause. A letter that was admitted within the last minute is admitted again without being counted.
    A limit of 0 admits none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources = Sources()
        self._admitted: deque[tuple[float, str]] = deque()
        self._ids: set[str] = set()
        self._requested: OrderedDict[str, None] = OrderedDict()
        self._until: float | None = None
        """The end of the last pause; None: there was none."""
        self._trips = 0

    def count_accepted(self, source: Hashable, records: int, now: float) -> None:
        """Count valid records of a source that were accepted. now: seconds on a clock that never goes back."""
        self._sources.add(source, records, now)

    def admit(self, letter: str, source: Hashable, now: float) -> Refusal | None:
        """Ask to send a letter; returns None when it may be sent. A letter that is requested again does not lower its
        source's score again."""
        if letter not in self._requested:
            self._sources.add(source, -1, now)
            self._requested[letter] = None
            if len(self._requested) > MAX_LETTERS:
                self._requested.popitem(last=False)
        while self._admitted and now - self._admitted[0][0] >= WINDOW_SECONDS:
            self._ids.discard(self._admitted.popleft()[1])
        if letter in self._ids or self._confined(now):
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
        """The seconds that are left of the present pause; 0: there is none."""
        if self._until is None or self._confined(now):
            return 0.0
        return max(0.0, self._until - now)

    def _confined(self, now: float) -> bool:
        return self._limit > 0 and self._sources.confined(now)
