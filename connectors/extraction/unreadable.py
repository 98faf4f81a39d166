"""Why a file gives no text."""

from __future__ import annotations

from typing import Literal

Code = Literal[
    "binary", "broken", "changing", "empty", "encoding", "encrypted", "io_error", "needs_ocr", "not_a_file",
    "permission", "too_large", "too_slow", "vanished",
]  # fmt: skip

OF_THE_CONTENT: frozenset[str] = frozenset(
    {"binary", "broken", "empty", "encoding", "encrypted", "needs_ocr", "too_large"}
)
"""The same bytes fail in the same way again: not read again until they change."""


class Unreadable(Exception):
    """``code`` is a bounded label; the text is for people and never quotes content."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
