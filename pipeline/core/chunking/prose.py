"""Cutting small: paragraphs at lines, sentences, clauses, words, at last graphemes, only as far as needed.

Cuts are chosen as chunk boundaries are (``boundaries``): best first, by the hash of the characters around them, so that
an edit never moves cuts far away.

A cut within a line stands *before* the white space, a cut at the end of a line *after* it. So no pre-token of a BPE
tokenizer and no word of WordPiece is torn, and token counts of neighbours add up exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from zlib import crc32

import regex

from pipeline.core.chunking.boundaries import greedy
from pipeline.core.chunking.units import LINE, PARAGRAPH, PIECE, SENTENCE, Block

_LOWER = "a-zß-öø-ÿα-ωа-я"
_CLOSERS = "\"'”’»)\\]*_`」』）】》"
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LINE_ENDS = re.compile(rf"\n(?:(?![ \t]*[{_LOWER}])|(?<![{_LOWER},;\-]\n))")
"""Line ends, but not those that merely wrap a sentence."""
_SENTENCE_ENDS = re.compile(
    rf"[.!?…؟۔।][.!?…]{{0,3}}+[{_CLOSERS}]{{0,4}}+(?=[ \t]{{1,9}}+[^\s{_LOWER}])"
    rf"|[。！？｡][。！？]{{0,3}}+[{_CLOSERS}]{{0,4}}+(?!\s)"
)
_SENTENCE_STARTS = re.compile(
    rf"[.!?…؟۔।][{_CLOSERS}]{{0,4}}+\s+(?=[^\s{_LOWER}])|[。！？｡]+[{_CLOSERS}]{{0,4}}+|\n\s*\n[ \t]*"
)
_CLAUSE_ENDS = re.compile(r"\n+|[,;:—–)\]}>](?=[ \t])|[、，；：]")
_WORD_ENDS = re.compile(r"\S(?=[^\S\n])")
_WORD_STARTS = re.compile(r"(?<=\s)(?=\S)")
_NEWLINES = re.compile(r"\n+")
_GRAPHEME = regex.compile(r"\X")
_LONGEST_CLUSTER = 512
"""Code points. Longer grapheme clusters do not occur in any language; they are cut like letters."""
_UNSPACED = "\u2e80"
"""CJK scripts and emoji begin here."""
STRETCH = 200
_MANY = 4096
_THIN = 1 << 29
"""Among more than _MANY places only those with a hash below this are considered: one of eight."""


def paragraphs(text: str) -> list[Block]:
    """Plain text: one block, the splitter below knows the rest."""
    return [Block(0, PARAGRAPH)] if text else []


def stretches(text: str) -> list[Block]:
    """A text of very many lines: a block of STRETCH characters or a little more, up to the end of a line."""
    starts = [0]
    while 0 < (end := text.find("\n", starts[-1] + STRETCH) + 1) < len(text):
        starts.append(end)
    return [Block(start, PARAGRAPH, prose=False) for start in starts]


def split(text: str, start: int, end: int, size: int, starts: list[int], ranks: list[int]) -> None:
    """Append the cuts within ``text[start:end]`` (not ``start`` itself) and their ranks: at blank lines everywhere,
    elsewhere only where units would be longer than about ``size`` characters of Latin script."""
    last = start
    for match in _BLANK_LINES.finditer(text, start, end):
        cut = match.end()
        if cut >= end:
            break
        if cut - last > size // 6:
            _split_paragraph(text, last, cut, size, starts, ranks)
        starts.append(cut)
        ranks.append(PARAGRAPH)
        last = cut
    _split_paragraph(text, last, end, size, starts, ranks)


def _split_paragraph(text: str, start: int, end: int, size: int, starts: list[int], ranks: list[int]) -> None:
    width = size // _letters_per_letter(text, start, end)
    if end - start > width:
        cuts = cut_long(text, start, end, width)
        starts += [place for place, _ in cuts]
        ranks += [rank for _, rank in cuts]


def _letters_per_letter(text: str, start: int, end: int) -> int:
    """How many Latin letters one character is worth to a tokenizer, roughly: by its bytes in UTF-8."""
    paragraph = text[start:end]
    if paragraph.isascii():
        return 1
    share = len(paragraph.encode()) / len(paragraph)
    return 1 if share < 1.3 else 3 if share < 2.3 else 6


def line_starts(text: str, start: int, end: int) -> list[int]:
    """Where lines begin after ``start``; blank lines belong to the line before them."""
    return [match.end() for match in _NEWLINES.finditer(text, start, end) if match.end() < end]


def cut_long(text: str, start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Cuts with their ranks that leave pieces of size / 2 … size characters (or one grapheme cluster): at line ends
    before sentence ends, these before clauses, words, graphemes; of equals where the hash of the text around is
    smallest."""
    distance = max(1, size // 2)
    key = partial(local_hash, text)
    everywhere = range(len(text) + 1)
    done: list[tuple[int, int]] = []
    gaps = [(start, end)]
    for rank, places in _LEVELS:
        left: list[tuple[int, int]] = []
        for a, b in gaps:
            candidates = places(text, a, b, a + distance, b - distance)
            if len(candidates) > _MANY:
                thin = [place for place in candidates if local_hash(text, place) < _THIN]
                is_thinner = 0 < len(thin) < len(candidates) // 2  # otherwise the text is a repeated pattern
                candidates = thin if is_thinner else candidates[:: max(1, distance // 8)]
            taken = greedy(candidates, everywhere, distance, key)
            if not taken and places is _word_ends:  # rather an uneven piece than a torn word
                candidates = places(text, a, b, a + 1, b - 1)
                taken = [min(candidates, key=lambda place: abs(2 * place - a - b))] if candidates else []
            done += [(place, rank) for place in taken]
            left += [(x, y) for x, y in pairwise([a, *taken, b]) if y - x > size]
        gaps = left
        if not gaps:
            break
    done.sort()
    return done


_Places = Callable[[str, int, int, int, int], Sequence[int]]
"""(text, start, end, low, high) → the places of a kind in low … high, looking at nothing but start … end."""


def _matches(pattern: re.Pattern[str]) -> _Places:
    """The ends of a pattern's matches. A match that begins more than 12 characters before ``low`` may be missed."""

    def places(text: str, start: int, end: int, low: int, high: int) -> list[int]:
        ends = []
        for match in pattern.finditer(text, max(start, low - 12), end):
            place = match.end()
            if place > high:
                break
            if place >= low:
                ends.append(place)
        return ends

    return places


_word_ends = _matches(_WORD_ENDS)


def _graphemes(text: str, start: int, end: int, low: int, high: int) -> Sequence[int]:
    """Boundaries between grapheme clusters; start is one. A cluster of absurd length is cut like letters.

    In slices, because to pair flags the regex engine looks back at all regional indicators before.
    """
    if text[start:end].isascii():
        return range(max(start + 1, low), min(end - 1, high) + 1)
    places: list[int] = []
    while start < end and start <= high:
        stop = min(end, start + 2 * _LONGEST_CLUSTER)
        ends = [start + match.end() for match in _GRAPHEME.finditer(text[start:stop])]
        if stop < end and len(ends) > 1:
            ends.pop()  # it may go on in the next slice
        for place in ends:
            if place - start > _LONGEST_CLUSTER:
                places += range(start + 1, place)
            places.append(place)
            start = place
    return [place for place in places if low <= place <= high and place < end]


_LEVELS: tuple[tuple[int, _Places], ...] = (
    (LINE, _matches(_LINE_ENDS)),
    (SENTENCE, _matches(_SENTENCE_ENDS)),
    (PIECE, _matches(_CLAUSE_ENDS)),
    (PIECE, _word_ends),
    (PIECE, _word_ends),  # for what an uneven cut or a thinned choice left
    (PIECE, _graphemes),
    (PIECE, _graphemes),
)


def local_hash(text: str, place: int, reach: int = 8) -> int:
    """A number that depends on the characters around a place only, the same in every process."""
    return mix(crc32(text[place - reach if place > reach else 0 : place + reach].encode()))


def mix(value: int) -> int:
    """Spread a CRC: the checksums of similar texts differ in a regular way, their products do not."""
    value = (value ^ (value >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return value ^ (value >> 15)


def is_torn(text: str, place: int) -> bool:
    """Whether a cut stands inside a word, where token counts of the two sides do not simply add up. (Scripts without
    spaces are not meant: their tokens seldom are longer than a character or two.)"""
    return 0 < place < len(text) and text[place - 1] < _UNSPACED > text[place] and text[place - 1 : place + 1].isalnum()


def start_near(text: str, low: int, place: int, high: int, reach: int) -> int:
    """Where to begin reading in low < … < high close to ``place``: at a sentence within reach, else at a word. ``low``
    if there is none."""
    begin, end = max(low + 1, place - 60), min(high, place + 60)
    sentences = (match.end() for match in _SENTENCE_STARTS.finditer(text, max(0, begin - 8), end))
    starts = [start for start in sentences if begin <= start < end and abs(start - place) <= reach]
    starts = starts or [match.start() for match in _WORD_STARTS.finditer(text, begin, end)]
    return min(starts, key=lambda start: abs(start - place), default=low)


def grapheme_near(text: str, low: int, place: int, high: int) -> int:
    """A boundary between grapheme clusters in low < … < high, where ``low`` is one; ``low`` if there is none."""
    around = low
    if place - low > _LONGEST_CLUSTER:  # a boundary after a plain letter is one wherever one begins to look
        around = place - 64
    end = min(high, place + 64)
    return min(_graphemes(text, around, end, low + 1, end - 1), key=lambda start: abs(start - place), default=low)
