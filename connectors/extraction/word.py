"""Converts DOCX to Markdown: headings, lists, tables and footnotes, in the order of the text.

Left out are headers and footers, which are the same on every page, comments, text that tracked changes delete, hidden
text, and the table of contents, which only repeats the headings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

import docx
from docx.opc.constants import RELATIONSHIP_TYPE
from docx.oxml import parse_xml
from docx.oxml.ns import qn

from connectors.extraction import markdown
from connectors.extraction.limits import Limits
from connectors.extraction.result import Extracted, Unreadable

_SKIPPED = frozenset(
    qn(name)
    for name in (
        "w:del",
        "w:moveFrom",
        "w:rPr",
        "w:pPr",
        "w:instrText",
        "w:delText",
        "w:footnotePr",
        "w:sdtPr",
        "w:commentReference",
        "w:annotationRef",
    )
) | {"{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
"""Elements without text of their own. Fallback repeats, for old programs, what the Choice next to it says."""
_BREAKS = {qn("w:tab"): "\t", qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:noBreakHyphen"): "-"}
_P, _TBL, _R, _T = qn("w:p"), qn("w:tbl"), qn("w:r"), qn("w:t")
_HEADING = re.compile(r"heading (\d)", re.I)
_OFF = frozenset({"0", "false", "off"})
MAX_BASES = 50
"""Styles of ordinary documents are based on three others."""
_BODY_LEVEL = 9
"""``w:outlineLvl`` of ordinary text (ECMA-376 Part 1, 17.3.1.20)."""


def read_word(file: IO[bytes], limits: Limits) -> Extracted:
    try:
        document = docx.Document(file)
    except ValueError as error:  # python-docx knows the main type only
        raise Unreadable("unsupported", "is a Word file with macros or a template: save it as .docx") from error
    reader = _Reader(document, limits)
    blocks = [*reader.blocks(document.element.body), *reader.footnotes()]
    core = document.core_properties
    title = (core.title or "").strip() or reader.first_title
    metadata: dict[str, str | int | float | bool] = {"truncated": True} if reader.truncated else {}
    text = "\n\n".join(blocks) + "\n" if blocks else ""
    return Extracted(text, "text/markdown", title, (core.author or "").strip() or None, metadata)


class _Reader:
    def __init__(self, document: Any, limits: Limits) -> None:
        self._document = document
        # Where there are none, the library opens a file of its own, and a reading process may open none.
        has_styles = any(relation.reltype == RELATIONSHIP_TYPE.STYLES for relation in document.part.rels.values())
        self._styles = {style.style_id: style for style in document.styles} if has_styles else {}
        self._bases: dict[str, Sequence[Any]] = {}
        self._hidden: dict[str, bool] = {}
        self._numbering = _numbering(document)
        self._cells = limits.cells
        self.first_title: str | None = None
        self.truncated = False

    def blocks(self, parent: Any) -> Iterator[str]:
        """Yield Markdown blocks; the items of a list are one block."""
        items: list[str] = []
        for element in self._block_elements(parent):
            if element.tag == _TBL:
                block, item = self._table(element), False
            else:
                block, item = self._paragraph(element)
            if item:
                items.append(block)
            elif block:
                if items:
                    yield "\n".join(items)
                    items = []
                yield block
        if items:
            yield "\n".join(items)

    def footnotes(self) -> Iterator[str]:
        for relation in self._document.part.rels.values():
            if not relation.is_external and relation.reltype.endswith(("/footnotes", "/endnotes")):
                root = parse_xml(relation.target_part.blob)
                for note in root:
                    if note.get(qn("w:type")) is None and (words := self._inline(note)):
                        yield f"[^{note.get(qn('w:id'))}]: {' '.join(words.split())}"

    def _block_elements(self, parent: Any) -> Iterator[Any]:
        """Yield paragraphs and tables, also those within content controls or other elements."""
        stack = [iter(parent)]
        while stack:
            for element in stack[-1]:
                if element.tag in (_P, _TBL):
                    yield element
                elif isinstance(element.tag, str) and element.tag not in _SKIPPED:
                    stack.append(iter(element))
                    break
            else:
                stack.pop()

    def _paragraph(self, element: Any) -> tuple[str, bool]:
        """Return a paragraph's Markdown, and whether it is an item of a list."""
        properties = element.pPr
        style = self._style(properties)
        name = (style.name or "") if style is not None else ""
        if name.lower().startswith("toc ") or self._is_hidden_style(style):
            return "", False
        words = self._inline(element).strip()
        if not words:
            return "", False
        if level := self._heading_level(properties, style, name):
            words = " ".join(words.split())
            if self.first_title is None or name == "Title":
                self.first_title = words
            return markdown.heading(level, words), False
        if (bullet := self._bullet(properties, style, name)) is not None:
            return bullet + words.replace("\n", "\n" + " " * len(bullet)), True
        return markdown.text(words), False

    def _style(self, properties: Any) -> Any:
        return self._styles.get(properties.style) if properties is not None and properties.style else None

    def _heading_level(self, properties: Any, style: Any, name: str) -> int:
        """Return a heading's level, or 0. The names of built-in styles are English in every language of Word."""
        if name == "Title":
            return 1
        for base in self._with_bases(style):
            if match := _HEADING.fullmatch(base.name or ""):
                return int(match[1])
        for holder in (properties, *(base.element.pPr for base in self._with_bases(style))):
            level = holder.find(qn("w:outlineLvl")) if holder is not None else None
            if level is not None:
                value = int(level.get(qn("w:val"), str(_BODY_LEVEL)))
                return value + 1 if value < _BODY_LEVEL else 0
        return 0

    def _bullet(self, properties: Any, style: Any, name: str) -> str | None:
        number = None
        for holder in (properties, *(base.element.pPr for base in self._with_bases(style))):
            number = holder.find(qn("w:numPr")) if holder is not None else None
            if number is not None:
                break
        if number is None:
            return "- " if name.startswith("List Bullet") else "1. " if name.startswith("List Number") else None
        id_, level = number.find(qn("w:numId")), number.find(qn("w:ilvl"))
        id_text = id_.get(qn("w:val")) if id_ is not None else "0"
        if id_text == "0":  # 17.9.18: numbering is removed
            return None
        depth = min(int(level.get(qn("w:val"), "0")) if level is not None else 0, 8)
        bulleted = self._numbering.get((id_text, depth), "bullet" if "Bullet" in name else "decimal") == "bullet"
        return "   " * depth + ("- " if bulleted else "1. ")

    def _inline(self, element: Any) -> str:
        parts: list[str] = []
        stack = [iter(element)]
        while stack:
            for child in stack[-1]:
                tag = child.tag
                if not isinstance(tag, str) or tag in _SKIPPED or (tag == _R and self._is_hidden(child)):
                    continue
                if tag == _T:
                    parts.append(child.text or "")
                elif tag in _BREAKS:
                    parts.append(_BREAKS[tag])
                elif tag == qn("w:footnoteReference") or tag == qn("w:endnoteReference"):
                    parts.append(f"[^{child.get(qn('w:id'))}]")
                else:
                    if tag == _P and parts:
                        parts.append("\n")  # a text box within a paragraph, or a cell's next paragraph
                    stack.append(iter(child))
                    break
            else:
                stack.pop()
        return "".join(parts)

    def _is_hidden(self, run: Any) -> bool:
        properties = run.rPr
        if properties is None:
            return False
        if (vanish := properties.find(qn("w:vanish"))) is not None:
            return vanish.get(qn("w:val"), "1").lower() not in _OFF
        return self._is_hidden_style(self._styles.get(properties.style) if properties.style else None)

    def _is_hidden_style(self, style: Any) -> bool:
        if style is None:
            return False
        if style.style_id not in self._hidden:
            fonts = (getattr(base, "font", None) for base in self._with_bases(style))
            self._hidden[style.style_id] = any(font is not None and font.hidden for font in fonts)
        return self._hidden[style.style_id]

    def _with_bases(self, style: Any) -> Sequence[Any]:
        """Return a style and the styles that it is based on, MAX_BASES at most. Styles based on each other end the
        chain."""
        if style is None:
            return ()
        if style.style_id not in self._bases:
            chain: dict[str, Any] = {}
            base = style
            while base is not None and base.style_id not in chain and len(chain) < MAX_BASES:
                chain[base.style_id] = base
                base = self._styles.get(base.element.basedOn_val)
            self._bases[style.style_id] = tuple(chain.values())
        return self._bases[style.style_id]

    def _table(self, table: Any) -> str:
        rows: list[list[str]] = []
        for row in table.iterchildren(qn("w:tr")):
            if self._cells <= 0:
                self.truncated = True
                break
            properties = row.find(qn("w:trPr"))
            if properties is not None and properties.find(qn("w:del")) is not None:
                continue
            cells: list[str] = []
            for cell in self._row_cells(row):
                merged = cell.tcPr.find(qn("w:vMerge")) if cell.tcPr is not None else None
                is_continued = merged is not None and merged.get(qn("w:val"), "continue") == "continue"
                cells += ["" if is_continued else self._inline(cell).strip(), *[""] * (min(cell.grid_span, 100) - 1)]
            self._cells -= len(cells)
            rows.append(cells)
        if len(rows) == 1 and len(rows[0]) == 1:  # a frame around text
            return markdown.text(rows[0][0])
        return markdown.table(rows)

    def _row_cells(self, row: Any) -> Iterator[Any]:
        for child in row:
            if child.tag == qn("w:tc"):
                yield child
            elif child.tag == qn("w:sdt"):
                yield from child.iter(qn("w:tc"))


def _numbering(document: Any) -> dict[tuple[str, int], str]:
    """Return the format of each (list, level), such as ``bullet`` or ``decimal``."""
    try:
        root = document.part.numbering_part.element
    except (KeyError, NotImplementedError, ValueError):  # it has no lists; ValueError: they are in another file
        return {}
    formats = {
        abstract.get(qn("w:abstractNumId")): {
            int(level.get(qn("w:ilvl"), "0")): fmt.get(qn("w:val"), "decimal")
            for level in abstract.iterchildren(qn("w:lvl"))
            if (fmt := level.find(qn("w:numFmt"))) is not None
        }
        for abstract in root.iterchildren(qn("w:abstractNum"))
    }
    return {
        (num.get(qn("w:numId")), level): fmt
        for num in root.iterchildren(qn("w:num"))
        if (abstract := num.find(qn("w:abstractNumId"))) is not None
        for level, fmt in formats.get(abstract.get(qn("w:val")), {}).items()
    }
