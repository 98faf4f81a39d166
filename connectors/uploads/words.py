"""What a client says of its file → what we keep of it. Pure."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from connectors.uploads.table import Uploaded, Words
from topics.messages import DocumentUpserted

FIELDS = frozenset({"title", "acl_tags", "required_tags", "metadata", "external_id", "source", "file_name"})
MAX_NAME = 200
NOBODY = 'acl_tags: name who may read it, e.g. "staff" or "user:ada@example.org"; without one nobody could find it'

Fields = Mapping[str, Sequence[str]]


class Invalid(Exception):
    """One line: which field, and what is wrong with it. Quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The file's own name and type, as the client sends them."""

    name: str = ""
    media_type: str | None = None


def words_of(fields: Fields, part: Part | None, before: Uploaded | None, *, tenant: str, source: str) -> Words:
    """before: the upload that is replaced; what is not said anew stays. Raises Invalid."""
    if unknown := sorted(set(fields) - FIELDS):
        raise Invalid(f"{unknown[0][:50]!r}: no such field (known: {', '.join(sorted(FIELDS))}, and the file)")
    name = sanitised(one(fields, "file_name") or (part.name if part else "") or (before.file_name if before else ""))
    words = Words(
        file_name=name,
        media_type=part.media_type if part else before.media_type if before else None,
        title=one(fields, "title") if "title" in fields else before.title if before else None,
        acl_tags=_tags(fields, "acl_tags") if "acl_tags" in fields else before.acl_tags if before else [],
        required_tags=_tags(fields, "required_tags") if "required_tags" in fields
        else before.required_tags if before else [],
        metadata=_metadata(fields) if "metadata" in fields else before.metadata if before else {},
    )  # fmt: skip
    if not words.acl_tags:
        raise Invalid(NOBODY)
    _check(words, one(fields, "external_id"), tenant, source)
    return words


def one(fields: Fields, name: str) -> str | None:
    """ "" counts as not said. Raises Invalid."""
    values = fields.get(name, ())
    if len(values) > 1:
        raise Invalid(f"{name}: said {len(values)} times")
    return values[0].strip() or None if values else None


def sanitised(name: str) -> str:
    """A file name and nothing else: no folders, no invisible or control characters, its ending kept when it is cut."""
    base = unicodedata.normalize("NFC", name).replace("\\", "/").rpartition("/")[2]
    base = "".join(c for c in base if c.isprintable() and unicodedata.category(c) not in ("Cf", "Co", "Cs")).strip(" .")
    stem, dot, ending = base.rpartition(".")
    if len(base) > MAX_NAME and dot and len(ending) <= 10:
        base = stem[: MAX_NAME - len(ending) - 1] + dot + ending
    return base[:MAX_NAME] or "upload"


def _tags(fields: Fields, name: str) -> list[str]:
    """The field repeated, or once as a JSON list."""
    values = [value.strip() for value in fields.get(name, ()) if value.strip()]
    if len(values) == 1 and values[0].startswith("["):
        try:
            given = json.loads(values[0])
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{name}: is not a JSON list") from error
        if not isinstance(given, list) or not all(isinstance(tag, str) for tag in given):
            raise Invalid(f"{name}: a list of tags, each of them text")
        return given
    return values


def _metadata(fields: Fields) -> dict[str, Any]:
    text = one(fields, "metadata")
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Invalid("metadata: is not JSON") from error
    if not isinstance(given, dict):
        raise Invalid("metadata: a JSON object")
    return given


def _check(words: Words, external_id: str | None, tenant: str, source: str) -> None:
    """By the message that will be made of it: what the wire refuses is refused at once."""
    try:
        DocumentUpserted(
            tenant=tenant, source=source, external_id=external_id or "-", observed_at=datetime.now(UTC), version=1,
            title=words.title or words.file_name, content="", media_type=words.media_type or "text/plain",
            acl_tags=list(words.acl_tags), required_tags=list(words.required_tags), metadata=dict(words.metadata),
        )  # fmt: skip
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise Invalid(f"{found['loc'][0] if found['loc'] else 'upload'}: {found['msg']}") from error
