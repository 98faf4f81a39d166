"""PDF → Markdown where it has headings or tables, else plain text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pypdfium2
from pypdfium2 import raw

from connectors.extraction.extracted import Extracted
from connectors.extraction.limits import Limits
from connectors.extraction.pdf_blocks import Page, render
from connectors.extraction.pdf_lines import page_text
from connectors.extraction.pdf_order import in_reading_order
from connectors.extraction.pdf_tables import Tables
from connectors.extraction.unreadable import Unreadable

TAIL_BYTES = 4096
"""In which a complete file says where its index is (``startxref``) and that it ends (``%%EOF``); ISO 32000-2, 7.5.5,
puts both in the last lines, and readers look through the last kilobyte."""
BARE_CHARS = 16
"""Fewer on a page with a picture: a scanned page with a stamp or number on it."""
BARE_SHARE = 0.5
UNMAPPED_SHARE = 0.3
"""Of the letters without a meaning (fonts that do not say which letter a glyph is): only its picture tells."""

_OBJECT = re.compile(rb"\d\s+\d+\s+obj\b")
_UNMAPPED = re.compile("[\ufffd\ue000-\uf8ff\x00-\x08\x0e-\x1f]")
_MEANINGLESS_TITLE = re.compile(
    r"microsoft (word|powerpoint|excel)\b|untitled|^\(?anonymous\)?$|^\S+\.(docx?|pptx?|xlsx?|indd|tex|dvi|qxd)$", re.I
)


@dataclass(slots=True)
class _Seen:
    chars: int = 0
    unmapped: int = 0
    bare: int = 0


def read_pdf(data: bytes, limits: Limits) -> Extracted:
    """Raises Unreadable: encrypted, truncated, broken, too_large, needs_ocr."""
    pdf = _opened(data)
    count = len(pdf)
    if count > limits.pages:
        raise Unreadable("too_large", f"has {count:,} pages, the limit is {limits.pages:,}: split it")
    tables = Tables(data, limits.cells, limits.table_seconds)
    seen = _Seen()
    pages: list[Page] = []
    size = 0
    for number in range(count):
        pages.append(_page(pdf, number, tables, seen))
        size += sum(len(piece.text) for flow in pages[-1].flows for piece in flow)
        if size > limits.text_bytes:
            raise Unreadable("too_large", f"holds more than {limits.text_bytes:,} bytes of text: split it")
    _check_is_text(seen, count)
    rendered = render(pages)
    metadata: dict[str, str | int | float | bool] = {"pages": count}
    if seen.bare:
        metadata["pages_without_text"] = seen.bare
    if tables.unsearched:
        metadata["pages_not_searched_for_tables"] = tables.unsearched
    about = pdf.get_metadata_dict()
    title = about.get("Title", "").strip()
    if not title or _MEANINGLESS_TITLE.search(title):
        title = rendered.first_heading or ""
    media_type = "text/markdown" if rendered.structured else "text/plain"
    return Extracted(rendered.text, media_type, title or None, about.get("Author", "").strip() or None, metadata)


def _opened(data: bytes) -> pypdfium2.PdfDocument:
    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            raise Unreadable("encrypted", "is a PDF that needs a password: save it without one") from error
        if _is_cut(data):
            raise _truncated() from error
        raise Unreadable("broken", "is not a PDF that can be opened (damaged)") from error
    if _is_cut(
        data
    ):  # pdfium shows what it finds of a file; half of a document passed off as all of it is worse than none
        raise _truncated()
    if len(pdf) == 0:
        raise Unreadable("empty", "is a PDF without pages")
    return pdf


def _is_cut(data: bytes) -> bool:
    tail = data[-TAIL_BYTES:]
    return b"%%EOF" not in tail and b"startxref" not in tail and _OBJECT.search(data) is not None


def _truncated() -> Unreadable:
    return Unreadable("truncated", "is a PDF whose end is missing: copy or upload it again")


def _page(pdf: pypdfium2.PdfDocument, number: int, tables: Tables, seen: _Seen) -> Page:
    try:
        page = pdf[number]
    except pypdfium2.PdfiumError as error:
        raise Unreadable("broken", f"is a PDF whose page {number + 1} cannot be read") from error
    try:
        text = page_text(page)
        found = text.pieces
        chars = sum(len(piece.text) for piece in found)
        seen.chars += chars
        seen.unmapped += sum(len(_UNMAPPED.findall(piece.text)) for piece in found)
        if chars < BARE_CHARS and _has_picture(page):
            seen.bare += 1
        if text.as_shown:
            found = tables.replace(page, number, found)
        return Page(in_reading_order(found), text.height)
    finally:
        page.close()


def _has_picture(page: Any) -> bool:
    pictures = (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_FORM)
    count = min(raw.FPDFPage_CountObjects(page.raw), 1_000)
    return any(raw.FPDFPageObj_GetType(raw.FPDFPage_GetObject(page.raw, n)) in pictures for n in range(count))


def _check_is_text(seen: _Seen, pages: int) -> None:
    if seen.chars == 0 or seen.bare > BARE_SHARE * pages:
        raise Unreadable("needs_ocr", f"is a PDF of {pages} pages almost without text (scanned)")
    if seen.unmapped > UNMAPPED_SHARE * seen.chars:
        raise Unreadable("needs_ocr", "is a PDF whose fonts do not say which letters they show")
