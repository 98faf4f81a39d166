"""How much of the text before it a chunk of running text repeats: 15–20 % of the target, from a sentence or a word on.

Like the boundaries it depends on nothing but the text near by: an edit touches one chunk, or two near a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor

from pipeline.core.chunking.prose import grapheme_near, start_near
from pipeline.core.chunking.units import SECTION, Block, Units
from pipeline.core.model import ChunkParams, CountTokens

_TOLERANCE = 0.025
_CHARS_PER_TOKEN = 4
"""The first guess. A constant: with a share of the whole unit, an edit before the overlap would move its start."""
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that an overlap may have."""

    least: int
    most: int

    @classmethod
    def of(cls, params: ChunkParams) -> Window:
        if params.overlap <= 0:
            return cls(0, 0)
        least = max(1, ceil((params.overlap - _TOLERANCE) * params.target))
        return cls(least, max(least + 1, floor((params.overlap + _TOLERANCE) * params.target)))

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2


@dataclass(frozen=True, slots=True)
class Overlap:
    start: int
    """Where in the text it begins; it ends where the chunk's own text begins."""
    tokens: int


@dataclass(slots=True)
class _Search:
    """Looks for a word inside one unit at which the overlap has the right size."""

    behind: int
    """Tokens of the whole units between this one and the boundary."""
    start: int
    end: int
    """The unit."""
    low: int
    high: int
    place: int
    best: Overlap | None = None
    by_word: bool = True

    def guess(self, window: Window, chars_per_token: float) -> None:
        place = self.end - round((window.middle - self.behind) * chars_per_token)
        self.place = place if self.low < place < self.high else (self.low + self.high) // 2

    def find(self, text: str, reach: int) -> int:
        """Return the place to count from next; ``low`` when there is nothing left to try."""
        if self.by_word:
            return start_near(text, self.low, self.place, self.high, reach)
        return grapheme_near(text, self.low, self.place, self.high)

    def learn(self, overlap: Overlap, window: Window) -> None:
        if self.best is None or _worth(overlap, window) < _worth(self.best, window):
            self.best = overlap
        if overlap.tokens > window.most:
            self.low = overlap.start
        else:
            self.high = overlap.start
        if overlap.start < self.end:
            self.guess(window, (self.end - overlap.start) / max(1, overlap.tokens - self.behind))

    def by_grapheme(self, window: Window) -> None:
        """No word will do (a long link, a script without spaces): look again, between any two letters."""
        self.by_word = False
        self.low, self.high = self.start, self.end
        self.guess(window, _CHARS_PER_TOKEN)


def may_overlap(unit: int, units: Units, blocks: Sequence[Block]) -> bool:
    """Whether a chunk that begins here repeats what stands before: running text on both sides, and no new section."""
    return (
        unit > 0
        and units.ranks[unit] >= SECTION
        and blocks[units.blocks[unit]].prose
        and blocks[units.blocks[unit - 1]].prose
    )


def overlaps(
    text: str, units: Units, blocks: Sequence[Block], cuts: Sequence[int], window: Window, count_tokens: CountTokens
) -> dict[int, Overlap]:
    """The overlap of every chunk that has one, by the unit where the chunk's own text begins."""
    chosen: dict[int, Overlap] = {}
    searches: dict[int, _Search] = {}
    if window.most:
        for previous, cut in pairwise(cuts[:-1]):
            if may_overlap(cut, units, blocks):
                result = _whole_units(units, blocks, previous, cut, window)
                if isinstance(result, Overlap):
                    chosen[cut] = result
                else:
                    searches[cut] = result
    for _ in range(_ROUNDS):
        searches = _advance(text, searches, window, count_tokens, chosen)
    chosen.update((cut, search.best) for cut, search in searches.items() if search.best)
    return chosen


def _whole_units(units: Units, blocks: Sequence[Block], previous: int, cut: int, window: Window) -> Overlap | _Search:
    """Whole units back from the cut, beginning at the best rank in the window; or the unit that must be cut."""
    tokens = 0
    unit = cut
    best: tuple[int, float, int, int] | None = None
    while unit > previous and blocks[units.blocks[unit - 1]].prose and (unit == cut or units.ranks[unit] >= SECTION):
        size = units.tokens[unit - 1]
        if tokens + size > window.most:
            break
        tokens += size
        unit -= 1
        if tokens >= window.least:
            best = min(best or (99, 0.0, 0, 0), (units.ranks[unit], abs(tokens - window.middle), unit, tokens))
    else:
        if best is None:
            return Overlap(units.starts[unit], tokens)
    if best:
        return Overlap(units.starts[best[2]], best[3])
    start, end = units.starts[unit - 1], units.starts[unit]
    search = _Search(tokens, start, end, start, end, end)
    search.guess(window, _CHARS_PER_TOKEN)
    if tokens:
        search.best = Overlap(end, tokens)
    return search


def _advance(
    text: str, searches: dict[int, _Search], window: Window, count_tokens: CountTokens, chosen: dict[int, Overlap]
) -> dict[int, _Search]:
    """One round for all: count from the place guessed, and guess again from what that says. Returns who goes on."""
    reach = _CHARS_PER_TOKEN * (window.most - window.least) // 2
    tried: list[tuple[int, _Search, int]] = []
    left: dict[int, _Search] = {}
    for cut, search in searches.items():
        place = search.find(text, reach)
        if place > search.low:
            tried.append((cut, search, place))
        elif search.best and (search.best.tokens <= window.most or not search.by_word):
            chosen[cut] = search.best
        elif search.by_word:
            search.by_grapheme(window)
            left[cut] = search
    counts = count_tokens([text[place : search.end] for _, search, place in tried]) if tried else []
    for (cut, search, place), count in zip(tried, counts, strict=True):
        overlap = Overlap(place, search.behind + count)
        if window.least <= overlap.tokens <= window.most:
            chosen[cut] = overlap
        else:
            search.learn(overlap, window)
            left[cut] = search
    return left


def _worth(overlap: Overlap, window: Window) -> tuple[bool, float]:
    """Too little is better than too much: the chunk must fit."""
    return overlap.tokens > window.most, abs(overlap.tokens - window.middle)
