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
    """A record that is not a message of the contract. ``code`` is bounded (a label); the text never quotes content."""

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
    """The record of a message. The same message always gives the same ``ce_id`` (consumers may deduplicate by it)."""
    value = message.model_dump_json().encode()
    headers: Headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", hashlib.blake2b(message.kind.encode() + value, digest_size=16).hexdigest().encode()),
        ("ce_type", f"{CE_TYPE_PREFIX}{message.kind}".encode()),
        ("ce_source", f"/{quote(message.tenant)}/{quote(message.source)}".encode()),
        ("ce_time", message.observed_at.isoformat().encode()),
        ("content-type", CONTENT_TYPE.encode()),
    ]
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    return Record(message.key.encode(), value, headers)


def header_map(headers: Iterable[tuple[str, bytes]] | Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Headers as a mapping; of a doubled name the last one counts."""
    return dict(headers or {})


def decode(value: bytes | None, headers: Iterable[tuple[str, bytes]] | Mapping[str, bytes] | None) -> AnyMessage:
    """The message in a record. Raises BadMessage when it is none: no value, unknown type, broken JSON, bad field."""
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
    """What is wrong and where, without the offending values (they may be content; so may names inside metadata)."""
    problems = [
        f"{'.'.join(str(part) for part in item['loc'][:1]) or 'message'}: {item['msg']}"
        for item in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    return "; ".join(list(dict.fromkeys(problems))[:5])[:500]
