"""Blocks → chunks: count, choose boundaries, add what is repeated, and say truly how many tokens that makes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import crc32

from pipeline.core.chunking import prose
from pipeline.core.chunking.boundaries import choose, halve
from pipeline.core.chunking.overlap import Overlap, Window, may_overlap, overlaps
from pipeline.core.chunking.prose import is_torn, mix
from pipeline.core.chunking.units import BOUND_LINE, BOUND_PIECE, PIECE, Block, Units
from pipeline.core.model import Chunk, ChunkParams, CountTokens, Span

_REACH = 12
_EDGE = 24
"""Characters of a word at a chunk's edge that are looked at when its white space is trimmed."""


def pack(text: str, blocks: Sequence[Block], params: ChunkParams, count_tokens: CountTokens) -> list[Chunk]:
    """The chunks of a text given as blocks (gapless: the first starts at 0)."""
    if not blocks:
        return []
    packing = _Packing(text, blocks, params, count_tokens)
    cuts = packing.cuts()
    if packing.is_too_long(cuts):
        packing.count_characters()
        cuts = packing.cuts()
    while True:
        drafts = packing.drafts(cuts)
        too_large = packing.settle(drafts)
        if not too_large:
            return [packing.chunk(draft) for draft in drafts]
        cuts = packing.cut_again(cuts, too_large)


@dataclass(slots=True)
class _Draft:
    """A chunk whose token count is still a sum of its units' counts."""

    first: int
    last: int
    prefix: tuple[Span, ...]
    start: int
    end: int
    tokens: int
    uncertain: int
    """How far the true count may be above the sum: one a joint of units, for tokenizers that look across it."""
    torn: bool
    """Has a joint inside a word: only counting again tells."""


