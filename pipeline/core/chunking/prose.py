"""Cutting small: running text into sentences, anything too long at lines, clauses, words, at last graphemes.

Every cut depends on the characters around it only, or on a chain of short windows that starts anew at each sentence and
meets itself again within a few windows: an edit never moves cuts far away.

A cut within a line stands *before* the white space, a cut at the end of a line *after* it. So no pre-token of a BPE
tokenizer and no word of WordPiece is torn, and token counts of neighbours add up exactly.
"""

from __future__ import annotations

import re
from zlib import crc32

import regex

from pipeline.core.chunking.units import LINE, PARAGRAPH, PIECE, SENTENCE, Block

_LOWER = "a-zß-öø-ÿα-ωа-я"
_CLOSERS = "\"'”’»)\\]*_`」』）】》"
_BREAKS = re.compile(
    r"(\n(?:[ \t]*\n)+)"  # blank lines
    rf"|(\n(?:(?![ \t]*[{_LOWER}])|(?<![{_LOWER},;\-]\n)))"  # a line end that does not merely wrap a sentence
    rf"|([.!?…؟۔।][.!?…]*[{_CLOSERS}]*(?=[ \t]+[^\s{_LOWER}]))"
    rf"|([。！？｡][。！？]*[{_CLOSERS}]*(?!\s))"
)
_RANK_OF_GROUP = (0, PARAGRAPH, LINE, SENTENCE, SENTENCE)

_NEWLINES = re.compile(r"\n+")
_CLAUSES = re.compile(r"[,;:—–)\]}>](?=[ \t])|[、，；：。！？｡]")
_SPACES = re.compile(r"(?<=\S)(?=[^\S\n])")
_GRAPHEME = regex.compile(r"\X")
_LONGEST_CLUSTER = 512
"""Code points. Longer grapheme clusters do not occur in any language; they are cut like letters."""


def paragraphs(text: str) -> list[Block]:
    """Plain text: one block, the sentence splitter knows the rest."""
    return [Block(0, PARAGRAPH)] if text else []


def sentences(text: str, start: int, end: int, size: int, starts: list[int], ranks: list[int]) -> None:
    """Append the cuts within ``text[start:end]`` (not ``start`` itself). No unit is longer than size characters."""
    last = start
    for match in _BREAKS.finditer(text, start, end):
        cut = match.end()
        if cut >= end:
            break
        if cut - last > size:
            _append_pieces(text, last, cut, size, starts, ranks)
        starts.append(cut)
        ranks.append(_RANK_OF_GROUP[match.lastindex or 0])
        last = cut
    if end - last > size:
        _append_pieces(text, last, end, size, starts, ranks)


def _append_pieces(text: str, start: int, end: int, size: int, starts: list[int], ranks: list[int]) -> None:
    pieces = cut_long(text, start, end, size)
    starts.extend(pieces)
    ranks.extend([PIECE] * len(pieces))


def line_starts(text: str, start: int, end: int) -> list[int]:
    """Where lines begin after ``start``; blank lines belong to the line before them."""
    return [match.end() for match in _NEWLINES.finditer(text, start, end) if match.end() < end]


def cut_long(text: str, start: int, end: int, size: int) -> list[int]:
    """Cuts that leave pieces of at most ``size`` characters (or one grapheme cluster), seldom under half of it."""
    cuts: list[int] = []
    last = start
    while end - last > size:
        cut = _cut_in_window(text, last, last + max(1, size // 2), last + max(1, size), end)
        if cut >= end:
            break
        cuts.append(cut)
        last = cut
    return cuts


def _cut_in_window(text: str, last: int, low: int, high: int, end: int) -> int:
    """The best cut in low … high: a line end before a clause's before a word's; of equals that of the smallest hash."""
    for pattern in (_NEWLINES, _CLAUSES, _SPACES):
        places = [match.end() for match in pattern.finditer(text, low, high) if match.end() < end]
        if places:
            return _smallest(text, places)
    places = []
    for match in _GRAPHEME.finditer(text, last, min(end, high + _LONGEST_CLUSTER)):
        place = int(match.end())
        if place > high:
            if places or place - last <= high - low:
                break
            return place if match.start() == last and place - last < _LONGEST_CLUSTER else max(high, match.start())
        if place >= low:
            places.append(place)
    return _smallest(text, places) if places else high


def _smallest(text: str, places: list[int]) -> int:
    return min(places, key=lambda place: local_hash(text, place)) if len(places) > 1 else places[0]


def local_hash(text: str, place: int, reach: int = 8) -> int:
    """A number that depends on the characters around a place only, the same in every process."""
    return mix(crc32(text[max(0, place - reach) : place + reach].encode()))


def mix(value: int) -> int:
    """Spread a CRC: the checksums of similar texts differ in a regular way, their products do not."""
    value = (value ^ (value >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return value ^ (value >> 15)


def is_torn(text: str, place: int) -> bool:
    """Whether a cut stands inside a word, where token counts of the two sides do not simply add up."""
    return 0 < place < len(text) and not text[place - 1].isspace() and not text[place].isspace()


def word_start_near(text: str, low: int, place: int, high: int) -> int:
    """The start of a word in low < … < high close to ``place``; without words, a grapheme boundary."""
    best = -1
    for match in _WORD_STARTS.finditer(text, max(low + 1, place - 60), min(high, place + 60)):
        if best < 0 or abs(match.start() - place) < abs(best - place):
            best = match.start()
    if best >= 0:
        return best
    best = low
    for match in _GRAPHEME.finditer(text, max(low, place - 64), min(high, place + _LONGEST_CLUSTER)):
        if low < match.end() < high:
            best = match.end()
            if best >= place:
                break
    return best


_WORD_STARTS = re.compile(r"(?<=\s)(?=\S)")
