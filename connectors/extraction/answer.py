"""The format of a reader's answer: a line of JSON, followed by the text. Reading processes and the extraction service
write it; the code that reads it trusts neither.

The text is not part of the JSON, because parsing JSON takes up to two hundred times its length in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Literal, cast, get_args

from connectors.extraction.limits import Limits
from connectors.extraction.result import CONTENT_CODES, MACHINE_CODES, Code, Extracted, Unreadable
from connectors.extraction.titles import tidy

MAX_HEAD_BYTES = 16 * 1024
MAX_TEXT_BYTES = Limits().text_bytes
MAX_BYTES = MAX_HEAD_BYTES + 1 + MAX_TEXT_BYTES
MAX_COUNT = 10**9
Family = Literal["word", "slides", "sheets"]
"""The family of an Office file. The first process only inspects the archive and answers with its family; a second reads
it."""
_CODES = CONTENT_CODES | MACHINE_CODES
"""Error codes that are accepted from a reader. ``vanished``, for one, is not: it would have the document deleted."""
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
    """An answer is not in this format: it comes from another program, or a file took over its reader. The message
    quotes nothing of it."""


def encode_result(result: Extracted | Unreadable) -> bytes:
    """Encode an extracted text, or the reason why there is none."""
    if isinstance(result, Unreadable):
        return encode({"code": result.code, "message": str(result)})
    return encode(asdict(result))


def encode(answer: Mapping[str, Any]) -> bytes:
    """Encode {"text", "media_type", "title", "author", "metadata"}, {"family"} or {"code", "message"}."""
    head = json.dumps(
        {name: _line(value) if isinstance(value, str) else value for name, value in answer.items() if name != "text"}
    )
    return head.encode() + b"\n" + str(answer.get("text", "")).encode("utf-8", "replace")


def read(data: bytes) -> Extracted | str:
    """Decode an answer: the document's text, or the family of an Office file that was only inspected. The data may have
    any shape. Raises Unreadable if the answer is an error, and Malformed."""
    head, line_end, _ = data[: MAX_HEAD_BYTES + 1].partition(b"\n")
    if not line_end:
        raise Malformed("its first line is too long, or missing")
    try:
        answer = json.loads(head)
        result = _parse(answer, data[len(head) + 1 :])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed("its first line is not a reader's answer") from error
    if isinstance(result, Unreadable):
        raise result
    return result


def _parse(answer: dict[str, Any], text: bytes) -> Extracted | Unreadable | str:
    if "code" in answer:
        if answer["code"] not in _CODES:
            raise ValueError("not a reader's code")
        return Unreadable(cast(Code, answer["code"]), _line(str(answer["message"])) or "cannot be read")
    if "family" in answer:
        if answer["family"] not in get_args(Family):
            raise ValueError("not a family of Office files")
        return str(answer["family"])
    if answer["media_type"] not in ("text/plain", "text/markdown"):
        raise ValueError("not a media type of a reader")
    if len(text) > MAX_TEXT_BYTES:
        raise Malformed("its text is too long")
    decoded = text.decode("utf-8").replace("\x00", "")
    if not decoded.strip():
        raise Malformed("its text is empty")
    metadata: dict[str, str | int | float | bool] = {
        name: _metadata_value(name, value) for name, value in answer["metadata"].items() if _is_known(name)
    }
    return Extracted(decoded, answer["media_type"], _line(answer["title"]), _line(answer["author"]), metadata)


def _is_known(name: str) -> bool:
    """Whether a reader may set this metadata. Names of a newer reader are dropped, and those of a source, such as
    ``path``."""
    return name in _COUNTS or name in _FLAGS or name == "sent_at"


def _metadata_value(name: str, value: object) -> str | int | bool:
    if name in _FLAGS and isinstance(value, bool):
        return value
    if name in _COUNTS and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    if name == "sent_at" and isinstance(value, str):
        return datetime.fromisoformat(value).isoformat()
    raise ValueError("not metadata of a reader")


def _line(words: object) -> str | None:
    return tidy(join_surrogates(words)) if isinstance(words, str) else None


def join_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates: PDFs hold both."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\x00", "")
