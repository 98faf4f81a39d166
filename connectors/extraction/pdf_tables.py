"""Tables with lines around their cells, by pdfplumber: slow, so only where a page has lines, and only for so long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO

import pdfplumber
import pypdfium2
from pdfplumber.pdf import PDF
from pypdfium2 import raw

from connectors.extraction import markdown
from connectors.extraction.pdf_lines import Piece

MIN_PATHS = 3
MAX_PATHS = 5_000
"""A page with more is a drawing or a map."""
MIN_FILLED = 0.4
"""Of the cells hold text: fewer, and it is a frame or a chart."""


@dataclass(slots=True)
class Tables:
    """Of one document."""

    data: bytes
    cells: int
    seconds: float
    unsearched: int = 0
    """Pages that were not searched any more."""
    _used: float = 0.0
    _plumber: PDF | None = field(default=None)

    def replace(self, page: pypdfium2.PdfPage, number: int, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces, those within a table taken together into one that is Markdown. number: from 0."""
        if not pieces or not _may_have_tables(page):
            return list(pieces)
        if self._used > self.seconds or self.cells <= 0:
            self.unsearched += 1
            return list(pieces)
        started = time.process_time()
        try:
            found = self._find(number)
        finally:
            self._used += time.process_time() - started
        rest = list(pieces)
        for table in found:
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
                if len(rows) < 2 or max(map(len, rows)) < 2 or filled < MIN_FILLED * size:
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
