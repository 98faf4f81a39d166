"""Pieces of generated Markdown. They are written for pages in docs/reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from inspect import cleandoc


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing where there are no rows. Cells are Markdown; line breaks in them become spaces."""
    cells = [[re.sub(r"\s*\n\s*", " ", cell).replace("|", r"\|") for cell in row] for row in rows]
    if not cells:
        return ""
    lines = [list(head), ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def code(value: str) -> str:
    """Inline code, also of what contains backticks."""
    fence = "`" * (max(map(len, re.findall(r"`+", value)), default=0) + 1)
    return f"{fence} {value} {fence}" if "`" in value else f"{fence}{value}{fence}"


def prose(text: str) -> str:
    """A docstring as Markdown: its paragraphs, with links to the pages of docs/ that it names."""
    joined = re.sub(r"(?<!\n)\n(?![\n -])", " ", cleandoc(text))
    return re.sub(r"(?<![\w/])docs/([\w/-]+\.md)", r"[\1](../\1)", joined)
