"""A PDF's page → pieces of lines with their places and sizes, by pdfium."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pypdfium2
from pypdfium2 import raw

HYPHENS = frozenset("\x02\ufffe\u00ad")
"""How pdfium marks a word that was divided at the end of a line, and Unicode's soft hyphen."""
GAP = 1.6
"""Times the font size: a wider gap on a line parts columns or cells; justified text stays far below."""
MAX_CHARS_A_PAGE = 500_000
MIN_HEIGHT = 1.0
"""Points. Smaller letters are not there to be read by people."""
SAMPLED = 50
"""Letters that are asked in which direction they run."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text on one line without a wide gap in it. Points, from the page's top left corner as it is frame."""

    text: str
    x0: float
    x1: float
    top: float
    bottom: float
    size: float
    """Of its first letter, as frame."""
    bold: bool = False
    is_table: bool = False
    """``text`` is a Markdown table, to be kept as it is."""

    @property
    def height(self) -> float:
        return self.bottom - self.top


@dataclass(frozen=True, slots=True)
class PageText:
    pieces: list[Piece]
    """In the order of the file."""
    height: float
    as_shown: bool
    """Whether its text runs from left to right as the page is shown; else places are as if the page were turned so."""


def page_text(page: pypdfium2.PdfPage) -> PageText:
    """Text outside of the page is left out: nobody sees it."""
    textpage = page.get_textpage()
    try:
        turn = _direction(textpage.raw)
        frame = _Frame(page, turn)
        found = [piece for run in _runs(textpage.raw, turn) if (piece := _piece(textpage.raw, run, frame))]
        return PageText(found, frame.height, turn == page.get_rotation())
    finally:
        textpage.close()


def _direction(textpage: Any) -> int:
    """In which direction most text runs, in the page's own coordinates: 0, 90 (upwards), 180 or 270 degrees. (pdfium
    counts clockwise.)"""
    count = raw.FPDFText_CountChars(textpage)
    step = max(1, count // SAMPLED)
    turns = Counter(
        -round(math.degrees(raw.FPDFText_GetCharAngle(textpage, n)) / 90) % 4 * 90 for n in range(0, count, step)
        if raw.FPDFText_GetUnicode(textpage, n) > ord(" ")
    )  # fmt: skip
    return turns.most_common(1)[0][0] if turns else 0


class _Frame:
    """From the page's own coordinates (origin at the bottom left) to those of Piece, for text in one direction."""

    def __init__(self, page: pypdfium2.PdfPage, turn: int) -> None:
        left, bottom, right, top = page.get_bbox()
        self._left, self._bottom = left, bottom
        self._wide, self._high = right - left, top - bottom
        self._turn = turn
        self.width, self.height = (self._wide, self._high) if turn % 180 == 0 else (self._high, self._wide)

    def box(self, left: float, right: float, bottom: float, top: float) -> tuple[float, float, float, float]:
        """(x0, x1, top, bottom)"""
        corners = [self._point(left, top), self._point(right, bottom)]
        xs, ys = sorted(x for x, _ in corners), sorted(y for _, y in corners)
        return xs[0], xs[1], ys[0], ys[1]

    def holds(self, x: float, y: float) -> bool:
        return bool(-1 <= x <= self.width + 1 and -1 <= y <= self.height + 1)

    def _point(self, x: float, y: float) -> tuple[float, float]:
        x, y = x - self._left, y - self._bottom
        match self._turn:
            case 90:
                return y, x
            case 180:
                return self._wide - x, y
            case 270:
                return self._high - y, self._wide - x
        return x, self._high - y


@dataclass(slots=True)
class _Run:
    """Letters that stand together, in the page's own coordinates."""

    first: int
    last: int
    """Of its letters, by pdfium's count."""
    text: str
    left: float
    right: float
    bottom: float
    top: float


def _runs(textpage: Any, turn: int) -> Iterator[_Run]:
    """A loop over every letter of the document, and written like one."""
    rect = raw.FS_RECTF()
    reference = ctypes.byref(rect)
    get_unicode, get_box = raw.FPDFText_GetUnicode, raw.FPDFText_GetLooseCharBox
    upright = turn % 180 == 0
    first, last, space = -1, -1, False
    text: list[str] = []
    left = right = bottom = top = limit = 0.0
    for n in range(min(raw.FPDFText_CountChars(textpage), MAX_CHARS_A_PAGE)):
        code = get_unicode(textpage, n)
        char = chr(code) if 0 < code < 0x110000 else "\ufffd"
        if char.isspace():
            space = True
            if char in "\r\n" and text:
                yield _Run(first, last, "".join(text), left, right, bottom, top)
                text = []
            continue
        if char in HYPHENS:
            if text:
                text.append("\u00ad")
            continue
        if not get_box(textpage, n, reference):
            continue
        x0, x1, y0, y1 = rect.left, rect.right, rect.bottom, rect.top
        if text:
            if upright:
                apart = x0 - right > limit or left - x1 > limit or not bottom - 1 <= (y0 + y1) / 2 <= top + 1
            else:
                apart = y0 - top > limit or bottom - y1 > limit or not left - 1 <= (x0 + x1) / 2 <= right + 1
            if apart:
                yield _Run(first, last, "".join(text), left, right, bottom, top)
                text = []
        if text:
            if space:
                text.append(" ")
            text.append(char)
            left, right = min(left, x0), max(right, x1)
            bottom, top = min(bottom, y0), max(top, y1)
        else:
            first, text = n, [char]
            left, right, bottom, top = x0, x1, y0, y1
            limit = GAP * max(_size(textpage, n), 4.0)
        last, space = n, False
    if text:
        yield _Run(first, last, "".join(text), left, right, bottom, top)


def _piece(textpage: Any, run: _Run, frame: _Frame) -> Piece | None:
    """None: nobody sees it."""
    x0, x1, top, bottom = frame.box(run.left, run.right, run.bottom, run.top)
    words = run.text.strip()
    if not words or bottom - top < MIN_HEIGHT or not frame.holds((x0 + x1) / 2, (top + bottom) / 2):
        return None
    bold = _is_bold(textpage, run.first) and _is_bold(textpage, run.last)  # a line may begin with a bold word
    return Piece(words, x0, x1, top, bottom, _size(textpage, run.first), bold)


def _size(textpage: Any, n: int) -> float:
    """The font's size times how the text's matrix stretches it."""
    matrix = raw.FS_MATRIX()
    size = float(raw.FPDFText_GetFontSize(textpage, n))
    if raw.FPDFText_GetMatrix(textpage, n, ctypes.byref(matrix)):
        size *= math.hypot(matrix.c, matrix.d) or 1.0
    return round(size * 2) / 2


_BOLD_WEIGHT = 600


def _is_bold(textpage: Any, n: int) -> bool:
    """By the font's weight, or where that is not told by its name."""
    if raw.FPDFText_GetFontWeight(textpage, n) >= _BOLD_WEIGHT:
        return True
    flags = ctypes.c_int()
    needed = raw.FPDFText_GetFontInfo(textpage, n, None, 0, ctypes.byref(flags))
    if not 0 < needed <= 256:
        return False
    name = ctypes.create_string_buffer(needed)
    raw.FPDFText_GetFontInfo(textpage, n, name, needed, ctypes.byref(flags))
    return any(word in name.value.lower() for word in (b"bold", b"black", b"heavy"))
