"""Converts a PDF to Markdown if it has headings or tables, else to plain text. Running headers and footers are
dropped."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pypdfium2
from pypdfium2 import raw

from connectors.extraction import markdown
from connectors.extraction.limits import Limits
from connectors.extraction.pdf_layout import Piece, Tables, in_reading_order, page_text
from connectors.extraction.result import Extracted, Unreadable

EDGE_SHARE = 0.1
"""Share of a page's height, at its top and at its bottom, in which headers and footers are (an inch of 11 inches)."""
MIN_REPEATS = 3
REPEAT_SHARE = 0.5
"""A line on more than this share of the pages (of the odd or even ones in a book) is a header or footer."""
HEADING_SIZE_RATIO = 1.15
"""Lines at least this many times as large as the body text are headings."""
MAX_HEADING_CHARS = 200
MAX_HEADING_LINES = 3
MAX_LEVELS = 4
FULL_LINE_SHARE = 0.85
"""A line that fills this share of its column's width continues in the next line."""
PARAGRAPH_GAP = 0.75
"""A gap between two lines of more than this many times the font size begins a paragraph."""

MIN_PARAGRAPH_CHARACTERS = 80
"""A shorter paragraph at the end of a page does not continue on the next one."""

_NUMBERS = re.compile(r"\d+|\b[ivxlc]+\b", re.I)
_ITEM = re.compile(r"(?:[•‣▪◦·●○■–*-]|\d{1,3}[.)]|\([a-z\d]{1,3}\)|[a-z][.)])\s", re.I)
_LEADER = re.compile(r"\s*(?:\. ?){4,}\.?\s*(?=\d+$|[ivxlc]+$|$)")
"""Dots that lead to a page number, in a table of contents."""
_BULLET = re.compile(r"[•‣▪◦·●○■]\s*")


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    structured: bool
    """The text has a heading or a table, and so is Markdown."""
    first_heading: str | None
    repeats_alone: bool
    """There was nothing but lines that are alike on many pages, as headers are."""


@dataclass(frozen=True, slots=True)
class Page:
    flows: Sequence[Sequence[Piece]]
    """The result of ``pdf_layout.in_reading_order``."""
    height: float


def render(pages: Sequence[Page]) -> Rendered:
    """Write the text of pages, without running headers and footers."""
    running = _running_lines(pages)
    content = [[[p for p in flow if _place(p, page) not in running] for flow in page.flows] for page in pages]
    repeats_alone = not any(flow for flows in content for flow in flows)
    if repeats_alone:  # no text that they could be above or below
        content = [[list(flow) for flow in page.flows] for page in pages]
    styles = _Styles([p for flows in content for flow in flows for p in flow if not p.is_table])
    blocks: list[_Block] = []
    first_heading = None
    for flows in content:
        page: list[_Block] = []
        for group in (group for flow in flows for group in _paragraphs(flow, styles)):
            if group[0].is_table:
                page.append(_Block(group[0].text, True))
            elif level := styles.level(group):
                words = _one_line(group)
                first_heading = first_heading or words
                page.append(_Block(markdown.heading(level, words), True))
            else:
                page.append(_Block(_paragraph_text(group), False))
        _append(blocks, page)
    structured = any(block.is_markup for block in blocks)
    texts = [markdown.text(block.text) if structured and not block.is_markup else block.text for block in blocks]
    return Rendered("\n\n".join(texts), structured, first_heading, repeats_alone)


@dataclass(frozen=True, slots=True)
class _Block:
    text: str
    is_markup: bool
    """The block is a generated heading or table. Other text that looks like one is escaped."""


def _place(piece: Piece, page: Page) -> tuple[str, bool] | None:
    """Return what identifies a header or footer on several pages: its words without numbers, and whether it is at the
    top. None: it is neither."""
    middle = (piece.top + piece.bottom) / 2
    if piece.is_table or EDGE_SHARE * page.height < middle < (1 - EDGE_SHARE) * page.height:
        return None
    return _NUMBERS.sub("#", " ".join(piece.text.split())).lower(), middle < page.height / 2


def _running_lines(pages: Sequence[Page]) -> frozenset[tuple[str, bool] | None]:
    """Find headers, footers and page numbers: lines that are the same, apart from numbers, at the same end of many
    pages."""
    counts: Counter[tuple[str, bool] | None] = Counter()
    for page in pages:
        counts.update({_place(p, page) for flow in page.flows for p in flow} - {None})
    with_text = sum(any(page.flows) for page in pages)
    least = max(MIN_REPEATS, REPEAT_SHARE * with_text / 2 + 1)  # left and right pages may differ
    return frozenset(line for line, count in counts.items() if count >= least)


