"""Reads records of change data capture: Debezium's envelopes, and rows as Kafka Connect writes them. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from connectors.rows import has_surrogates
from pipeline.core.errors import Misconfigured

PLACEHOLDER = "__debezium_unavailable_value"
"""Debezium's default in place of a large value that an update did not change, and Postgres therefore did not log."""
UNAVAILABLE = (
    PLACEHOLDER,
    base64.b64encode(PLACEHOLDER.encode()).decode(),
    [PLACEHOLDER],
    {PLACEHOLDER: PLACEHOLDER},
)
"""The same in columns of text, of bytes, of arrays and of maps."""
DELETED = "__deleted"
"""The field with which Debezium's ExtractNewRecordState marks a deleted row."""


class BadRecord(Exception):
    """A record is nothing that the format allows. The message never quotes it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record's meaning: the row is now so, it is deleted, all rows are deleted, or nothing."""

    kind: Literal["row", "deleted", "truncated", "nothing"]
    row: Mapping[str, Any] | None = None


def change_of(value: bytes | None, form: Literal["debezium", "flat"]) -> Change:
    """Return the meaning of a record's value. None is a tombstone. Raises BadRecord, and Misconfigured for a format
    that is not JSON."""
    if value is None:
        return Change("deleted")
    payload = payload_of(value)
    if payload is None:
        return Change("deleted")
    if not isinstance(payload, dict):
        raise BadRecord("is no JSON object")
    return _row(payload) if form == "flat" else _envelope(payload)


def _row(payload: dict[str, Any]) -> Change:
    is_deleted = str(payload.pop(DELETED, "false")).lower() == "true"
    return Change("deleted") if is_deleted else Change("row", payload)


def _envelope(payload: dict[str, Any]) -> Change:
    match payload.get("op"):
        case "c" | "r" | "u":
            after = payload.get("after")
            if not isinstance(after, dict):
                raise BadRecord("is an envelope without the row after the change")
            return Change("row", after)
        case "d":
            return Change("deleted")
        case "t":
            return Change("truncated")
        case "m":  # a message of pg_logical_emit_message
            return Change("nothing")
        case None if "ddl" in payload or "tableChanges" in payload or payload.get("status") in ("BEGIN", "END"):
            return Change("nothing")
        case None if payload.keys() <= {"ts_ms", "ts_us", "ts_ns"}:  # a heartbeat
            return Change("nothing")
        case _:
            raise BadRecord('is no envelope of Debezium: if the topic holds plain rows, write format = "flat"')


def key_of_record(key: bytes | None) -> str | None:
    """Return a record's key in one form, with or without a schema; None if it has none. Raises BadRecord."""
    if key is None:
        return None
    payload = payload_of(key)
    if payload is None:
        return None
    form = json.dumps(payload, sort_keys=True, ensure_ascii=False)
    if has_surrogates(form):
        raise BadRecord("has a key with half of a character")
    return form


def payload_of(raw: bytes) -> Any:
    """Return a key or value of Kafka Connect without its schema. Raises BadRecord and Misconfigured."""
    if raw[:1] == b"\x00":
        raise Misconfigured(
            "the topic is in Avro, Protobuf or another format of a schema registry: write it with Kafka Connect's"
            " JsonConverter"
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
        raise BadRecord("is no JSON that can be read") from error
    is_wrapped = isinstance(value, dict) and value.keys() == {"schema", "payload"}
    return value["payload"] if is_wrapped else value


def merged(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the row with the values that Debezium had not: those of the row before, which the change left as they
    were. Without that row they stay placeholders."""
    return {
        name: before.get(name, value) if before is not None and is_unavailable(value) else value
        for name, value in row.items()
    }


def is_unavailable(value: object) -> bool:
    return value in UNAVAILABLE
