"""A file's bytes → what is published of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.extraction.decoding import decode
from connectors.extraction.media_types import media_type
from connectors.extraction.pdf import is_pdf, pdf_text
from connectors.extraction.titles import named, tidy
from connectors.extraction.unreadable import OF_THE_CONTENT, Unreadable
from topics.messages import MAX_CONTENT_BYTES, Scalar

__all__ = ["EXTRACTOR", "MAX_FILE_BYTES", "MAX_PDF_BYTES", "OF_THE_CONTENT", "Extracted", "Unreadable", "extract"]

EXTRACTOR = 1
"""Raised whenever the same bytes would give another result: files are then read again though they did not change."""
MAX_PDF_BYTES = 50_000_000
MAX_FILE_BYTES = 4 * MAX_CONTENT_BYTES
"""No text of MAX_CONTENT_BYTES is longer in any encoding (UTF-32)."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """``text`` is as it stands in the file (HTML included: the pipeline normalises it), never empty."""

    text: str
    media_type: str
    title: str | None = None
    author: str | None = None
    metadata: dict[str, Scalar] = field(default_factory=dict)


def extract(data: bytes, name: str) -> Extracted:
    """name: the file's own; its ending tells the kind of text. Raises Unreadable. Blocks: call it in a thread."""
    if is_pdf(data):
        pdf = pdf_text(data)
        return Extracted(_fits(pdf.text), "text/plain", tidy(pdf.title), tidy(pdf.author), {"pages": pdf.pages})
    text = _fits(decode(data))
    if not text.strip():
        raise Unreadable("empty", "is empty")
    kind = media_type(name, text)
    found = named(text, kind)
    return Extracted(text, kind, found.title, found.author)


def _fits(text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_CONTENT_BYTES:
        raise Unreadable("too_large", f"holds {size:,} bytes of text, the limit is {MAX_CONTENT_BYTES:,}")
    return text
