"""What a reader says of a document, as bytes: a line of JSON, and after it the text. Written by reading processes and
by the extraction service, read by those who trust neither.

The text stands apart, because JSON costs its reader up to two hundred times its length in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, cast

from connectors.extraction.limits import Limits
from connectors.extraction.result import OF_THE_CONTENT, OF_THE_MACHINE, Code, Extracted, Unreadable
from connectors.extraction.titles import tidy

MAX_HEAD_BYTES = 16 * 1024
MAX_TEXT_BYTES = Limits().text_bytes
MAX_BYTES = MAX_HEAD_BYTES + 1 + MAX_TEXT_BYTES
MAX_COUNT = 10**9
FAMILIES = frozenset({"word", "slides", "sheets"})
"""Of Office files: whoever has looked at the archive says which, and a second process reads it."""
_CODES = OF_THE_CONTENT | OF_THE_MACHINE
"""What a reader may say. That a file has vanished, say, only its source knows: its document would be deleted."""
_COUNTS = frozenset(
    {
        "attachments",
        "hidden_sheets",
        "hidden_slides",
        "pages",
        "pages_not_searched_for_tables",
        "pages_without_text",
        "sheets",
        "slides",
    }
)
_FLAGS = frozenset({"ocr", "truncated"})


class Malformed(Exception):
    """No answer of ours: whoever gave it is another program, or was taken over. The text quotes nothing of it."""


def written(found: Extracted | Unreadable) -> bytes:
    if isinstance(found, Unreadable):
        return packed({"code": found.code, "message": str(found)})
    return packed(asdict(found))


def packed(answer: Mapping[str, Any]) -> bytes:
    """Of {"text", "media_type", "title", "author", "metadata"}, {"family"} or {"code", "message"}."""
    head = json.dumps(
        {name: _line(value) if isinstance(value, str) else value for name, value in answer.items() if name != "text"}
    )
    return head.encode() + b"\n" + str(answer.get("text", "")).encode("utf-8", "replace")


def read(data: bytes) -> Extracted | str:
    """What the document holds; of an Office file that was only looked at, its family. Raises Unreadable, as the answer
    says, and Malformed. Nothing of it is trusted to have its shape."""
    head, line_end, _ = data[: MAX_HEAD_BYTES + 1].partition(b"\n")
    if not line_end:
        raise Malformed("its first line is too long, or missing")
    try:
        answer = json.loads(head)
        found = _understood(answer, data[len(head) + 1 :])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed("its first line is not what a reader says") from error
    if isinstance(found, Unreadable):
        raise found
    return found


def _understood(answer: dict[str, Any], text: bytes) -> Extracted | Unreadable | str:
    if "code" in answer:
        if answer["code"] not in _CODES:
            raise ValueError("not a reader's code")
        return Unreadable(cast(Code, answer["code"]), _line(str(answer["message"])) or "cannot be read")
    if "family" in answer:
        if answer["family"] not in FAMILIES:
            raise ValueError("not a family of ours")
        return str(answer["family"])
    if answer["media_type"] not in ("text/plain", "text/markdown"):
        raise ValueError("not a text of ours")
    if len(text) > MAX_TEXT_BYTES:
        raise Malformed("its text is too long")
    found = text.decode("utf-8").replace("\x00", "")
    if not found.strip():
        raise Malformed("its text is empty")
    metadata: dict[str, str | int | float | bool] = {
        name: _known(name, value) for name, value in answer["metadata"].items() if _is_known(name)
    }
    return Extracted(found, answer["media_type"], _line(answer["title"]), _line(answer["author"]), metadata)


def _is_known(name: str) -> bool:
    """Others are left out: those of a newer reader, and names that a source gives itself, such as ``path``."""
    return name in _COUNTS or name in _FLAGS or name == "sent_at"


def _known(name: str, value: object) -> str | int | bool:
    if name in _FLAGS and isinstance(value, bool):
        return value
    if name in _COUNTS and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    if name == "sent_at" and isinstance(value, str):
        return datetime.fromisoformat(value).isoformat()
    raise ValueError("not metadata of ours")


def _line(words: object) -> str | None:
    return tidy(whole(words)) if isinstance(words, str) else None


def whole(text: str) -> str:
    """Surrogate pairs joined, halves replaced: PDFs hold both."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\x00", "")
