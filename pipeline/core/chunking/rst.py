"""reStructuredText blocks by a line scanner: titles, directives, literal blocks, tables, lists.

docutils keeps no offsets; the block structure of reST is decided by indentation and blank lines, which a scanner sees.
"""

from __future__ import annotations

import re

from pipeline.core.chunking.units import BOUND_LINE, GLUE, HEADING, LINE, PARAGRAPH, Block, heading_path
from pipeline.core.model import Span

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1*\s*")
_ITEM = re.compile(r"\s*(?:[-*+•]|#\.|\(?(?:\d{1,3}|[a-zA-Z]|[ivxlc]+)[.)]|:[^:\n]+:|\|)\s")
_CODE_DIRECTIVE = re.compile(
    r"\s*\.\. (?:code|code-block|sourcecode|parsed-literal|literalinclude|math|raw|highlight|csv-table|testcode|doctest"
    r"|productionlist|graphviz)::"
)
_SIMPLE_BORDER = re.compile(r"\s*=+(?: +=+)+\s*")
_GRID_BORDER = re.compile(r"\s*\+(?:[-=]+\+)+\s*")


def parse(text: str) -> list[Block]:
    return _Scan(text).blocks if text else []


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.lines = text.split("\n")
        self.blocks: list[Block] = []
        self.styles: list[tuple[str, bool]] = []
        """Adornments in the order of their first use: that is what a title's level means in reST."""
        self.path: list[tuple[int, str]] = []
        self.headings: tuple[str, ...] = ()
        self.glue = False
        self._run()

    def _run(self) -> None:
        row = 0
        while row < len(self.lines):
            if not self.lines[row].strip():
                row += 1
            else:
                row = self._title(row) or self._table(row) or self._literal(row) or self._paragraph(row)
        if not self.blocks:
            self.blocks.append(Block(0, PARAGRAPH))
        elif self.blocks[0].start:
            self.blocks[0] = self.blocks[0]._replace(start=0)

    def _begin(self, row: int, rank: int, *, prose: bool, prefix: tuple[Span, ...] = ()) -> None:
        if self.glue:
            rank, self.glue = GLUE, False
        self.blocks.append(Block(self.starts[row], rank, prose, self.headings, prefix))

    def _line(self, row: int) -> str:
        return self.lines[row] if row < len(self.lines) else ""

    def _title(self, row: int) -> int | None:
        """A title with its underline, or between two lines. Returns the row after it."""
        over = _adornment(self.lines[row])
        if over and len(over) >= 3 and over == _adornment(self._line(row + 2)) and self._line(row + 1).strip():
            style, title, after = (over[0], True), self._line(row + 1), row + 3
        else:
            title, under = self.lines[row], _adornment(self._line(row + 1))
            if over or not under or title[:1].isspace() or len(under) < min(len(title.rstrip()), 4):
                return None
            style, after = (under[0], False), row + 2
        if style not in self.styles:
            self.styles.append(style)
        level = min(self.styles.index(style) + 1, 6)
        self.path = [*(item for item in self.path if item[0] < level), (level, title)]
        self.headings = heading_path(name for _, name in self.path)
        self._begin(row, HEADING + level - 1, prose=True)
        self.glue = True
        return after

    def _table(self, row: int) -> int | None:
        line = self.lines[row]
        if _GRID_BORDER.fullmatch(line):
            end = self._until_blank(row)
            header = next(
                (r + 1 for r in range(row + 1, end) if "=" in self.lines[r] and _GRID_BORDER.fullmatch(self.lines[r])),
                row,
            )
            rows = [r + 1 for r in range(max(header, row + 1), end - 1) if _GRID_BORDER.fullmatch(self.lines[r])]
            rows = [header, *rows] if header > row else rows
        elif _SIMPLE_BORDER.fullmatch(line):
            borders = [row]
            end = row + 1
            while end < len(self.lines) and len(borders) < 3:  # blank lines may stand between its rows
                if _SIMPLE_BORDER.fullmatch(self.lines[end]):
                    borders.append(end)
                    if not self._line(end + 1).strip():
                        end += 1
                        break
                end += 1
            else:
                end = self._until_blank(row) if len(borders) < 2 else end
            header = borders[1] + 1 if len(borders) > 2 else row
            rows = [
                r
                for r in range(header, end - 1)
                if self.lines[r].strip() and (r == header or not self.lines[r][:1].isspace())
            ]
        else:
            return None
        prefix: tuple[Span, ...] = ((self.starts[row], self.starts[header]),) if header > row else ()
        self._begin(row, self._rank(row), prose=False)
        for index, at in enumerate(rows):
            if row < at < end:
                self._begin(at, GLUE if index == 0 and prefix else BOUND_LINE, prose=False, prefix=prefix)
        return end

    def _literal(self, row: int) -> int | None:
        """A directive whose body is code, or a doctest. (A block announced by ``::`` is met in _paragraph.)"""
        if _CODE_DIRECTIVE.match(self.lines[row]):
            self._begin(row, self._rank(row), prose=False)
            return self._while_indented(row + 1, _indent(self.lines[row]))
        if self.lines[row].lstrip().startswith(">>> "):
            self._begin(row, self._rank(row), prose=False)
            return self._until_blank(row)
        return None

    def _paragraph(self, row: int) -> int:
        """Lines up to the next blank line or list item, and the literal block that it may announce."""
        end = row + 1
        while end < len(self.lines) and self.lines[end].strip() and not _ITEM.match(self.lines[end]):
            if (
                _adornment(self._line(end + 1))
                and not _adornment(self.lines[end])
                and not self.lines[end][:1].isspace()
            ):
                break
            end += 1
        is_item = bool(_ITEM.match(self.lines[row])) or self.lines[row][:1].isspace()
        self._begin(row, LINE if is_item else PARAGRAPH, prose=True)
        last = self.lines[end - 1].rstrip()
        if not last.endswith("::") or last.lstrip().startswith(".. "):
            return end
        literal = end
        while literal < len(self.lines) and not self.lines[literal].strip():
            literal += 1
        indent = _indent(self.lines[row])
        after = self._while_indented(literal, indent)
        if after > literal:
            self._begin(literal, LINE, prose=False)
            return after
        return end

    def _rank(self, row: int) -> int:
        before = self.text[max(0, self.starts[row] - 40) : self.starts[row]].rstrip()
        return LINE if before.endswith(":") or self.lines[row][:1].isspace() else PARAGRAPH

    def _until_blank(self, row: int) -> int:
        while row < len(self.lines) and self.lines[row].strip():
            row += 1
        return row

    def _while_indented(self, row: int, indent: int) -> int:
        """The row after the lines that are indented more than ``indent`` (blank lines at the end left out)."""
        end = row
        while row < len(self.lines) and (not self.lines[row].strip() or _indent(self.lines[row]) > indent):
            row += 1
            if self.lines[row - 1].strip():
                end = row
        return end


def _adornment(line: str) -> str:
    """The line if it is nothing but one punctuation character repeated, else ""."""
    return line.rstrip() if _ADORNMENT.fullmatch(line) else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
