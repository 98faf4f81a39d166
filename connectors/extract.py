"""Extracts the text of a file's bytes, for callers in threads of their own."""

from __future__ import annotations

import tempfile

from connectors.extraction import kinds
from connectors.extraction.result import CONTENT_CODES, Extracted, Unreadable
from connectors.extraction.settings import from_environment
from connectors.extraction.text import MAX_TEXT_BYTES, read_text

__all__ = ["CONTENT_CODES", "EXTRACTOR", "Extracted", "Unreadable", "extract", "extracted_revision", "most_bytes"]

EXTRACTOR = 2
"""The version of the extraction. It is raised whenever the same bytes give another result, so that unchanged files are
read again."""


def extracted_revision(state: str) -> str:
    """Return a revision that differs also where a later version of the extraction reads the same bytes in another way.
    state: differs after each change of the bytes."""
    return f"{EXTRACTOR}:{state}"


def most_bytes(head: bytes, name: str) -> int:
    """Return the largest permitted size of a file that begins like this. Raises Unreadable."""
    text = kinds.kind_of(head[: kinds.HEAD_BYTES], name) == "text"
    return MAX_TEXT_BYTES if text else from_environment().max_file_bytes


def extract(data: bytes, name: str, media_type: str | None = None) -> Extracted:
    """Extract the text of a file. Blocks.

    name, media_type: decide the kind of a file if its first bytes do not. Plain text is read here, everything else by a
    separate process or by the extraction service. Raises Unreadable, and Retryable while that service is unavailable.
    """
    kind = kinds.kind_of(data[: kinds.HEAD_BYTES], name, media_type)
    if kind == "text":
        return read_text(data, name, media_type)
    if kind == "ole":
        raise kinds.refuse_ole(data)
    from connectors.extraction.sandbox import extract_blocking  # with its HTTP client: a folder of texts needs neither

    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        return extract_blocking(file, name, media_type)
