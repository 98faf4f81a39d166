"""Plain text of all kinds, read in this process: decoding cannot crash, and is linear in its length."""

from __future__ import annotations

from connectors.extraction.decoding import decode
from connectors.extraction.extracted import Extracted
from connectors.extraction.media_types import media_type as type_of
from connectors.extraction.titles import named
from connectors.extraction.unreadable import Unreadable
from topics.messages import MAX_CONTENT_BYTES

MAX_TEXT_BYTES = 4 * MAX_CONTENT_BYTES + 4
"""No text of MAX_CONTENT_BYTES is longer in any encoding (UTF-32 with its mark)."""


def read_text(data: bytes, name: str, media_type: str | None = None) -> Extracted:
    """media_type: as declared; it counts where the name and the beginning say nothing. Raises Unreadable."""
    if len(data) > MAX_TEXT_BYTES:
        raise Unreadable("too_large", f"is {len(data):,} bytes; the limit is 4 MiB of text")
    text = _fits(decode(data))
    if not text.strip():
        raise Unreadable("empty", "is empty")
    declared = (media_type or "").partition(";")[0].strip().lower()
    found_type = type_of(name, text)
    if found_type == "text/plain" and declared.startswith("text/"):
        found_type = declared
    found = named(text, found_type)
    return Extracted(text, found_type, found.title, found.author)


def _fits(text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_CONTENT_BYTES:
        raise Unreadable("too_large", f"holds {size:,} bytes of text, the limit is {MAX_CONTENT_BYTES:,}")
    return text
