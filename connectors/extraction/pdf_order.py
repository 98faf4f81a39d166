"""In which order the pieces of a page are read. Pure.

Columns are read one after the other; what spans them (a title, a wide table) ends the columns above it. Short pieces
side by side are no columns but a row (a form, a list without lines), and are read across.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from connectors.extraction.pdf_lines import Piece

MIN_LINES = 4
"""A column has at least as many."""
MIN_CHARS = 18
"""In the median line of a column: shorter ones are cells."""
MIN_GUTTER = 6.0
"""Points between two columns; newspapers have about 12."""
MAX_SPANNING = 0.3
"""Of the pieces may cross a gutter: titles, wide figures."""
_MAX_DEPTH = 6


def in_reading_order(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Flows, one after the other: each a column's (or the page's) lines from top to bottom."""
    return [flow for flow in _flows(list(pieces), 0) if flow]


def _flows(pieces: list[Piece], depth: int) -> list[list[Piece]]:
    gutter = _gutter(pieces) if depth < _MAX_DEPTH else None
    if gutter is None:
        return [_by_rows(pieces)]
    spanning = sorted((p for p in pieces if p.x0 < gutter < p.x1), key=lambda p: p.top)
    rest = [p for p in pieces if not p.x0 < gutter < p.x1]
    flows: list[list[Piece]] = []
    for one in spanning:
        above = [p for p in rest if _middle(p) < _middle(one)]
        rest = [p for p in rest if _middle(p) >= _middle(one)]
        flows += _columns(above, gutter, depth)
        if flows and above == [] and flows[-1] and flows[-1][-1] in spanning:
            flows[-1].append(one)  # two spanning lines in a row are one flow
        else:
            flows.append([one])
    return flows + _columns(rest, gutter, depth)


def _columns(pieces: list[Piece], gutter: float, depth: int) -> list[list[Piece]]:
    if not pieces:
        return []
    left = [p for p in pieces if p.x1 <= gutter]
    right = [p for p in pieces if p.x1 > gutter]
    return [*_flows(left, depth + 1), *_flows(right, depth + 1)]


def _gutter(pieces: list[Piece]) -> float | None:
    """The middle of the emptiest upright strip with columns on both of its sides."""
    lines = [p for p in pieces if not p.is_table]
    if len(lines) < 2 * MIN_LINES:
        return None
    best: tuple[int, float] | None = None
    for start, end in _gaps(lines):
        middle = (start + end) / 2
        crossing = sum(p.x0 < middle < p.x1 for p in pieces)
        left = [p for p in lines if p.x1 <= middle]
        right = [p for p in lines if p.x0 >= middle]
        if crossing > MAX_SPANNING * len(pieces) or not (_is_column(left) and _is_column(right)):
            continue
        if not _side_by_side(left, right):
            continue
        if best is None or crossing < best[0]:
            best = crossing, middle
    return best[1] if best else None


def _gaps(lines: list[Piece]) -> list[tuple[float, float]]:
    """Strips in which few lines lie, between the left edges of many."""
    found = []
    edges = sorted({round(p.x0) for p in lines})
    for edge in edges[1:]:
        behind = [p for p in lines if p.x0 >= edge - 2]
        before = [p.x1 for p in lines if p.x1 <= edge - MIN_GUTTER + 2]
        if len(behind) >= MIN_LINES and len(before) >= MIN_LINES:
            found.append((max(before), min(p.x0 for p in behind)))
        if len(found) >= 40:
            break
    return [(start, end) for start, end in found if end - start >= MIN_GUTTER]


def _is_column(lines: list[Piece]) -> bool:
    return len(lines) >= MIN_LINES and median(len(p.text) for p in lines) >= MIN_CHARS


def _side_by_side(left: list[Piece], right: list[Piece]) -> bool:
    top, bottom = (
        max(min(p.top for p in s) for s in (left, right)),
        min(max(p.bottom for p in s) for s in (left, right)),
    )
    return bottom > top


def _by_rows(pieces: list[Piece]) -> list[Piece]:
    """From top to bottom; pieces on one line from left to right, joined by a tab's worth of space."""
    rows: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (_middle(p), p.x0)):
        row = rows[-1] if rows else None
        if row and not piece.is_table and not row[0].is_table and _on_one_line(row[0], piece):
            row.append(piece)
        else:
            rows.append([piece])
    return [_joined(sorted(row, key=lambda p: p.x0)) for row in rows]


def _on_one_line(a: Piece, b: Piece) -> bool:
    return abs(_middle(a) - _middle(b)) < 0.4 * min(a.height, b.height)


def _joined(row: list[Piece]) -> Piece:
    if len(row) == 1:
        return row[0]
    return Piece(
        "  ".join(p.text for p in row), row[0].x0, max(p.x1 for p in row), min(p.top for p in row),
        max(p.bottom for p in row), row[0].size, all(p.bold for p in row),
    )  # fmt: skip


def _middle(piece: Piece) -> float:
    return (piece.top + piece.bottom) / 2
