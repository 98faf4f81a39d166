"""A PDF's page → pieces of lines with their places and sizes, by pdfium."""

from __future__ import annotations

import ctypes
import math
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Text on one line without a wide gap in it. Points, from the page's top left corner as it is shown."""

    text: str
    x0: float
    x1: float
    top: float
    bottom: float
    size: float
    """Of its first letter, as shown."""
    bold: bool = False
    is_table: bool = False
    """``text`` is a Markdown table, to be kept as it is."""

    @property
    def height(self) -> float:
        return self.bottom - self.top


@dataclass(slots=True)
class _Run:
    """What becomes a Piece."""

    text: list[str]
    x0: float
    x1: float
    top: float
    bottom: float
    size: float
    bold: bool

    def piece(self) -> Piece | None:
        words = "".join(self.text).strip()
        return Piece(words, self.x0, self.x1, self.top, self.bottom, self.size, self.bold) if words else None


def pieces(page: pypdfium2.PdfPage) -> list[Piece]:
    """In the order of the file. Text that is not shown on the page (outside of it) is left out."""
    textpage = page.get_textpage()
    try:
        return [piece for run in _runs(textpage.raw, _Shown(page)) if (piece := run.piece())]
    finally:
        textpage.close()


class _Shown:
    """From the page's own coordinates (origin at the bottom left, before rotation) to those of Piece."""

    def __init__(self, page: pypdfium2.PdfPage) -> None:
        left, bottom, right, top = page.get_bbox()
        self._left, self._bottom = left, bottom
        self._width, self._height = right - left, top - bottom
        self._rotation = page.get_rotation()

    def box(self, left: float, right: float, bottom: float, top: float) -> tuple[float, float, float, float]:
        """(x0, x1, top, bottom)"""
        corners = [self._point(left, top), self._point(right, bottom)]
        xs, ys = sorted(x for x, _ in corners), sorted(y for _, y in corners)
        return xs[0], xs[1], ys[0], ys[1]

    def holds(self, x: float, y: float) -> bool:
        wide, high = (self._width, self._height) if self._rotation % 180 == 0 else (self._height, self._width)
        return bool(-1 <= x <= wide + 1 and -1 <= y <= high + 1)

    def _point(self, x: float, y: float) -> tuple[float, float]:
        x, y = x - self._left, y - self._bottom
        match self._rotation:
            case 90:
                return y, x
            case 180:
                return self._width - x, y
            case 270:
                return self._height - y, self._width - x
        return x, self._height - y


def _runs(textpage: Any, shown: _Shown) -> Iterator[_Run]:
    rect = raw.FS_RECTF()
    run: _Run | None = None
    space = False
    for n in range(min(raw.FPDFText_CountChars(textpage), MAX_CHARS_A_PAGE)):
        code = raw.FPDFText_GetUnicode(textpage, n)
        char = chr(code) if 0 < code < 0x110000 else "\ufffd"
        if char in "\r\n":
            if run is not None:
                yield run
            run, space = None, False
            continue
        if char.isspace():
            space = True
            continue
        if char in HYPHENS:
            if run is not None:
                run.text.append("\u00ad")
            continue
        if not raw.FPDFText_GetLooseCharBox(textpage, n, ctypes.byref(rect)):
            continue
        x0, x1, top, bottom = shown.box(rect.left, rect.right, rect.bottom, rect.top)
        if not shown.holds((x0 + x1) / 2, (top + bottom) / 2):
            continue
        if run is not None and _parted(run, x0, x1, top, bottom):
            yield run
            run = None
        if run is None:
            run = _Run([], x0, x1, top, bottom, _size(textpage, n), _is_bold(textpage, n))
        elif space:
            run.text.append(" ")
        run.text.append(char)
        run.x0, run.x1 = min(run.x0, x0), max(run.x1, x1)
        run.top, run.bottom = min(run.top, top), max(run.bottom, bottom)
        space = False
    if run is not None:
        yield run


def _parted(run: _Run, x0: float, x1: float, top: float, bottom: float) -> bool:
    """Whether a letter stands apart from the run: behind a wide gap, or on another line."""
    if max(x0 - run.x1, run.x0 - x1) > GAP * max(run.size, 4.0):
        return True
    middle = (top + bottom) / 2
    return not run.top - 1 <= middle <= run.bottom + 1


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
