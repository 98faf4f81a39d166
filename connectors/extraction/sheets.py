"""Converts XLSX to Markdown: a heading and a table for each visible sheet, with the saved values of formulas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import IO, Any

import openpyxl

from connectors.extraction import markdown
from connectors.extraction.limits import Limits
from connectors.extraction.result import Extracted

CUT_OFF = "(The rest of this workbook is left out: it is longer than what is indexed.)"
MAX_COLUMNS = 16_384
"""Excel's limit (support.microsoft.com, "Excel specifications and limits")."""
MAX_CELL = 2**18
"""The most characters that are read of a cell, eight times as many as Excel allows. One of 4 MiB would otherwise take
the place of all that follows it."""


def read_sheets(file: IO[bytes], limits: Limits) -> Extracted:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about what it does not read, such as validation and print settings: it is not shown
        book = openpyxl.load_workbook(file, read_only=True, data_only=True, keep_links=False)
        properties = book.properties
        visible = [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"]
        cap = _Cap(limits.cells, limits.text_bytes - 1_000)
        blocks = []
        for sheet in visible:
            sheet.reset_dimensions()  # the dimensions that the file states may be wrong
            if table := markdown.table(list(cap.rows(sheet.iter_rows(values_only=True)))):
                blocks += [markdown.heading(2, sheet.title), table]
            if cap.reached:
                blocks.append(CUT_OFF)
                break
    metadata: dict[str, str | int | float | bool] = {"sheets": len(book.worksheets)}
    if len(visible) < len(book.worksheets):
        metadata["hidden_sheets"] = len(book.worksheets) - len(visible)
    if cap.reached or cap.shortened:
        metadata["truncated"] = True
    text = "\n\n".join(blocks) + "\n" if blocks else ""
    author = (properties.creator or "").strip()
    return Extracted(
        text,
        "text/markdown",
        (properties.title or "").strip() or None,
        author if author != "openpyxl" else None,
        metadata,
    )


class _Cap:
    """Limits the cells and bytes that are read from all sheets together."""

    def __init__(self, cells: int, text_bytes: int) -> None:
        self._cells, self._bytes = cells, text_bytes
        self.reached = False
        self.shortened = False
        """Whether a cell had more than MAX_CELL characters."""

    def rows(self, rows: Iterator[Sequence[Any]]) -> Iterator[list[str]]:
        """Yield rows that are not empty, until a limit is reached."""
        for row in rows:
            values = [self._shorter(_cell_text(value)) for value in row[:MAX_COLUMNS]]
            while values and not values[-1]:
                values.pop()
            if not values:
                continue
            self._cells -= len(values)
            self._bytes -= sum(len(markdown.cell(value).encode("utf-8", "replace")) + 3 for value in values) + 8
            if self._cells < 0 or self._bytes < 0:
                self.reached = True
                return
            yield values

    def _shorter(self, value: str) -> str:
        if len(value) <= MAX_CELL:
            return value
        self.shortened = True
        return value[:MAX_CELL]


def _cell_text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "TRUE" if value else "FALSE"
        case float():
            return format(value, ".15g")  # as many digits as Excel has
        case datetime():
            return value.isoformat(" ") if value.time() != time() else value.date().isoformat()
        case date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case _:
            return str(value)
