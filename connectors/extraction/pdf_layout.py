"""The layout of a PDF's page: its lines, the reading order of its pieces, and tables with ruled cells.

Columns are read one after the other; a piece that spans them (a title, a wide table) ends the columns above it. Short
pieces next to each other are a row, not columns (a form, a table without rules), and are read across. Searching for
tables with pdfplumber is slow, so it is done only on pages with rules, and only for a limited time.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from statistics import median
from typing import Any

import pdfplumber
import pypdfium2
from pdfplumber.pdf import PDF
from pypdfium2 import raw

from connectors.extraction import markdown

HYPHENS = frozenset("\x02\ufffe\u00ad")
"""Characters by which pdfium marks a word that is divided at the end of a line, and Unicode's soft hyphen."""
GAP_RATIO = 1.6
"""A gap on a line of more than this many times the font size separates columns or cells; justified text stays far
below."""
MAX_CHARACTERS_PER_PAGE = 500_000
MIN_HEIGHT_POINTS = 1.0
"""Smaller letters are not meant to be read by people."""
SAMPLED_LETTERS = 50
"""Letters per page whose direction is looked up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text on one line without a wide gap in it. Coordinates are points from the top left corner of the page, turned so
    that its text runs from left to right."""

    text: str
    x0: float
    x1: float
    top: float
    bottom: float
    size: float
    """Font size of its first letter, in points."""
    bold: bool = False
    is_table: bool = False
    """``text`` is a Markdown table, which is not changed any more."""

    @property
    def height(self) -> float:
        return self.bottom - self.top


@dataclass(frozen=True, slots=True)
class PageText:
    pieces: list[Piece]
    """The pieces in the order of the file."""
    height: float
    is_upright: bool
    """The text runs from left to right when the page is displayed; else coordinates are those of the page turned so."""


def page_text(page: pypdfium2.PdfPage) -> PageText:
    """Read a page's text. Invisible text outside of the page is left out."""
    textpage = page.get_textpage()
    try:
        turn = _direction(textpage.raw)
        frame = _Frame(page, turn)
        pieces = [piece for run in _runs(textpage.raw, turn) if (piece := _piece(textpage.raw, run, frame))]
        return PageText(pieces, frame.height, turn == page.get_rotation())
    finally:
        textpage.close()


