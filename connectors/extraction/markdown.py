"""Text, headings and tables as Markdown that says just that."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOOKS_LIKE_MARKUP = re.compile(r"^( {0,3})(#{1,6}(?=\s|$)|`{3,}|~{3,}|>)", re.M)
_SPACES = re.compile(r"[ \t\u00a0]+")
MAX_HEADING = 300


def text(lines: str) -> str:
    """Lines that do not turn into a heading, a quotation or a fence by the way they begin."""
    return _LOOKS_LIKE_MARKUP.sub(r"\1\\\2", lines)


def heading(level: int, words: str) -> str:
    """ "" without words. level: 1 to 6, others are brought in."""
    line = " ".join(words.split())[:MAX_HEADING]
    return f"{'#' * min(max(level, 1), 6)} {line}" if line else ""


def cell(words: object) -> str:
    """On one line, and no bar in it ends the cell."""
    line = _SPACES.sub(" ", "" if words is None else str(words)).strip()
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


def table(rows: Sequence[Sequence[object]]) -> str:
    """The first row is the header. Rows and columns without anything in them are left out; "" if that is all."""
    cells = [[cell(one) for one in row] for row in rows]
    width = max((len(row) for row in cells), default=0)
    cells = [row + [""] * (width - len(row)) for row in cells if any(row)]
    used = [n for n in range(width) if any(row[n] for row in cells)]
    if not used:
        return ""
    lines = ["| " + " | ".join(row[n] for n in used) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(used), *lines[1:]])
