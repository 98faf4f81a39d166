"""Airbyte's protocol: what a program writes, and the files that it reads. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from connectors.json_values import has_too_many_values

MAX_REASON_CHARACTERS = 300
MIN_SECRET_CHARACTERS = 4
"""Shorter values of the configuration are words such as a unit, and not replaced in messages."""
HEAD_BYTES = 4_096
"""The beginning of a message that cannot be read, in which the name of its stream is looked for."""


@dataclass(frozen=True, slots=True)
class StreamName:
    name: str
    namespace: str | None = None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> StreamName:
        return cls(str(value["name"]), value.get("namespace"))


@dataclass(frozen=True, slots=True)
class Record:
    stream: StreamName
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """How far the program has read: what it is handed when it is run again."""

    stream: StreamName | None
    """None: the state concerns all streams."""
    value: Mapping[str, Any]
    """The state as it was written, opaque."""


@dataclass(frozen=True, slots=True)
class Status:
    stream: StreamName
    status: str
    """``STARTED``, ``RUNNING``, ``COMPLETE`` or ``INCOMPLETE``."""


@dataclass(frozen=True, slots=True)
class Failure:
    stream: StreamName | None
    """None: the failure concerns the program."""
    kind: Literal["config_error", "transient_error", "system_error"]
    message: str
    """Text of the program, which may quote anything."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration that replaces the one that the program was handed."""

    value: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Catalog:
    streams: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Specification:
    required: Sequence[str]
    """The names that a configuration must have."""


@dataclass(frozen=True, slots=True)
class Connection:
    is_ready: bool
    message: str


@dataclass(frozen=True, slots=True)
class Unstorable:
    """A message that cannot be read, and is not skipped: it may be a record."""

    stream: str | None
    """The name of its stream, if it is known."""
    reason: str


Message = Record | State | Status | Failure | Configuration | Catalog | Specification | Connection | Unstorable


class Broken(Exception):
    """A message that the protocol does not allow. The text never quotes it."""


