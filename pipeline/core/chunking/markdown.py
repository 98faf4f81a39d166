"""Markdown blocks (CommonMark and tables) by markdown-it's block parser; inline markup is never looked at."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipeline.core.chunking.units import BOUND_LINE, GLUE, HEADING, LINE, PARAGRAPH, SECTION, Block, heading_path
from pipeline.core.model import Span

_FRONT_MATTER = re.compile(r"\A(?:---\n(?:.*\n)*?(?:---|\.\.\.)|\+\+\+\n(?:.*\n)*?\+\+\+)[ \t]*(?:\n|\Z)")
_TRAILING_MARKS = re.compile(r"\s*(?:\{#[^}]*\}|#+)\s*$")
_LEAVES = {
    "paragraph_open": True,
    "html_block": True,
    "fence": False,
    "code_block": False,
    "hr": True,
}
"""Block token → whether it is running text."""

_parser = MarkdownIt("commonmark").enable("table")
_parser.core.ruler.enableOnly(["normalize", "block"])


def parse(text: str) -> list[Block]:
    front = _FRONT_MATTER.match(text)
    body = front.end() if front else 0
    blocks = [Block(0, SECTION, prose=False)] if body else []
    lines = [body, *(body + match.end() for match in re.finditer("\n", text[body:]))]
    if lines[-1] < len(text) or not blocks:
        lines.append(len(text))
    walk = _Walk(text, lines, blocks)
    for token in _parser.parse(text[body:]):
        walk.token(token)
    if not blocks or blocks[0].start:
        blocks.insert(0, Block(0, PARAGRAPH))
    return blocks if text else []


class _Walk:
    """Turns the token stream into blocks: a leaf begins one, a list item or quotation gives its first leaf its rank."""

    def __init__(self, text: str, lines: Sequence[int], blocks: list[Block]) -> None:
        self.text = text
        self.lines = lines
        self.blocks = blocks
        self.path: list[tuple[int, str]] = []
        self.headings: tuple[str, ...] = ()
        self.glue = False
        self.depth = 0
        self.table: Span | None = None

    def token(self, token: Token) -> None:
        kind = token.type
        if kind == "heading_open" and token.level == 0:
            self._heading(token)
        elif kind in ("list_item_open", "blockquote_open"):
            self.depth += 1
            self._begin(token, LINE, prose=True)
        elif kind in ("list_item_close", "blockquote_close"):
            self.depth -= 1
        elif kind == "table_open":
            self._table(token)
        elif kind == "tr_open" and self.table is not None:
            self._row(token)
        elif kind in _LEAVES or kind == "heading_open":
            rank = SECTION if kind == "hr" else LINE if self.depth or self._announced(token) else PARAGRAPH
            self._begin(token, rank, prose=_LEAVES.get(kind, True))

    def _begin(self, token: Token, rank: int, *, prose: bool, prefix: tuple[Span, ...] = ()) -> None:
        if token.map is None:
            return
        start = self.lines[token.map[0]]
        if self.glue:
            rank, self.glue = GLUE, False
        if self.blocks and self.blocks[-1].start >= start:  # the first leaf of a list item stands on the item's line
            if self.blocks[-1].start == start:
                self.blocks[-1] = self.blocks[-1]._replace(prose=prose, prefix=prefix)
            return
        self.blocks.append(Block(start, rank, prose, self.headings, prefix))

    def _announced(self, token: Token) -> bool:
        """Whether the text before ends with a colon: code or a table that it announces had better follow at once."""
        start = self.lines[token.map[0]] if token.map else 0
        return token.type != "paragraph_open" and self.text[max(0, start - 40) : start].rstrip().endswith(":")

    def _heading(self, token: Token) -> None:
        if token.map is None:
            return
        level = int(token.tag[1])
        start, end = self.lines[token.map[0]], self.lines[token.map[1]]
        title = self.text[start : min(end, start + 1000)].strip()
        title = title.lstrip("#") if token.markup.startswith("#") else title.rpartition("\n")[0]
        self.path = [item for item in self.path if item[0] < level]
        self.path.append((level, _TRAILING_MARKS.sub("", title)))
        self.headings = heading_path(name for _, name in self.path)
        glued = self.glue
        self._begin(token, HEADING + level - 1, prose=True)
        self.glue = True
        if glued and self.blocks[-1].start == start:
            self.blocks[-1] = self.blocks[-1]._replace(headings=self.headings)

    def _table(self, token: Token) -> None:
        if token.map is None:
            return
        first = token.map[0]
        self.table = (self.lines[first], self.lines[min(first + 2, len(self.lines) - 1)])
        self._begin(token, LINE if self.depth or self._announced(token) else PARAGRAPH, prose=False)

    def _row(self, token: Token) -> None:
        if token.map is None or self.table is None or self.lines[token.map[0]] < self.table[1]:
            return
        first_row = self.lines[token.map[0]] == self.table[1]
        self._begin(token, GLUE if first_row else BOUND_LINE, prose=False, prefix=(self.table,))
