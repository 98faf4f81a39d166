"""How many dead letters are too many, and whose fault they are. Pure: the caller tells the time.

One bad record is set aside and the others go on. While some sources fail and at least as many others get through, the
fault is that of the failing ones: each of their bad records becomes a letter, however many they are. Otherwise the
fault may be nobody's own (a bad deploy, here or at the connectors), and setting everything aside would leave somebody
with the world in letters: better to let it stand where it is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3600.0
"""Doubled from trip to trip: with 60 letters a minute a night of ten hours leaves less than a thousand, and somebody
who mends it is not waited on for longer than an hour (a restart ends the pause at once)."""
QUIET_SECONDS = 600.0
"""So long after a pause without another trip, and the next trip is the first again. A source of which nothing came for
so long says nothing any more about whose fault a failure is."""
MOST_SCORE = 10
"""A source's records count up (valid) and down (bad) as far as this: ten of the other kind and it has changed sides,
whatever it sent before."""
MOST_SOURCES = 10_000
"""Sources remembered, the latest ones: a broken producer may invent a new name for each record."""

MOST_LETTERS = 10_000
"""Letters remembered, those requested last: as many records as may be in flight."""


@dataclass(frozen=True, slots=True)
class Refusal:
    seconds: float
    """Until a letter may be asked for again, unless the fault turns out to be confined before."""
    trips: int
    """How often in a row the limit has been met."""
    new: bool
    """This request is the one that met it."""


class Sources:
    """Counts the sources that get through and those that fail, by their latest records."""

    def __init__(self) -> None:
        self._scores: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """source → (score, when it was heard of last); the one heard of last comes last."""
        self._through = self._failing = 0

    def add(self, source: Hashable, score: int, now: float) -> None:
        """score: valid records less bad ones."""
        before, _ = self._scores.pop(source, (0, 0.0))
        after = max(-MOST_SCORE, min(MOST_SCORE, before + score))
        self._scores[source] = after, now
        self._count(before, -1)
        self._count(after, 1)
        if len(self._scores) > MOST_SOURCES:
            self._forget_first()

    def confined(self, now: float) -> bool:
        """Whether some source gets through, and no more of them fail than get through."""
        while self._scores and now - next(iter(self._scores.values()))[1] >= QUIET_SECONDS:
            self._forget_first()
        return 0 < self._through >= self._failing

    def _forget_first(self) -> None:
        _, (score, _) = self._scores.popitem(last=False)
        self._count(score, -1)

    def _count(self, score: int, change: int) -> None:
        self._through += change * (score > 0)
        self._failing += change * (score < 0)


class Flood:
    """Law: unless the fault is confined to some sources, of distinct letters at most ``limit`` are admitted in any
    minute, and none during a pause. A letter that was admitted within the last minute is admitted again at no cost. A
    limit of 0 admits none."""

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
        """So many valid records of a source were accepted. now: seconds on a clock that never goes back."""
        self._sources.add(source, records, now)

    def admit(self, letter: str, source: Hashable, now: float) -> Refusal | None:
        """None: send it. A letter that is requested again says nothing new of its source."""
        if letter not in self._requested:
            self._sources.add(source, -1, now)
            self._requested[letter] = None
            if len(self._requested) > MOST_LETTERS:
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
        """Seconds that the present pause still lasts; 0 when there is none."""
        if self._until is None or self._confined(now):
            return 0.0
        return max(0.0, self._until - now)

    def _confined(self, now: float) -> bool:
        return self._limit > 0 and self._sources.confined(now)