class _Styles:
    """Decides which lines of a document are headings, and of which level."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        sizes: Counter[float] = Counter()
        bold = 0
        for piece in pieces:
            sizes[piece.size] += len(piece.text)
            bold += len(piece.text) if piece.bold else 0
        self._body = sizes.most_common(1)[0][0] if sizes else 0.0
        total = sum(sizes.values())
        self._is_bold_significant = bold < 0.3 * total
        large = sorted((size for size in sizes if size >= HEADING_SIZE_RATIO * self._body), reverse=True)
        self._levels = {size: min(n, MAX_LEVELS) for n, size in enumerate(large, 1)}
        if sizes and sum(sizes[size] for size in large) > 0.4 * total:
            self._levels = {}  # most text is large: a poster, not headings

    def level(self, group: Sequence[Piece]) -> int:
        """Return the level of a heading, or 0."""
        words = " ".join(p.text for p in group)
        if (
            _LEADER.search(words)
            or len(words) > MAX_HEADING_CHARS
            or len(group) > MAX_HEADING_LINES
            or not any(c.isalpha() for c in words)
        ):
            return 0
        if level := self._levels.get(group[0].size):
            return level
        if self._is_bold_heading(group, words):
            return min(len(set(self._levels.values())) + 1, MAX_LEVELS + 1)
        return 0

    def _is_bold_heading(self, group: Sequence[Piece], words: str) -> bool:
        return (
            self._is_bold_significant
            and all(p.bold for p in group)
            and len(group) == 1
            and len(words) <= 80
            and group[0].size >= self._body
            and not words.endswith((".", ",", ";", ":"))
        )

    def kind(self, piece: Piece) -> object:
        """Return a value that the lines of one paragraph share."""
        return (piece.is_table, self._levels.get(piece.size), piece.bold and self._is_bold_significant)


def _paragraphs(flow: Sequence[Piece], styles: _Styles) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    for piece in flow:
        last = groups[-1][-1] if groups else None
        if last is not None and _continues_paragraph(last, piece, styles):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _continues_paragraph(last: Piece, piece: Piece, styles: _Styles) -> bool:
    if last.is_table or piece.is_table or styles.kind(last) != styles.kind(piece):
        return False
    if abs(last.size - piece.size) > 0.2 * max(last.size, piece.size):
        return False
    return -last.height <= piece.top - last.bottom <= PARAGRAPH_GAP * max(last.size, piece.size)


def _paragraph_text(group: Sequence[Piece]) -> str:
    """Join a paragraph's lines: full lines with a space, short ones with a line break; hyphenated words are joined."""
    left, right = min(p.x0 for p in group), max(p.x1 for p in group)
    text = ""
    before: Piece | None = None
    for piece in group:
        line = _LEADER.sub(" … ", _BULLET.sub("- ", piece.text, count=1) if _BULLET.match(piece.text) else piece.text)
        if before is None:
            text = line
        elif (joined := _hyphenated(text, line)) is not None:
            text = joined
        else:
            ends = before.x1 - left < FULL_LINE_SHARE * (right - left) or _LEADER.search(before.text)
            full = not ends and not _ITEM.match(piece.text)
            text += (" " if full else "\n") + line
        before = piece
    return text.replace("\u00ad", "")


def _hyphenated(text: str, line: str) -> str | None:
    """Return the two joined if a word is divided between them, such as "exam-" and "ple", or None."""
    if not text or not line or not line[0].islower():
        return None
    if text.endswith("\u00ad") or (text.endswith(("-", "\u2010")) and text[-2:-1].isalpha()):
        return text[:-1] + line
    return None


def _one_line(group: Sequence[Piece]) -> str:
    words = group[0].text
    for piece in group[1:]:
        words = _hyphenated(words, piece.text) or f"{words} {piece.text}"
    return " ".join(words.replace("\u00ad", "").split())


def _append(blocks: list[_Block], page: list[_Block]) -> None:
    """Append a page's blocks. A word or sentence that is divided between the pages is joined."""
    if blocks and page and not (blocks[-1].is_markup or page[0].is_markup):
        before, after = blocks[-1].text, page[0].text
        joined = _hyphenated(before, after)
        if joined is None and after[:1].islower() and before[-1:].isalnum() and len(before) > MIN_PARAGRAPH_CHARACTERS:
            joined = f"{before} {after}"
        if joined is not None:
            blocks[-1] = _Block(joined, False)
            page = page[1:]
    blocks += [block for block in page if block.text]


TAIL_BYTES = 4096
"""The end of a complete file states where its index is (``startxref``) and that it ends (``%%EOF``). ISO 32000-2,
7.5.5, puts both in the last lines, and readers search the last kilobyte."""
MIN_TEXT_CHARACTERS = 16
"""A page with a picture and fewer characters is a scanned page with a stamp or number on it."""
MAX_SCANNED_SHARE = 0.5
"""A PDF with a larger share of scanned pages needs OCR."""
MAX_UNMAPPED_SHARE = 0.3
"""A PDF with a larger share of unmapped characters needs OCR: its fonts do not say which letter a glyph is."""

_OBJECT = re.compile(rb"\d\s+\d+\s+obj\b")
_UNMAPPED = re.compile("[\ufffd\ue000-\uf8ff\x00-\x08\x0e-\x1f]")
_MEANINGLESS_TITLE = re.compile(
    r"microsoft (word|powerpoint|excel)\b|untitled|^\(?anonymous\)?$|^\S+\.(docx?|pptx?|xlsx?|indd|tex|dvi|qxd)$", re.I
)


