"""Converts PPTX to Markdown: for each slide a heading, its text as bullets, its tables and notes. Hidden slides and
shapes are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Any

from pptx import Presentation
from pptx.enum.shapes import PP_PLACEHOLDER

from connectors.extraction import markdown
from connectors.extraction.limits import Limits
from connectors.extraction.result import Extracted, Unreadable

_ON_EVERY_SLIDE = frozenset(
    {PP_PLACEHOLDER.DATE, PP_PLACEHOLDER.FOOTER, PP_PLACEHOLDER.SLIDE_NUMBER, PP_PLACEHOLDER.HEADER}
)


def read_slides(file: IO[bytes], limits: Limits) -> Extracted:
    """Raises Unreadable: too_large."""
    deck = Presentation(file)
    slides = list(deck.slides)
    if len(slides) > limits.pages:
        raise Unreadable("too_large", f"has {len(slides):,} slides, the limit is {limits.pages:,}: split it")
    visible = [(n, slide) for n, slide in enumerate(slides, 1) if slide._element.get("show") not in ("0", "false")]
    reader = _Reader(limits.cells)
    blocks = [block for n, slide in visible for block in reader.slide(n, slide)]
    properties = deck.core_properties
    titles = [words for _, slide in visible if (words := _title(slide))]
    stated_title = (properties.title or "").strip()
    title: str | None = (
        stated_title if stated_title and stated_title != "PowerPoint Presentation" else titles[0] if titles else None
    )
    metadata: dict[str, str | int | float | bool] = {"slides": len(slides)}
    if len(visible) < len(slides):
        metadata["hidden_slides"] = len(slides) - len(visible)
    if reader.truncated:
        metadata["truncated"] = True
    text = "\n\n".join(blocks) + "\n" if reader.has_text else ""
    return Extracted(text, "text/markdown", title, (properties.author or "").strip() or None, metadata)


def _title(slide: Any) -> str:
    shape = slide.shapes.title
    return " ".join(shape.text_frame.text.split()) if shape is not None and shape.has_text_frame else ""


class _Reader:
    def __init__(self, cells: int) -> None:
        self._cells = cells
        self.truncated = False
        self.has_text = False
        """Whether there was any text except the headings that are generated."""

    def slide(self, number: int, slide: Any) -> Iterator[str]:
        title = _title(slide)
        self.has_text |= bool(title)
        yield markdown.heading(2, title or f"Slide {number}")
        title_id = slide.shapes.title.shape_id if slide.shapes.title is not None else None
        for shape in _in_reading_order(slide.shapes):
            if shape.shape_id != title_id and not _is_on_every_slide(shape):
                for block in self._shape(shape):
                    self.has_text = True
                    yield block
        if slide.has_notes_slide:
            frame = slide.notes_slide.notes_text_frame
            if frame is not None and (notes := frame.text.strip()):
                self.has_text = True
                yield "Notes: " + _lines(notes)

    def _shape(self, shape: Any) -> Iterator[str]:
        if getattr(shape, "has_table", False) and shape.has_table:
            if block := self._table(shape.table):
                yield block
        elif getattr(shape, "has_chart", False) and shape.has_chart:
            chart = shape.chart
            if chart.has_title and chart.chart_title.has_text_frame and (words := chart.chart_title.text_frame.text):
                yield markdown.text(_lines(words))
        elif shape.has_text_frame:
            paragraphs = [(p.level, _lines(p.text)) for p in shape.text_frame.paragraphs if p.text.strip()]
            if len(paragraphs) == 1:
                yield markdown.text(paragraphs[0][1])
            elif paragraphs:
                yield "\n".join(f"{'  ' * level}- {words}" for level, words in paragraphs)

    def _table(self, table: Any) -> str:
        rows = []
        for row in table._tbl.tr_lst:  # a row of the library looks for its place among all rows
            if self._cells <= 0:
                self.truncated = True
                break
            rows.append(["" if cell.is_spanned else cell.text for cell in row.tc_lst])
            self._cells -= len(rows[-1])
        return markdown.table(rows)


def _lines(words: str) -> str:
    """Return text with its line breaks, which python-pptx writes as vertical tabs."""
    return words.replace("\v", "\n").strip()


def _in_reading_order(shapes: Iterable[Any]) -> Iterator[Any]:
    """Yield shapes from top to bottom, then from left to right, and the members of groups instead of the groups,
    however deep these are nested. Hidden ones, which the selection pane switches off, are left out."""
    levels = [_ordered(shapes)]
    while levels:
        if (shape := next(levels[-1], None)) is None:
            levels.pop()
        elif hasattr(shape, "shapes"):
            levels.append(_ordered(shape.shapes))
        else:
            yield shape


def _ordered(shapes: Iterable[Any]) -> Iterator[Any]:
    shown = (shape for shape in shapes if shape._element._nvXxPr.cNvPr.get("hidden") not in ("1", "true"))
    return iter(sorted(shown, key=lambda shape: (shape.top or 0, shape.left or 0)))


def _is_on_every_slide(shape: Any) -> bool:
    return bool(shape.is_placeholder and shape.placeholder_format.type in _ON_EVERY_SLIDE)