class _Packing:
    def __init__(self, text: str, blocks: Sequence[Block], params: ChunkParams, count_tokens: CountTokens) -> None:
        self.text = text
        self.blocks = blocks
        self.sizes = Sizes.of(params)
        self.window = Window.of(params)
        self.count_tokens = count_tokens
        self.units = measure(text, blocks, self.sizes, count_tokens)
        self.positions = [0, *accumulate(self.units.tokens)]
        spans = list({span: None for block in blocks for span in block.prefix})
        self.prefix_tokens = dict(zip(spans, count_tokens([text[a:b] for a, b in spans]), strict=True)) if spans else {}
        self.prefixes = self._prefixes()
        ranks, starts = self.units.ranks, self.units.starts
        pieces = (unit for unit, rank in enumerate(ranks) if rank in (PIECE, BOUND_PIECE))
        self.torn = [unit for unit in pieces if is_torn(text, starts[unit])]
        """Units that begin inside a word."""
        self.bare: set[int] = set()
        """Units whose chunk has no room for anything repeated."""

    def cuts(self) -> list[int]:
        sizes = self.sizes
        return choose(
            self.units.ranks,
            self.positions,
            distance=sizes.distance,
            smallest=sizes.smallest,
            capacity=self._capacity,
            priority=self._priority,
        )

    def is_too_long(self, cuts: Sequence[int]) -> bool:
        """Whether a chunk has more than MAX_CHARACTERS_PER_TOKEN characters for each token that it may have, or what
        chunks repeat more than MAX_REPEATED_PER_TOKEN."""
        repeated = max((sum(b - a for a, b in used) for used, _ in self.prefixes.values()), default=0)
        if repeated > self.sizes.limit // 3 * MAX_REPEATED_PER_TOKEN:
            return True
        most = self.sizes.limit * MAX_CHARACTERS_PER_TOKEN
        starts = self.units.starts
        trimmed = (_trimmed(self.text, starts[a], starts[b]) for a, b in pairwise(cuts) if starts[b] - starts[a] > most)
        return any(end - start > most for start, end in trimmed)

    def count_characters(self) -> None:
        """Count a token for each MAX_CHARACTERS_PER_TOKEN or MAX_REPEATED_PER_TOKEN characters at least."""
        self.units.tokens = _with_blanks(self.units)
        self.positions = [0, *accumulate(self.units.tokens)]
        for (start, end), tokens in self.prefix_tokens.items():
            self.prefix_tokens[start, end] = max(tokens, (end - start) // MAX_REPEATED_PER_TOKEN)
        self.prefixes = self._prefixes()

    def _priority(self, unit: int) -> int:
        """The hash of the text after a boundary, and among equals of that before. Little text, for the less an edit is
        likely to meet it."""
        at = self.units.starts[unit]
        after = mix(crc32(self.text[at : at + _REACH].strip().encode()))
        return after << 32 | crc32(self.text[max(0, at - _REACH) : at].strip().encode())

    def _capacity(self, unit: int) -> int:
        """Most tokens of a chunk's own text if it begins at this unit."""
        room = self.sizes.limit - SLACK
        if unit in self.bare:
            return room
        if prefix := self.blocks[self.units.blocks[unit]].prefix:
            return room - self.prefixes[prefix][1]
        return room - self.window.most if may_overlap(unit, self.units, self.blocks) else room

    def _prefixes(self) -> dict[tuple[Span, ...], tuple[tuple[Span, ...], int]]:
        """The repeated part of every prefix, and its tokens: as many of the innermost spans as fit a third of a
        chunk."""
        repeated: dict[tuple[Span, ...], tuple[tuple[Span, ...], int]] = {}
        for block in self.blocks:
            if block.prefix and block.prefix not in repeated:
                used: list[Span] = []
                tokens = 0
                for span in reversed(block.prefix):
                    if tokens + self.prefix_tokens[span] > self.sizes.limit // 3:
                        break
                    used.insert(0, span)
                    tokens += self.prefix_tokens[span]
                repeated[block.prefix] = tuple(used), tokens
        return repeated

    def drafts(self, cuts: Sequence[int]) -> list[_Draft]:
        repeated = overlaps(self.text, self.units, self.blocks, cuts, self.window, self.count_tokens)
        made = (self._draft(a, b, repeated.get(a)) for a, b in pairwise(cuts))
        return [draft for draft in made if draft is not None]

    def _draft(self, first: int, last: int, overlap: Overlap | None) -> _Draft | None:
        """The chunk of units first … last − 1, white space at its ends trimmed; None when nothing else is in it."""
        text, units = self.text, self.units
        start, end = _trimmed(text, units.starts[first], units.starts[last])
        if start >= end:
            return None
        tokens = self.positions[last] - self.positions[first]
        prefix: tuple[Span, ...] = ()
        if first not in self.bare:
            if overlap is not None:
                start = _trimmed(text, overlap.start, end)[0]
                tokens += overlap.tokens
            elif whole := self.blocks[units.blocks[first]].prefix:
                prefix, prefix_tokens = self.prefixes[whole]
                tokens += prefix_tokens
        torn = bisect_left(self.torn, last) > bisect_left(self.torn, first + (overlap is None))
        return _Draft(first, last, prefix, start, end, tokens, last - first + len(prefix) + 2, torn)

    def settle(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Correct the counts for what was trimmed, count again what is uncertain and near the limit or torn inside a
        word; returns the chunks that are too large."""
        self._correct_edges(drafts)
        limit = self.sizes.limit
        suspect = [draft for draft in drafts if draft.torn or draft.tokens + draft.uncertain > limit]
        if suspect:
            for draft, tokens in zip(suspect, self.count_tokens([self._text(d) for d in suspect]), strict=True):
                draft.tokens = tokens
        return [draft for draft in suspect if draft.tokens > limit]

    def _correct_edges(self, drafts: Sequence[_Draft]) -> None:
        """Trimming changes only the tokens of the word at the edge: count that with and without its white space."""
        text, starts = self.text, self.units.starts
        edges: list[tuple[_Draft, str, str]] = []
        for draft in drafts:
            full = starts[draft.last]
            if draft.end < full:
                word = max(text.rfind(" ", draft.start, draft.end), text.rfind("\n", draft.start, draft.end) + 1)
                word = max(word, draft.end - _EDGE, draft.start)
                edges.append((draft, text[word:full], text[word : draft.end]))
            if draft.start and text[draft.start - 1] == " " and not draft.prefix:
                edges.append(
                    (draft, text[draft.start - 1 : draft.start + _EDGE], text[draft.start : draft.start + _EDGE])
                )
        if edges:
            counts = self.count_tokens([part for _, before, after in edges for part in (before, after)])
            for (draft, _, _), before, after in zip(edges, counts[::2], counts[1::2], strict=True):
                draft.tokens += after - before

    def cut_again(self, cuts: Sequence[int], too_large: Iterable[_Draft]) -> list[int]:
        """Halve what turned out too large; a single unit gives up what it repeats."""
        cut_units = set(cuts)
        for draft in too_large:
            if draft.last - draft.first > 1:
                cut_units.add(halve(self.units.ranks, self.positions, draft.first, draft.last))
            elif draft.first in self.bare:
                raise AssertionError("a unit that was counted to fit does not fit")
            else:
                self.bare.add(draft.first)
        return sorted(cut_units)

    def _spans(self, draft: _Draft) -> tuple[Span, ...]:
        return (*draft.prefix, (draft.start, draft.end))

    def _text(self, draft: _Draft) -> str:
        return "".join(self.text[a:b] for a, b in self._spans(draft))

    def chunk(self, draft: _Draft) -> Chunk:
        headings = self.blocks[self.units.blocks[draft.first]].headings
        return Chunk(self._text(draft), self._spans(draft), draft.tokens, headings)


def _trimmed(text: str, start: int, end: int) -> Span:
    """The span without white space at its ends. The indentation of its first line stays."""
    end = start + len(text[start:end].rstrip())
    first = end - len(text[start:end].lstrip())
    line = text.rfind("\n", start, first) + 1
    if not line and (start == 0 or text[start - 1] == "\n"):
        line = start
    return (max(line, start) if line or start == 0 else first), end


_CHARS_PER_TOKEN = 5
"""More than prose has on average: only a first guess, the tokens are counted afterwards."""
MAX_CHARACTERS_PER_TOKEN = 100
"""So many characters count as a token at least, in a text of which a chunk would be longer otherwise. Word pieces have
none for blanks and for characters that are not assigned, so that a chunk had megabytes, and the header of a table
megabytes in each of its chunks. Other texts, such as a table whose columns are padded to the longest cell, are cut
without this: their chunks stay as they are."""
MAX_REPEATED_PER_TOKEN = 25
"""The same for what chunks repeat: a table of short rows has a copy of its header for every few hundred characters."""
SLACK = 2
"""Tokens kept free in every chunk for what trimming white space at its ends may change."""

_Cuts = tuple[list[int], list[int]]
"""Places within a unit, and their ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that chunks are packed by, in tokens, except for the two in characters."""

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


def _with_blanks(units: Units) -> list[int]:
    """The tokens of the units, and one more for each MAX_CHARACTERS_PER_TOKEN characters that the tokens of this unit
    and those before it do not account for."""
    tokens, left = list[int](), 0
    for (start, end), count in zip(pairwise(units.starts), units.tokens, strict=True):
        left = max(0, left + end - start - count * MAX_CHARACTERS_PER_TOKEN)
        tokens.append(count + left // MAX_CHARACTERS_PER_TOKEN)
        left %= MAX_CHARACTERS_PER_TOKEN
    return tokens


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