@dataclass(slots=True)
class _Counts:
    """Counts over the pages of a document."""

    characters: int = 0
    unmapped: int = 0
    """Characters that the font maps to no letter."""
    scanned_pages: int = 0


def read_pdf(data: bytes, limits: Limits) -> Extracted:
    """Read a PDF. Raises Unreadable: encrypted, truncated, broken, empty, too_large, needs_ocr."""
    pdf = _open(data)
    count = len(pdf)
    if count > limits.pages:
        raise Unreadable("too_large", f"has {count:,} pages, the limit is {limits.pages:,}: split it")
    tables = Tables(data, limits.cells, limits.table_seconds)
    counts = _Counts()
    pages: list[Page] = []
    size = 0
    for number in range(count):
        pages.append(_page(pdf, number, tables, counts))
        size += sum(len(piece.text) for flow in pages[-1].flows for piece in flow)
        if size > limits.text_bytes:
            raise Unreadable("too_large", f"holds more than {limits.text_bytes:,} bytes of text: split it")
    _require_text(counts, count)
    rendered = render(pages)
    if rendered.repeats_alone and sum(_is_picture(pdf, number) for number in range(count)) > MAX_SCANNED_SHARE * count:
        raise _scanned(count)  # with a number stamped on each page, as copies for a court have it
    metadata: dict[str, str | int | float | bool] = {"pages": count}
    if counts.scanned_pages:
        metadata["pages_without_text"] = counts.scanned_pages
    if tables.unsearched:
        metadata["pages_not_searched_for_tables"] = tables.unsearched
    information = pdf.get_metadata_dict()
    title = information.get("Title", "").strip()
    if not title or _MEANINGLESS_TITLE.search(title):
        title = rendered.first_heading or ""
    media_type = "text/markdown" if rendered.structured else "text/plain"
    return Extracted(rendered.text, media_type, title or None, information.get("Author", "").strip() or None, metadata)


def _open(data: bytes) -> pypdfium2.PdfDocument:
    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            raise Unreadable("encrypted", "is a PDF that needs a password: save it without one") from error
        if _is_cut(data):
            raise _truncated() from error
        raise Unreadable("broken", "is not a PDF that can be opened (damaged)") from error
    if _is_cut(data):  # pdfium opens incomplete files, but half a document that passes for all of it is worse than none
        raise _truncated()
    if len(pdf) == 0:
        raise Unreadable("empty", "is a PDF without pages")
    return pdf


def _is_cut(data: bytes) -> bool:
    tail = data[-TAIL_BYTES:]
    return b"%%EOF" not in tail and b"startxref" not in tail and _OBJECT.search(data) is not None


def _truncated() -> Unreadable:
    return Unreadable("truncated", "is a PDF whose end is missing: copy or upload it again")


def _page(pdf: pypdfium2.PdfDocument, number: int, tables: Tables, counts: _Counts) -> Page:
    try:
        page = pdf[number]
    except pypdfium2.PdfiumError as error:
        raise Unreadable("broken", f"is a PDF whose page {number + 1} cannot be read") from error
    try:
        text = page_text(page)
        pieces = text.pieces
        characters = sum(len(piece.text) for piece in pieces)
        counts.characters += characters
        counts.unmapped += sum(len(_UNMAPPED.findall(piece.text)) for piece in pieces)
        if characters < MIN_TEXT_CHARACTERS and _has_picture(page):
            counts.scanned_pages += 1
        if text.is_upright:
            pieces = tables.replace(page, number, pieces)
        return Page(in_reading_order(pieces), text.height)
    finally:
        page.close()


def _pictures(page: Any) -> Iterator[Any]:
    """Yield the pictures among the first objects of a page."""
    for n in range(min(raw.FPDFPage_CountObjects(page.raw), 1_000)):
        shown = raw.FPDFPage_GetObject(page.raw, n)
        if raw.FPDFPageObj_GetType(shown) in (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_FORM):
            yield shown


def _has_picture(page: Any) -> bool:
    return any(True for _ in _pictures(page))


def _is_picture(pdf: pypdfium2.PdfDocument, number: int) -> bool:
    """Whether a picture takes most of a page."""
    page = pdf[number]
    try:
        left, bottom, right, top = (ctypes.c_float() for _ in range(4))
        for picture in _pictures(page):
            if raw.FPDFPageObj_GetBounds(picture, *map(ctypes.byref, (left, bottom, right, top))):
                area = (right.value - left.value) * (top.value - bottom.value)
                if area > page.get_width() * page.get_height() / 2:
                    return True
        return False
    finally:
        page.close()


def _scanned(pages: int) -> Unreadable:
    return Unreadable("needs_ocr", f"is a PDF of {pages} pages almost without text (scanned)")


def _require_text(counts: _Counts, pages: int) -> None:
    if counts.characters == 0 or counts.scanned_pages > MAX_SCANNED_SHARE * pages:
        raise _scanned(pages)
    if counts.unmapped > MAX_UNMAPPED_SHARE * counts.characters:
        raise Unreadable("needs_ocr", "is a PDF whose fonts do not say which letters they show")
