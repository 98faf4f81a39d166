"""Blocks → units with their token counts. Every text is tokenised here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.chunking import prose
from pipeline.core.chunking.overlap import Window
from pipeline.core.chunking.units import BOUND_LINE, BOUND_PIECE, PIECE, Block, Units
from pipeline.core.model import ChunkParams, CountTokens

_CHARS_PER_TOKEN = 5
"""More than prose has on average: only a first guess, the tokens are counted afterwards."""
SLACK = 2
"""Tokens kept free in every chunk for what trimming white space at its ends may change."""

_Cuts = tuple[list[int], list[int]]
"""Places within a unit, and their ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens, but for the two in characters."""

    distance: int
    """Between chunk boundaries where there is a choice; gaps are up to twice as wide."""
    smallest: int
    limit: int
    """Most of one chunk, all included."""
    prose_unit: int
    whole_unit: int
    prose_chars: int
    whole_chars: int

    @classmethod
    def of(cls, params: ChunkParams) -> Sizes:
        target = params.target
        room = params.max_tokens - SLACK - Window.of(params).most - target // 6
        return cls(
            distance=max(params.min_tokens, min(target, room) // 2),
            smallest=max(1, params.min_tokens // 4),
            limit=params.max_tokens,
            prose_unit=max(2, target // 4),
            whole_unit=max(2, target * 3 // 4),
            prose_chars=max(4, _CHARS_PER_TOKEN * target // 8),
            whole_chars=max(8, target * 5 // 2),
        )


def measure(text: str, blocks: Sequence[Block], sizes: Sizes, count_tokens: CountTokens) -> Units:
    """Cut every block into units and count them, in one call; the few that have too many tokens are cut again."""
    starts: list[int] = []
    ranks: list[int] = []
    owners: list[int] = []
    ends = [*(block.start for block in blocks[1:]), len(text)]
    for index, (block, end) in enumerate(zip(blocks, ends, strict=True)):
        starts.append(block.start)
        ranks.append(block.rank)
        if end - block.start > (sizes.prose_chars // 2 if block.prose else sizes.whole_chars):
            if block.prose:
                prose.split(text, block.start, end, sizes.prose_chars, starts, ranks)
            else:
                _lines(text, block.start, end, sizes.whole_chars, starts, ranks)
        owners.extend([index] * (len(starts) - len(owners)))
    starts.append(len(text))
    tokens = count_tokens([text[a:b] for a, b in pairwise(starts)])
    units = Units(starts, ranks, owners, tokens)
    while replaced := _too_large(text, blocks, units, sizes):
        units = _replace(text, units, replaced, count_tokens)
    return units


def _lines(text: str, start: int, end: int, size: int, starts: list[int], ranks: list[int]) -> None:
    last = start
    for cut in [*prose.line_starts(text, start, end), end]:
        if cut - last > size:
            pieces = [place for place, _ in prose.cut_long(text, last, cut, size)]
            starts.extend(pieces)
            ranks.extend([BOUND_PIECE] * len(pieces))
        if cut < end:
            starts.append(cut)
            ranks.append(BOUND_LINE)
        last = cut


def _too_large(text: str, blocks: Sequence[Block], units: Units, sizes: Sizes) -> dict[int, _Cuts]:
    """Units with too many tokens (a script of a token a character, a long word, a long line) and where to cut them."""
    replaced = {}
    for index, tokens in enumerate(units.tokens):
        if tokens > sizes.prose_unit:
            running = blocks[units.blocks[index]].prose
            most = sizes.prose_unit if running else sizes.whole_unit
            if tokens > most:
                start, end = units.starts[index], units.starts[index + 1]
                cuts = _smaller(text, start, end, running, max(1, (end - start) * most * 2 // (tokens * 3)))
                if not cuts[0] and tokens > sizes.limit - SLACK:
                    cuts = _code_points(start, end, running, (end - start) * most // tokens)
                if cuts[0]:
                    replaced[index] = cuts
    return replaced


def _smaller(text: str, start: int, end: int, running: bool, size: int) -> _Cuts:
    if running:
        cuts = prose.cut_long(text, start, end, size)
        return [place for place, _ in cuts], [rank for _, rank in cuts]
    starts: list[int] = []
    ranks: list[int] = []
    _lines(text, start, end, size, starts, ranks)
    return starts, ranks


def _code_points(start: int, end: int, running: bool, size: int) -> _Cuts:
    """A single grapheme cluster that no chunk can hold is cut between its code points."""
    cuts = list(range(start + max(1, size), end, max(1, size)))
    return cuts, [PIECE if running else BOUND_PIECE] * len(cuts)


def _replace(text: str, units: Units, replaced: dict[int, _Cuts], count_tokens: CountTokens) -> Units:
    edges = {i: [units.starts[i], *cuts, units.starts[i + 1]] for i, (cuts, _) in replaced.items()}
    counts = iter(count_tokens([text[a:b] for edge in edges.values() for a, b in pairwise(edge)]))
    fresh = Units([], [], [], [])
    for index, tokens in enumerate(units.tokens):
        fresh.starts.append(units.starts[index])
        fresh.ranks.append(units.ranks[index])
        fresh.blocks.append(units.blocks[index])
        if index not in replaced:
            fresh.tokens.append(tokens)
            continue
        cuts, ranks = replaced[index]
        fresh.starts.extend(cuts)
        fresh.ranks.extend(ranks)
        fresh.blocks.extend([units.blocks[index]] * len(cuts))
        fresh.tokens.extend(next(counts) for _ in range(len(cuts) + 1))
    fresh.starts.append(units.starts[-1])
    return fresh
