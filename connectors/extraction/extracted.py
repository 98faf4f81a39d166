"""What a file gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what runs in the sandbox does without pydantic: it would double the time to start
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
