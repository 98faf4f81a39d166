"""The text and metadata of a file, or the reason why it has no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from topics.messages import Scalar


@dataclass(frozen=True, slots=True)
class Extracted:
    """``text`` is never empty. Of text files it is as it stands in the file (HTML included: the pipeline normalises
    it); of PDF and office files it is Markdown, or plain text where there is no structure to keep."""

    text: str
    media_type: str
    title: str | None = None
    author: str | None = None
    metadata: dict[str, Scalar] = field(default_factory=dict)
    """``pages``, ``slides``, ``sheets``; ``truncated`` (True) where a cap has cut something off; ``ocr`` (True)."""


Code = Literal[
    "binary",
    "bomb",
    "broken",
    "changing",
    "crashed",
    "empty",
    "encoding",
    "encrypted",
    "io_error",
    "needs_ocr",
    "not_a_file",
    "permission",
    "too_large",
    "too_much_memory",
    "too_slow",
    "truncated",
    "unconfined",
    "unsupported",
    "vanished",
]

OF_THE_CONTENT: frozenset[str] = frozenset(
    {
        "binary",
        "bomb",
        "broken",
        "crashed",
        "empty",
        "encoding",
        "encrypted",
        "needs_ocr",
        "too_large",
        "too_much_memory",
        "too_slow",
        "truncated",
        "unsupported",
    }
)
"""The same bytes fail in the same way again: not read again until they change (a hostile file costs its limit once)."""

OF_THE_MACHINE: frozenset[str] = frozenset({"unconfined"})
"""Not the file's fault: it is read again, although it is unchanged, once the machine lacks nothing."""


class Unreadable(Exception):
    """``code`` is a bounded label; the text is for people and never quotes content."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
