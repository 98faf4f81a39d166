"""Writes text, headings and tables as Markdown, with everything escaped that would mean something else."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOOKS_LIKE_MARKUP = re.compile(r"^( {0,3})(#{1,6}(?=\s|$)|`{3,}|~{3,}|>)", re.M)
_SPACES = re.compile(r"[ \t\u00a0]+")
MAX_HEADING_CHARACTERS = 300


def text(lines: str) -> str:
    """Escape lines that would become a heading, a quotation or a fence by the way they begin."""
    return _LOOKS_LIKE_MARKUP.sub(r"\1\\\2", lines)


def heading(level: int, words: str) -> str:
    """Return a heading, or "" if there are no words. level: 1 to 6; other levels are clamped."""
    line = " ".join(words.split())[:MAX_HEADING_CHARACTERS]
    return f"{'#' * min(max(level, 1), 6)} {line}" if line else ""


def cell(words: object) -> str:
    """Return a cell's text on one line, with its bars escaped."""
    line = _SPACES.sub(" ", "" if words is None else str(words)).strip()
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose header is the first row, without its empty rows and columns; "" if nothing is left."""
    cells = [[cell(value) for value in row] for row in rows]
    width = max((len(row) for row in cells), default=0)
    cells = [row + [""] * (width - len(row)) for row in cells if any(row)]
    used = [n for n in range(width) if any(row[n] for row in cells)]
    if not used:
        return ""
    lines = ["| " + " | ".join(row[n] for n in used) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(used), *lines[1:]])