class Lines:
    """Cuts what a program writes into lines; of a line that is too long, only the beginning is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | Unstorable]:
        *complete, rest = chunk.split(b"\n")
        for end in complete:
            self._add(end)
            yield from self.finish()
        self._add(rest)

    def finish(self) -> Iterator[bytes | Unstorable]:
        """Yield the line that has no end yet, if there is one."""
        line = b"".join(self._parts)
        if self._size > self._max:
            if unstorable := _unstorable(line, "is larger than max_record_bytes"):
                yield unstorable
        elif line.strip():
            yield line
        self._parts, self._size = [], 0

    def _add(self, part: bytes) -> None:
        was_too_long = self._size > self._max
        self._size += len(part)
        if not was_too_long:
            self._parts.append(part)
            if self._size > self._max:
                self._parts = [b"".join(self._parts)[:HEAD_BYTES]]


def _unstorable(line: bytes, reason: str) -> Unstorable | None:
    """Return None for a line of a log."""
    head = line[:HEAD_BYTES]
    kind = re.search(rb'"type"\s*:\s*"([A-Z_]+)"', head)
    if not head.lstrip().startswith(b"{") or (kind is not None and kind[1] == b"LOG"):
        return None
    stream = re.search(rb'"stream"\s*:\s*"([^"\\]*)"', head)
    return Unstorable(stream[1].decode("utf-8", "replace") if stream else None, f"a record {reason}")


def parsed(line: bytes) -> Message | None:
    """Return a message; None for one that says nothing to us, such as a line of a log. Raises Broken."""
    if not line.lstrip().startswith(b"{"):
        return None  # a library prints
    try:
        text = line.decode(json.detect_encoding(line), "surrogatepass")
        if has_too_many_values(text):
            return _unstorable(line, "has too many values")
        message = json.loads(text)
    except json.JSONDecodeError as error:
        raise Broken("a message is no JSON: two parts of the program may have written at once") from error
    except (ValueError, RecursionError):  # whoever wrote one value must not stop the reading of all
        return _unstorable(line, "is nested too deeply, or has a number of too many digits")
    try:
        return _message(message)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Broken(f"a message of type {_printable_type(message)} lacks a part") from error


def _printable_type(message: Mapping[str, Any]) -> str:
    kind = str(message.get("type"))
    return kind if re.fullmatch(r"[A-Z_]{1,30}", kind) else "unknown"


def _message(message: Mapping[str, Any]) -> Message | None:
    match message.get("type"):
        case "RECORD":
            record = message["record"]
            if not isinstance(record["data"], dict):
                raise Broken("a record is no object")
            return Record(StreamName(str(record["stream"]), record.get("namespace")), record["data"])
        case "STATE":
            return _state(message["state"])
        case "TRACE":
            return _trace(message["trace"])
        case "CONTROL" if message["control"]["type"] == "CONNECTOR_CONFIG":
            return Configuration(dict(message["control"]["connectorConfig"]["config"]))
        case "CATALOG":
            return Catalog([dict(stream) for stream in message["catalog"]["streams"]])
        case "SPEC":
            return Specification([*message["spec"]["connectionSpecification"].get("required", [])])
        case "CONNECTION_STATUS":
            status = message["connectionStatus"]
            return Connection(status["status"] == "SUCCEEDED", str(status.get("message") or ""))
        case _:
            return None


def _state(state: Mapping[str, Any]) -> State:
    if state.get("type") == "STREAM":
        return State(StreamName.of(state["stream"]["stream_descriptor"]), state)
    if state.get("type") == "GLOBAL":
        return State(None, {"type": "GLOBAL", "global": state["global"]})
    return State(None, {"type": "LEGACY", "data": state["data"]})


def _trace(trace: Mapping[str, Any]) -> Message | None:
    match trace["type"]:
        case "STREAM_STATUS":
            status = trace["stream_status"]
            return Status(StreamName.of(status["stream_descriptor"]), str(status["status"]))
        case "ERROR":
            error = trace["error"]
            stream = error.get("stream_descriptor")
            kind = error.get("failure_type")
            return Failure(
                StreamName.of(stream) if stream else None,
                kind if kind in ("config_error", "transient_error") else "system_error",
                str(error.get("message") or ""),
            )
        case _:
            return None


def state_file(states: Iterable[Mapping[str, Any]]) -> Any:
    """Return the content of the state file for a run that continues: a list of states, or the blob of a program that
    knows no other."""
    states = list(states)
    legacy = [state["data"] for state in states if state.get("type") == "LEGACY"]
    return legacy[0] if legacy else states


def configured(stream: Mapping[str, Any], sync: str, cursor: str | None, key: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a stream in the configured catalog. cursor and key: fields with dots."""
    cursor_field = cursor.split(".") if cursor else stream.get("default_cursor_field") or []
    return {
        "stream": dict(stream),
        "sync_mode": sync,
        "destination_sync_mode": "append_dedup" if sync == "incremental" else "overwrite",
        "cursor_field": cursor_field,
        "primary_key": [name.split(".") for name in key],
    }


def primary_key(stream: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the primary key that the program names."""
    return tuple(".".join(map(str, path)) for path in stream.get("source_defined_primary_key") or [])


def value_at(data: Any, path: str) -> Any:
    """Return the value of a field, or of a field within a field: ``owner.name``. Within an array, the values of all
    elements. None where there is none."""
    if isinstance(data, dict):
        if path in data:
            return data[path]
        name, _, rest = path.partition(".")
        return value_at(data[name], rest) if rest and name in data else None
    if isinstance(data, list):
        values = [value_at(element, path) for element in data]
        return [value for value in values if value is not None]
    return None


def has_field(schema: Mapping[str, Any], path: str) -> bool:
    """Return whether a JSON schema has a field, or may have it."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        items = schema.get("items")
        return has_field(items, path) if isinstance(items, dict) else True
    if path in properties:
        return True
    name, _, rest = path.partition(".")
    return bool(rest) and isinstance(properties.get(name), dict) and has_field(properties[name], rest)


def without_secrets(text: str, configuration: Any) -> str:
    """Return one short line of a program's text, in which no value of its configuration stands."""
    for secret in sorted(set(_texts(configuration)), key=len, reverse=True):
        text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]} …"


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str() if len(value) >= MIN_SECRET_CHARACTERS:
            yield value
        case dict():
            for inner in value.values():
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)
        case _:
            return