def _direction(textpage: Any) -> int:
    """Return the direction of most text in the page's own coordinates: 0, 90 (upwards), 180 or 270 degrees. (pdfium
    counts clockwise.)"""
    count = raw.FPDFText_CountChars(textpage)
    step = max(1, count // SAMPLED_LETTERS)
    turns = Counter(
        -round(math.degrees(raw.FPDFText_GetCharAngle(textpage, n)) / 90) % 4 * 90
        for n in range(0, count, step)
        if raw.FPDFText_GetUnicode(textpage, n) > ord(" ")
    )
    return turns.most_common(1)[0][0] if turns else 0


class _Frame:
    """Converts the page's own coordinates (origin at the bottom left) to those of Piece, for text in one direction."""

    def __init__(self, page: pypdfium2.PdfPage, turn: int) -> None:
        left, bottom, right, top = page.get_bbox()
        self._left, self._bottom = left, bottom
        self._wide, self._high = right - left, top - bottom
        self._turn = turn
        self.width, self.height = (self._wide, self._high) if turn % 180 == 0 else (self._high, self._wide)

    def box(self, left: float, right: float, bottom: float, top: float) -> tuple[float, float, float, float]:
        """Return (x0, x1, top, bottom) of a box."""
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
    """Letters without a gap between them, in the page's own coordinates."""

    first: int
    last: int
    """Indexes of its first and last letter in pdfium's text page."""
    text: str
    left: float
    right: float
    bottom: float
    top: float


def _runs(textpage: Any, turn: int) -> Iterator[_Run]:
    """Yield the runs of a page. This loops over every letter, so it avoids calls and attribute look-ups."""
    rect = raw.FS_RECTF()
    reference = ctypes.byref(rect)
    get_unicode, get_box = raw.FPDFText_GetUnicode, raw.FPDFText_GetLooseCharBox
    upright = turn % 180 == 0
    first, last, space = -1, -1, False
    text: list[str] = []
    left = right = bottom = top = limit = 0.0
    for n in range(min(raw.FPDFText_CountChars(textpage), MAX_CHARACTERS_PER_PAGE)):
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
            limit = GAP_RATIO * max(_size(textpage, n), 4.0)
        last, space = n, False
    if text:
        yield _Run(first, last, "".join(text), left, right, bottom, top)


def _piece(textpage: Any, run: _Run, frame: _Frame) -> Piece | None:
    """Return a run as a piece, or None if it is invisible."""
    x0, x1, top, bottom = frame.box(run.left, run.right, run.bottom, run.top)
    words = run.text.strip()
    if not words or bottom - top < MIN_HEIGHT_POINTS or not frame.holds((x0 + x1) / 2, (top + bottom) / 2):
        return None
    bold = _is_bold(textpage, run.first) and _is_bold(textpage, run.last)  # a line may begin with a bold word
    return Piece(words, x0, x1, top, bottom, _size(textpage, run.first), bold)


def _size(textpage: Any, n: int) -> float:
    """Return the font size as displayed: the font's own size times the scale of the text matrix."""
    matrix = raw.FS_MATRIX()
    size = float(raw.FPDFText_GetFontSize(textpage, n))
    if raw.FPDFText_GetMatrix(textpage, n, ctypes.byref(matrix)):
        size *= math.hypot(matrix.c, matrix.d) or 1.0
    return round(size * 2) / 2


_BOLD_WEIGHT = 600


def _is_bold(textpage: Any, n: int) -> bool:
    """Whether a letter is bold, by its font's weight or else by the font's name."""
    if raw.FPDFText_GetFontWeight(textpage, n) >= _BOLD_WEIGHT:
        return True
    flags = ctypes.c_int()
    needed = raw.FPDFText_GetFontInfo(textpage, n, None, 0, ctypes.byref(flags))
    if not 0 < needed <= 256:
        return False
    name = ctypes.create_string_buffer(needed)
    raw.FPDFText_GetFontInfo(textpage, n, name, needed, ctypes.byref(flags))
    return any(word in name.value.lower() for word in (b"bold", b"black", b"heavy"))


MIN_COLUMN_LINES = 4
"""Least lines in a column."""
MIN_COLUMN_CHARACTERS = 18
"""Least length of the median line in a column: shorter ones are cells."""
MIN_GUTTER_POINTS = 6.0
"""Least width between two columns; newspapers have about 12."""
MAX_SPANNING_SHARE = 0.3
"""Largest share of the pieces that may cross a gutter, such as titles and wide figures."""
_MAX_DEPTH = 6
_MAX_STRIPS = 40


def in_reading_order(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return flows in reading order: each holds the lines of a column, or of the page, from top to bottom."""
    return [flow for flow in _flows(list(pieces), 0) if flow]


def _flows(pieces: list[Piece], depth: int) -> list[list[Piece]]:
    gutter = _gutter(pieces) if depth < _MAX_DEPTH else None
    if gutter is None:
        return [_by_rows(pieces)]
    spanning = sorted((p for p in pieces if p.x0 < gutter < p.x1), key=lambda p: p.top)
    rest = [p for p in pieces if not p.x0 < gutter < p.x1]
    flows: list[list[Piece]] = []
    for piece in spanning:
        above = [p for p in rest if _middle(p) < _middle(piece)]
        rest = [p for p in rest if _middle(p) >= _middle(piece)]
        flows += _columns(above, gutter, depth)
        if flows and above == [] and flows[-1] and flows[-1][-1] in spanning:
            flows[-1].append(piece)  # consecutive spanning lines are one flow
        else:
            flows.append([piece])
    return flows + _columns(rest, gutter, depth)


def _columns(pieces: list[Piece], gutter: float, depth: int) -> list[list[Piece]]:
    if not pieces:
        return []
    left = [p for p in pieces if p.x1 <= gutter]
    right = [p for p in pieces if p.x1 > gutter]
    return [*_flows(left, depth + 1), *_flows(right, depth + 1)]


def _gutter(pieces: list[Piece]) -> float | None:
    """Return the x coordinate of the vertical strip that the fewest pieces cross, with columns on both of its sides."""
    lines = [p for p in pieces if not p.is_table]
    if len(lines) < 2 * MIN_COLUMN_LINES:
        return None
    best: tuple[int, float] | None = None
    for start, end in _gaps(lines):
        middle = (start + end) / 2
        crossing = sum(p.x0 < middle < p.x1 for p in pieces)
        left = [p for p in lines if p.x1 <= middle]
        right = [p for p in lines if p.x0 >= middle]
        if crossing > MAX_SPANNING_SHARE * len(pieces) or not (_is_column(left) and _is_column(right)):
            continue
        if not _side_by_side(left, right):
            continue
        if best is None or crossing < best[0]:
            best = crossing, middle
    return best[1] if best else None


def _gaps(lines: list[Piece]) -> list[tuple[float, float]]:
    """Return candidates for gutters, as (start, end): strips that end at the left edge of several lines."""
    strips = []
    edges = sorted({round(p.x0) for p in lines})
    for edge in edges[1:]:
        right_of_edge = [p for p in lines if p.x0 >= edge - 2]
        left_of_edge = [p.x1 for p in lines if p.x1 <= edge - MIN_GUTTER_POINTS + 2]
        if len(right_of_edge) >= MIN_COLUMN_LINES and len(left_of_edge) >= MIN_COLUMN_LINES:
            strips.append((max(left_of_edge), min(p.x0 for p in right_of_edge)))
        if len(strips) >= _MAX_STRIPS:
            break
    return [(start, end) for start, end in strips if end - start >= MIN_GUTTER_POINTS]


def _is_column(lines: list[Piece]) -> bool:
    return len(lines) >= MIN_COLUMN_LINES and median(len(p.text) for p in lines) >= MIN_COLUMN_CHARACTERS


def _side_by_side(left: list[Piece], right: list[Piece]) -> bool:
    top, bottom = (
        max(min(p.top for p in s) for s in (left, right)),
        min(max(p.bottom for p in s) for s in (left, right)),
    )
    return bottom > top


def _by_rows(pieces: list[Piece]) -> list[Piece]:
    """Sort pieces from top to bottom. Those on one line are joined from left to right, with two spaces between them."""
    rows: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (_middle(p), p.x0)):
        row = rows[-1] if rows else None
        if row and not piece.is_table and not row[0].is_table and _on_one_line(row[0], piece):
            row.append(piece)
        else:
            rows.append([piece])
    return [_join(sorted(row, key=lambda p: p.x0)) for row in rows]


def _on_one_line(a: Piece, b: Piece) -> bool:
    return abs(_middle(a) - _middle(b)) < 0.4 * min(a.height, b.height)


def _join(row: list[Piece]) -> Piece:
    if len(row) == 1:
        return row[0]
    return Piece(
        "  ".join(p.text for p in row),
        row[0].x0,
        max(p.x1 for p in row),
        min(p.top for p in row),
        max(p.bottom for p in row),
        row[0].size,
        all(p.bold for p in row),
    )


def _middle(piece: Piece) -> float:
    return (piece.top + piece.bottom) / 2


MIN_PATHS = 3
MAX_PATHS = 5_000
"""A page with more paths is a drawing or a map."""
MIN_FILLED_SHARE = 0.4
"""Least share of a table's cells with text; with fewer it is a frame or a chart."""


@dataclass(slots=True)
class Tables:
    """Finds the tables of one document within limits of cells and time."""

    data: bytes
    cells: int
    seconds: float
    unsearched: int = 0
    """Pages that were not searched because a limit was reached."""
    _used_seconds: float = 0.0
    _plumber: PDF | None = field(default=None)

    def replace(self, page: pypdfium2.PdfPage, number: int, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, with those in a table replaced by one piece of Markdown. number: the page's, from 0."""
        if not pieces or not _may_have_tables(page):
            return list(pieces)
        if self._used_seconds > self.seconds or self.cells <= 0:
            self.unsearched += 1
            return list(pieces)
        started = time.process_time()
        try:
            tables = self._find(number)
        finally:
            self._used_seconds += time.process_time() - started
        rest = list(pieces)
        for table in tables:
            inside = [p for p in rest if _within(p, table)]
            if inside:
                rest = [p for p in rest if not _within(p, table)]
                rest.append(table)
        return rest

    def _find(self, number: int) -> list[Piece]:
        if self._plumber is None:
            self._plumber = pdfplumber.open(BytesIO(self.data))
        page = self._plumber.pages[number]
        left, top = page.bbox[0], page.bbox[1]
        tables: list[Piece] = []
        try:
            for table in page.find_tables():
                rows = table.extract()
                filled = sum(bool(cell and cell.strip()) for row in rows for cell in row)
                size = sum(len(row) for row in rows)
                if len(rows) < 2 or max(map(len, rows)) < 2 or filled < MIN_FILLED_SHARE * size:
                    continue
                self.cells -= size
                if text := markdown.table(rows):
                    x0, y0, x1, y1 = table.bbox
                    tables.append(Piece(text, x0 - left, x1 - left, y0 - top, y1 - top, 0.0, is_table=True))
        finally:
            page.close()
        return tables


def _may_have_tables(page: pypdfium2.PdfPage) -> bool:
    count = raw.FPDFPage_CountObjects(page.raw)
    if count < MIN_PATHS:
        return False
    paths = 0
    for n in range(min(count, 10 * MAX_PATHS)):
        paths += raw.FPDFPageObj_GetType(raw.FPDFPage_GetObject(page.raw, n)) == raw.FPDF_PAGEOBJ_PATH
    return MIN_PATHS <= paths <= MAX_PATHS


def _within(piece: Piece, table: Piece) -> bool:
    x, y = (piece.x0 + piece.x1) / 2, (piece.top + piece.bottom) / 2
    return not piece.is_table and table.x0 - 1 <= x <= table.x1 + 1 and table.top - 1 <= y <= table.bottom + 1
