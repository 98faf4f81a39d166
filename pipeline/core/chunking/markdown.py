"""Markdown blocks (CommonMark and tables): the plainest by a pattern, all others by markdown-it's block parser.

Inline markup is never looked at. Headings, paragraphs, simple lists and tables, fences at the margin are most of a
text, and a pattern finds them many times as fast. Whatever else comes (a quotation, HTML, an underlined title …) is
read by markdown-it, up to the next place where a plain block begins after a blank line: that closes whatever was open.
(A mark put there proves it.) The blocks are those that markdown-it finds in the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pipeline.core.chunking.units import BOUND_LINE, GLUE, HEADING, LINE, PARAGRAPH, SECTION, Block, heading_path
from pipeline.core.model import Span

_FRONT_MATTER = re.compile(r"\A(?:---\n(?:.*\n)*?(?:---|\.\.\.)|\+\+\+\n(?:.*\n)*?\+\+\+)[ \t]*(?:\n|\Z)")
_LEAVES = {
    "paragraph_open": True,
    "html_block": True,
    "fence": False,
    "code_block": False,
    "hr": True,
}
"""Block token → whether it is running text."""

_WORD = (
    r"(?:[A-Za-z(\"'!\u00c0-\U0010ffff]|[0-9]++(?![.)])|`{1,2}(?!`)|\*{1,2}(?=[^\s*])|_{1,2}(?=[^\s_])"
    r"|\[(?:[ xX]\] |[^\[\]\\\n]*\]\())"
)
"""How a line begins that can be nothing but text: it opens no block, underlines none, and defines no reference."""
_TEXT = rf"{_WORD}.*+(?:\n[ \t]*{_WORD}.*+)*+"


def _items(digits: int, nested: str) -> str:
    """A list whose items at the margin have numbers of that many digits, and whose others begin as ``nested`` says."""
    mark = rf"[-*+]|[0-9]{{1,{digits}}}[.)]"
    return rf"(?:{mark}) {_TEXT}(?:\n(?:[ \t]*\n)*+(?:{mark}|{nested}) {_TEXT})*+"


_LIST = rf"(?:{_items(2, r'(?:  ){1,2}[-*+]')}|{_items(9, r' {1,3}(?:[-*+]|1[.)])')})"
"""A number other than 1 does not begin a list under an item's text, and what stands four columns in begins none where
the text of the item before stands further in still: such lists are the parser's."""
_PLAIN = re.compile(
    r"(?:[ \t]*\n)*+(?:"
    r"(?P<heading>(?P<marks>#{1,6})(?:[ \t][^|\n]*)?(?:\n|\Z))"
    rf"|(?P<paragraph>{_TEXT}(?:\n(?=[ \t]*(?:\n|\Z)|[-*+] {_WORD})|\Z))"
    rf"|(?P<list>{_LIST}(?=(?:\n[ \t]*)*+\Z|(?:\n[ \t]*)+\n[^ \t\n]))"
    r"|(?P<table>\|[^\\\n]*\|\n\|(?: *:?-+:? *\|)+\n(?:\|[^\\\n]*\|(?:\n|\Z))*+(?=[ \t]*(?:\n|\Z)))"
    r"|(?P<fence>(?P<ticks>`{3,})[^`|\n]*\n(?:.*\n)*? {0,3}(?P=ticks)`*[ \t]*(?:\n|\Z))"
    r"|\Z)"
)
"""Blocks that need no parser. A list ends with a line at the margin after a blank one: nothing further is in it."""
_ITEM_START = re.compile(r"^ *(?:[-*+]|[0-9]{1,9}[.)]) ", re.MULTILINE)
_LINE_END = re.compile("\n")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)++")
_PLAIN_START = re.compile(rf"{_WORD}|#{{1,6}}[ \t]")

_parser = MarkdownIt("commonmark").enable("table")
_parser.core.ruler.enableOnly(["normalize", "block"])


def parse(text: str) -> list[Block]:
    front = _FRONT_MATTER.match(text)
    place = front.end() if front else 0
    walk = _Walk(text, [Block(0, SECTION, prose=False)] if front else [])
    while place < len(text):
        plain = _PLAIN.match(text, place)
        place = plain.end() if plain is not None and walk.plain(plain) else walk.difficult(place)
    blocks = walk.blocks
    if not blocks or blocks[0].start:
        blocks.insert(0, Block(0, PARAGRAPH))
    return blocks if text else []


