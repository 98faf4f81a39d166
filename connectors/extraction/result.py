"""The text and metadata of a file, or the reason why it has no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from topics.messages import Scalar


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a file, which is never empty. The text of a text file is unchanged (HTML included: the pipeline
    normalises it); that of a PDF or Office file is Markdown, or plain text where there is no structure."""

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

CONTENT_CODES: frozenset[str] = frozenset(
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
"""The file's content is the reason: it is not read again until it changes, so a hostile file costs its limit once."""

MACHINE_CODES: frozenset[str] = frozenset({"unconfined"})
"""The machine is the reason: the file is read again, although unchanged, once the machine can confine its reader."""


class Unreadable(Exception):
    """A file has no text. ``code`` is a bounded label; the message is for people and never quotes content. It continues
    the file's name: ``f"{name} {error}"``."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
