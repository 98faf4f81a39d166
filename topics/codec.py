"""Messages ⇄ Kafka records, in CloudEvents binary mode: attributes in headers, the message itself as the JSON value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from pydantic import ValidationError

from topics.messages import MESSAGES, AnyMessage

CE_TYPE_PREFIX = "io.penstock."
CONTENT_TYPE = "application/json"

Headers = list[tuple[str, bytes]]


class BadMessage(Exception):
    """A record is not a message of the contract. ``code`` is a bounded label; the text never quotes content."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class Record:
    """A Kafka record, ready to send."""

    key: bytes
    value: bytes
    headers: Headers


def encode(message: AnyMessage, *, traceparent: str | None = None) -> Record:
    """Return the record of a message. Equal messages have equal ``ce_id``, by which consumers may deduplicate."""
    value = message.model_dump_json().encode()
    headers: Headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", hashlib.blake2b(message.kind.encode() + value, digest_size=16).hexdigest().encode()),
        ("ce_type", f"{CE_TYPE_PREFIX}{message.kind}".encode()),
        ("ce_source", ce_source(message.tenant, message.source).encode()),
        ("ce_time", message.observed_at.isoformat().encode()),
        ("content-type", CONTENT_TYPE.encode()),
    ]
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    return Record(message.key.encode(), value, headers)


def ce_source(tenant: str, source: str) -> str:
    """Return the CloudEvents attribute ``source``."""
    return f"/{quote(tenant)}/{quote(source)}"


def header_map(headers: Iterable[tuple[str, bytes]] | Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return the headers as a mapping; of a repeated name the last one counts."""
    return dict(headers or {})


def decode(value: bytes | None, headers: Iterable[tuple[str, bytes]] | Mapping[str, bytes] | None) -> AnyMessage:
    """Return the message in a record. Raises BadMessage for a missing value, unknown type, broken JSON or bad field."""
    if value is None:
        raise BadMessage("no_value", "the record has no value (a tombstone)")
    name = (header_map(headers).get("ce_type") or b"").decode("utf-8", "replace")
    cls = MESSAGES.get(name.removeprefix(CE_TYPE_PREFIX))
    if cls is None:
        raise BadMessage("unknown_type", f"header ce_type is {name[:100]!r}, not a type of this contract")
    try:
        return cls.model_validate_json(value)
    except ValidationError as error:
        raise BadMessage("invalid", _explain(error)) from error


def _explain(error: ValidationError) -> str:
    """Return the problems and their fields, without values and without names inside metadata: both may be content."""
    problems = [
        f"{'.'.join(str(part) for part in item['loc'][:1]) or 'message'}: {item['msg']}"
        for item in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    return "; ".join(list(dict.fromkeys(problems))[:5])[:500]