class _Walk:
    """Collects blocks: a leaf begins one, a list item or quotation gives its first leaf its rank."""

    def __init__(self, text: str, blocks: list[Block]) -> None:
        self.text = text
        self.blocks = blocks
        self.lines: Sequence[int] = ()
        """Where the lines begin that markdown-it counts."""
        self.path: list[tuple[int, str]] = []
        self.headings: tuple[str, ...] = ()
        self.glue = False
        self.depth = 0
        self.table: Span | None = None

    def plain(self, match: re.Match[str]) -> bool:
        """Take a block that a pattern found; False for a table that needs the parser."""
        kind = match.lastgroup
        start = match.start(kind) if kind else match.end()
        if kind == "paragraph":
            self._begin(start, PARAGRAPH, prose=True)
        elif kind == "heading":
            self._heading(start, match.end(), len(match["marks"]), underlined=False)
        elif kind == "list":
            for item in _ITEM_START.finditer(self.text, start, match.end()):
                self._begin(item.start(), LINE, prose=True)
        elif kind == "table":
            self.lines = [start, *(end.end() for end in _LINE_END.finditer(self.text, start, match.end()))]
            rows = match["table"].rstrip("\n").split("\n")
            if any(row.count("|") != rows[0].count("|") for row in rows):
                return False
            self._table(start, 0)
            for row in range(2, len(rows)):
                self._row(self.lines[row])
        elif kind == "fence":
            self._begin(start, LINE if self._announced(start) else PARAGRAPH, prose=False)
        return True

    def difficult(self, start: int) -> int:
        """Read on with markdown-it; returns where the next plain block begins, or the end of the text."""
        # Two patterns, so that a long run of blank lines is tried once and not from each of its lines.
        ends = (gap.end() for gap in _BLANK_LINES.finditer(self.text, start))
        following = next((end for end in ends if _PLAIN_START.match(self.text, end)), None)
        if following is not None and self._read(start, following, "x"):
            return following
        self._read(start, len(self.text), "")
        return len(self.text)

    def _read(self, start: int, end: int, mark: str) -> bool:
        """Take the blocks of a part of the text, unless a mark set at its end does not become a paragraph of its own
        (an open fence or comment swallows it)."""
        self.lines = [start, *(match.end() for match in _LINE_END.finditer(self.text, start, end))]
        if self.lines[-1] < end:
            self.lines.append(end)
        tokens = _parser.parse(self.text[start:end] + mark)
        if mark:
            line = len(self.lines) - 1
            if not any(t.type == "paragraph_open" and t.level == 0 and t.map == [line, line + 1] for t in tokens[-3:]):
                return False
            del tokens[-3:]
        for token in tokens:
            if token.map is not None:
                self._open(token, *token.map)
            elif token.type in ("list_item_close", "blockquote_close"):
                self.depth -= 1
        return True

    def _open(self, token: Token, row: int, after: int) -> None:
        kind, start = token.type, self.lines[row]
        if kind == "heading_open" and token.level == 0:
            self._heading(start, self.lines[after], int(token.tag[1]), underlined=not token.markup.startswith("#"))
        elif kind in ("list_item_open", "blockquote_open"):
            self.depth += 1
            self._begin(start, LINE, prose=True)
        elif kind == "table_open":
            self._table(start, row)
        elif kind == "tr_open":
            self._row(start)
        elif kind in _LEAVES or kind == "heading_open":
            announced = kind != "paragraph_open" and self._announced(start)
            rank = SECTION if kind == "hr" else LINE if self.depth or announced else PARAGRAPH
            self._begin(start, rank, prose=_LEAVES.get(kind, True))

    def _begin(self, start: int, rank: int, *, prose: bool, prefix: tuple[Span, ...] = ()) -> None:
        if self.glue:
            rank, self.glue = GLUE, False
        if self.blocks and self.blocks[-1].start >= start:  # the first leaf of a list item stands on the item's line
            if self.blocks[-1].start == start:
                self.blocks[-1] = self.blocks[-1]._replace(prose=prose, prefix=prefix)
            return
        self.blocks.append(Block(start, rank, prose, self.headings, prefix))

    def _announced(self, start: int) -> bool:
        """Whether the text before ends with a colon: code or a table that it announces had better follow at once."""
        return self.text[max(0, start - 40) : start].rstrip().endswith(":")

    def _heading(self, start: int, end: int, level: int, *, underlined: bool) -> None:
        title = self.text[start : min(end, start + 1000)].strip()
        title = title.rpartition("\n")[0] if underlined else title.lstrip("#")
        self.path = [item for item in self.path if item[0] < level]
        self.path.append((level, _without_trailing_marks(title)))
        self.headings = heading_path(name for _, name in self.path)
        glued = self.glue
        self._begin(start, HEADING + level - 1, prose=True)
        self.glue = True
        if glued and self.blocks[-1].start == start:
            self.blocks[-1] = self.blocks[-1]._replace(headings=self.headings)

    def _table(self, start: int, row: int) -> None:
        """row: the line of its header, before the line of dashes."""
        self.table = (start, self.lines[min(row + 2, len(self.lines) - 1)])
        self._begin(start, LINE if self.depth or self._announced(start) else PARAGRAPH, prose=False)

    def _row(self, start: int) -> None:
        if self.table is not None and start >= self.table[1]:
            self._begin(start, GLUE if start == self.table[1] else BOUND_LINE, prose=False, prefix=(self.table,))


def _without_trailing_marks(title: str) -> str:
    """The title without the ``#`` or ``{#id}`` at its end. A pattern would take time with the square of its length."""
    end = title.rstrip()
    if end.endswith("#"):
        return end.rstrip("#").rstrip()
    start = end.find("{#", end.rfind("}", 0, -1) + 1) if end.endswith("}") else -1
    return title if start < 0 else end[:start].rstrip()
