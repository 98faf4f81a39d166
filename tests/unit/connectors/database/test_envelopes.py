"""Records of change data capture, as Debezium and Kafka Connect write them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from connectors.database.envelopes import PLACEHOLDER, BadRecord, Change, change_of, key_of_record, merged
from pipeline.core.errors import Misconfigured

ROW = {"id": 7, "subject": "Printer"}


def raw(value: object, *, wrapped: bool = False) -> bytes:
    return json.dumps({"schema": {"type": "struct"}, "payload": value} if wrapped else value).encode()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("payload", "change"),
    [
        ({"op": "c", "before": None, "after": ROW}, Change("row", ROW)),
        ({"op": "r", "before": None, "after": ROW}, Change("row", ROW)),
        ({"op": "u", "before": {"id": 7}, "after": ROW}, Change("row", ROW)),
        ({"op": "d", "before": ROW, "after": None}, Change("deleted")),
        ({"op": "t", "before": None, "after": None}, Change("truncated")),
        ({"op": "m", "message": {"prefix": "p"}}, Change("nothing")),
        ({"ts_ms": 1}, Change("nothing")),
        ({"status": "BEGIN", "id": "571", "event_count": None}, Change("nothing")),
        ({"source": {}, "ddl": "CREATE TABLE t ()", "tableChanges": []}, Change("nothing")),
    ],
)
def test_envelopes(payload: dict[str, Any], change: Change, wrapped: bool) -> None:
    assert change_of(raw(payload, wrapped=wrapped), "debezium") == change


@pytest.mark.parametrize("wrapped", [False, True])
def test_flat_rows(wrapped: bool) -> None:
    assert change_of(raw(ROW, wrapped=wrapped), "flat") == Change("row", ROW)
    assert change_of(raw({**ROW, "__deleted": "false"}, wrapped=wrapped), "flat") == Change("row", ROW)
    assert change_of(raw({**ROW, "__deleted": "true"}, wrapped=wrapped), "flat") == Change("deleted")
    assert change_of(raw(None, wrapped=wrapped), "flat") == Change("deleted")
    assert change_of(None, "flat") == change_of(None, "debezium") == Change("deleted")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"7", "no JSON object"),
        (raw({"op": "u", "before": ROW}), "without the row"),
        (raw({"op": "x"}), "no envelope"),
        (raw(ROW), 'format = "flat"'),
    ],
)
def test_what_is_no_envelope(value: bytes, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        change_of(value, "debezium")


def test_another_format_than_json_is_for_an_operator() -> None:
    with pytest.raises(Misconfigured, match="JsonConverter"):
        change_of(b"\x00\x00\x00\x00\x01abc", "debezium")


def test_keys_are_equal_with_and_without_a_schema_and_in_any_order() -> None:
    keys = {key_of_record(raw({"a": 1, "b": "x"}, wrapped=wrapped)) for wrapped in (False, True)}
    assert keys == {key_of_record(raw({"b": "x", "a": 1}))}
    assert key_of_record(raw(7)) == "7"
    assert key_of_record(None) is None
    with pytest.raises(BadRecord):
        key_of_record(b"plain")


def test_values_that_were_not_logged_stay_as_they_were() -> None:
    encoded = base64.b64encode(PLACEHOLDER.encode()).decode()
    placeholders = {"text": PLACEHOLDER, "tags": [PLACEHOLDER], "raw": encoded, "map": {PLACEHOLDER: PLACEHOLDER}}
    before = {"id": 7, "text": "long", "tags": ["a"], "raw": "eA==", "map": {"a": "b"}}
    assert merged({"id": 7, **placeholders}, before) == before
    assert merged({"id": 7, **placeholders}, None) == {"id": 7, **placeholders}
    assert merged({"text": "new"}, before) == {"text": "new"}
