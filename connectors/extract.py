"""A file's bytes → what is published of it, for callers in threads of their own."""

from __future__ import annotations

import tempfile

from connectors.extraction import kinds
from connectors.extraction.result import CONTENT_CODES, Extracted, Unreadable
from connectors.extraction.sandbox import extract_blocking
from connectors.extraction.settings import from_environment
from connectors.extraction.text import MAX_TEXT_BYTES, read_text

__all__ = ["CONTENT_CODES", "EXTRACTOR", "Extracted", "Unreadable", "extract", "most_bytes"]

EXTRACTOR = 2
"""Raised whenever the same bytes would give another result: files are then read again though they did not change."""


def most_bytes(head: bytes, name: str) -> int:
    """How large a file may be that begins like this. Raises Unreadable."""
    text = kinds.kind_of(head[: kinds.HEAD_BYTES], name) == "text"
    return MAX_TEXT_BYTES if text else from_environment().max_file_bytes


def extract(data: bytes, name: str, media_type: str | None = None) -> Extracted:
    """name: the file's own; with the declared media type it tells what the first bytes do not. Plain text is read here,
    all else by a process of its own, or by the extraction service. Raises Unreadable, and Retryable while that service
    cannot read it. Blocks."""
    kind = kinds.kind_of(data[: kinds.HEAD_BYTES], name, media_type)
    if kind == "text":
        return read_text(data, name, media_type)
    if kind == "ole":
        raise kinds.refuse_ole(data)
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        return extract_blocking(file, name, media_type)
