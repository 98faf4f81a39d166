"""The choice of chunk boundaries: a greedy independent set in the order of rank and local hash.

Boundaries are taken best first (rank, then the hash of the text around them), each unless a taken one is nearer than
``distance`` tokens. Neither an offset nor the previous boundary has a say: whether x is taken depends only on
boundaries that a path of falling priority reaches from x in hops shorter than the distance. In particular a boundary
that is the best one within the distance on both sides is always taken, and nothing left of it has influence on what
is right of it. Such boundaries occur every few chunks: there the influence of an edit ends
(docs/adr/0003-edit-stable-chunks.md).

Gaps are between one and two distances wide (plus at most a unit). Where only larger blocks are at hand a second phase
cuts what is still too large: again at the best ranks first, and inside blocks only those that do not fit a chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from pipeline.core.chunking.units import FREE, HARD


def choose(
    ranks: Sequence[int],
    positions: Sequence[int],
    *,
    distance: int,
    smallest: int,
    capacity: Callable[[int], int],
    priority: Callable[[int], int],
) -> list[int]:
    """Indices of the units where chunks begin, and at last the number of units.

    positions: tokens before each unit, and the total. distance: least tokens of a chunk where there is a choice;
    smallest: least tokens of one cut off in need. capacity(i): most tokens of a chunk that begins at unit i.
    """
    by_rank: dict[int, list[int]] = defaultdict(list)
    for unit, rank in enumerate(ranks):
        by_rank[rank].append(unit)
    count = len(ranks)
    cuts = sorted({0, count, *by_rank.pop(HARD, [])})
    order = sorted(by_rank)
    for rank in order:
        if rank <= FREE:
            cuts = spaced(cuts, by_rank[rank], positions, distance, priority)
    for rank in order:
        if len(cuts) < 2 or not _too_large(cuts, positions, capacity):
            return cuts
        cuts = spaced(cuts, by_rank[rank], positions, distance, priority, capacity)
        cuts = _balanced(cuts, by_rank[rank], positions, smallest, capacity)
    for rank in order:
        cuts = _balanced(cuts, by_rank[rank], positions, 1, capacity)
    return cuts


def halve(ranks: Sequence[int], positions: Sequence[int], first: int, last: int) -> int:
    """The most even boundary of the best rank within units first … last − 1 (two at least)."""
    low, high = positions[first], positions[last]
    return min(
        range(first + 1, last),
        key=lambda unit: (ranks[unit], -min(positions[unit] - low, high - positions[unit])),
    )


def _too_large(cuts: Sequence[int], positions: Sequence[int], capacity: Callable[[int], int]) -> bool:
    return any(positions[b] - positions[a] > capacity(a) for a, b in pairwise(cuts))


def spaced(
    cuts: list[int],
    units: list[int],
    positions: Sequence[int],
    distance: int,
    priority: Callable[[int], int],
    capacity: Callable[[int], int] | None = None,
) -> list[int]:
    """Take the units of one rank, best first, that keep the distance from all taken. With a capacity: only in gaps
    larger than that."""
    result = [cuts[0]]
    for a, b in pairwise(cuts):
        size = positions[b] - positions[a]
        if size >= 2 * distance and (capacity is None or size > capacity(a)):
            first = bisect_left(positions, positions[a] + distance, a + 1, b)
            last = bisect_right(positions, positions[b] - distance, first, b)
            group = units[bisect_left(units, first) : bisect_left(units, last)]
            result.extend(greedy(group, positions, distance, priority))
        result.append(b)
    return result


def greedy(group: Sequence[int], positions: Sequence[int], distance: int, priority: Callable[[int], int]) -> list[int]:
    """The units of a sorted group that are taken when the best goes first and all keep the distance."""
    if len(group) < 2 or positions[group[-1]] - positions[group[0]] < distance:
        return [min(group, key=priority)] if group else []
    taken: list[int] = []
    for unit in sorted(group, key=priority):
        at = bisect_left(taken, unit)
        if at and positions[unit] - positions[taken[at - 1]] < distance:
            continue
        if at < len(taken) and positions[taken[at]] - positions[unit] < distance:
            continue
        insort(taken, unit)
    return taken


def _balanced(
    cuts: list[int], units: list[int], positions: Sequence[int], smallest: int, capacity: Callable[[int], int]
) -> list[int]:
    """Halve what is too large at the most even boundary of one rank. A piece under ``smallest`` is cut off only when
    what remains then fits."""
    result = [cuts[0]]
    gaps = [*pairwise(cuts)][::-1]
    while gaps:
        a, b = gaps.pop()
        low, high = positions[a], positions[b]
        if high - low > capacity(a):
            group = units[bisect_right(units, a) : bisect_left(units, b)]
            best = max(group, key=lambda unit: min(positions[unit] - low, high - positions[unit]), default=None)
            if best is not None:
                left, right = positions[best] - low, high - positions[best]
                fits = left <= capacity(a) and right <= capacity(best)
                if min(left, right) >= (1 if fits else smallest):
                    gaps += [(best, b), (a, best)]
                    continue
        result.append(b)
    return result
