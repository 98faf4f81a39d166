"""Tables with merged cells → a full grid: a merged cell's text stands in every place that it covers, so that each row
can be read alone, as a chunk will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.confluence.storage import Element, name

MAX_SPAN, MAX_CELLS = 200, 20_000
"""Beyond that a span is somebody's mistake or attack, and counts as 1."""


@dataclass(frozen=True, slots=True)
class Cell:
    html: str
    header: bool


Grid = Sequence[Sequence[Cell]]


def grid(table: Element, content: Callable[[Element], str]) -> Grid:
    """content: a cell's own HTML, inline."""
    rows: list[dict[int, Cell]] = []
    covered: dict[tuple[int, int], Cell] = {}
    cells = 0
    for y, row in enumerate(_rows(table)):
        placed: dict[int, Cell] = {}
        x = 0
        for element in row:
            if name(element) not in ("td", "th"):
                continue
            while (y, x) in covered:
                placed[x] = covered.pop((y, x))
                x += 1
            cell = Cell(content(element), name(element) == "th")
            width, height = _span(element, "colspan"), _span(element, "rowspan")
            if cells + width * height > MAX_CELLS:
                width = height = 1
            cells += width * height
            for dx in range(width):
                placed[x + dx] = cell
                for dy in range(1, height):
                    covered[(y + dy, x + dx)] = cell
            x += width
        placed |= {at: covered.pop((y, at)) for (row_y, at) in list(covered) if row_y == y}
        rows.append(placed)
    empty = Cell("", False)
    columns = max((max(row, default=-1) + 1 for row in rows), default=0)
    return [[row.get(x, empty) for x in range(columns)] for row in rows if row]


def to_html(cells: Grid) -> str:
    if not cells:
        return ""
    header = all(cell.header for cell in cells[0])
    rows = ["".join(_cell(cell, header and y == 0) for cell in row) for y, row in enumerate(cells)]
    head = f"<thead><tr>{rows.pop(0)}</tr></thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _cell(cell: Cell, head: bool) -> str:
    if head:
        return f"<th>{cell.html}</th>"
    return f"<td><strong>{cell.html}</strong></td>" if cell.header and cell.html.strip() else f"<td>{cell.html}</td>"


def _rows(table: Element) -> list[Element]:
    found = []
    for part in table:
        if name(part) == "tr":
            found.append(part)
        elif name(part) in ("thead", "tbody", "tfoot"):
            found += [row for row in part if name(row) == "tr"]
    return found


def _span(cell: Element, which: str) -> int:
    value = str(cell.get(which) or "1").strip()
    return min(int(value), MAX_SPAN) if value.isascii() and value.isdigit() and int(value) > 0 else 1
