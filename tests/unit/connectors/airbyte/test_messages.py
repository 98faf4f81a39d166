"""The messages that a program writes by Airbyte's protocol are understood, whatever else it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.airbyte.messages import (
    Broken,
    Configuration,
    Failure,
    Lines,
    Record,
    State,
    Status,
    StreamName,
    Unstorable,
    has_field,
    parsed,
    state_file,
    value_at,
    without_secrets,
)

TOO_LARGE = "a record is larger than max_record_bytes"


def line(kind: str, **content: Any) -> bytes:
    return json.dumps({"type": kind, **content}).encode()


STREAM_STATE = {"type": "STREAM", "stream": {"stream_descriptor": {"name": "s"}, "stream_state": {"at": 7}}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            line("RECORD", record={"stream": "s", "namespace": "n", "data": {"id": 1}}),
            Record(StreamName("s", "n"), {"id": 1}),
        ),
        (line("STATE", state=STREAM_STATE), State(StreamName("s"), STREAM_STATE)),
        (line("STATE", state={"data": {"s": 7}}), State(None, {"type": "LEGACY", "data": {"s": 7}})),
        (
            line("STATE", state={"type": "GLOBAL", "global": {"stream_states": []}, "data": {"s": 7}}),
            State(None, {"type": "GLOBAL", "global": {"stream_states": []}}),
        ),
        (
            line(
                "TRACE",
                trace={
                    "type": "STREAM_STATUS",
                    "stream_status": {"stream_descriptor": {"name": "s"}, "status": "COMPLETE"},
                },
            ),
            Status(StreamName("s"), "COMPLETE"),
        ),
        (line("TRACE", trace={"type": "ERROR", "error": {"message": "m"}}), Failure(None, "system_error", "m")),
        (line("TRACE", trace={"type": "ESTIMATE", "estimate": {}}), None),
        (
            line("CONTROL", control={"type": "CONNECTOR_CONFIG", "connectorConfig": {"config": {"a": 1}}}),
            Configuration({"a": 1}),
        ),
        (line("LOG", log={"level": "INFO", "message": "m"}), None),
        (line("SOMETHING_NEWER", a=1), None),
        (b"a library prints a line", None),
    ],
)
def test_messages_are_understood(raw: bytes, message: object) -> None:
    assert parsed(raw) == message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"type": "RECORD", "record": {"stream": "s", "da{"type": "LOG"}',
        line("RECORD", record={"stream": "s"}),
        line("RECORD", record={"stream": "s", "data": [1]}),
        line("STATE", state={}),
        line("RECORD"),
    ],
)
def test_a_broken_message_is_an_error_that_does_not_quote_it(raw: bytes) -> None:
    with pytest.raises(Broken) as raised:
        parsed(raw)
    assert "da{" not in str(raised.value)


PARTS = (st.binary(max_size=30) | st.binary(max_size=30).map(lambda part: b"{" + part)).filter(lambda p: b"\n" not in p)


@given(st.lists(PARTS), st.data())
def test_lines_are_the_same_however_they_arrive(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"\n".join(parts)
    lines, at, received = Lines(20), 0, []
    while at < len(raw):
        size = data.draw(st.integers(1, 25))
        received += lines.feed(raw[at : at + size])
        at += size
    received += lines.finish()
    fitting = [part for part in parts if (part.strip() if len(part) <= 20 else part.lstrip().startswith(b"{"))]
    expected = [part if len(part) <= 20 else Unstorable(None, TOO_LARGE) for part in fitting]
    assert received == expected


@pytest.mark.parametrize("value", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "1" * 5_000, f"[{'[],' * 2_000}1]"])
def test_a_record_that_is_not_read_is_not_one_of_a_broken_program(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.json_values.MAX_VALUES", 2_000)
    raw = f'{{"type": "RECORD", "record": {{"stream": "notes", "data": {{"id": 1, "body": {value}}}}}}}'
    message = parsed(raw.encode())
    assert isinstance(message, Unstorable)
    assert message.stream == "notes"
    assert parsed(f'{{"type": "LOG", "log": {{"message": {value}}}}}'.encode()) is None


def test_of_an_oversize_record_the_stream_is_known() -> None:
    raw = line("RECORD", record={"stream": "notes", "data": {"body": "x" * 5_000}})
    lines = Lines(1_024)
    assert [*lines.feed(raw + b"\n" + b"{}\n")] == [Unstorable("notes", TOO_LARGE), b"{}"]


def test_a_program_is_handed_the_states_that_it_wrote() -> None:
    assert state_file([STREAM_STATE]) == [STREAM_STATE]
    assert state_file([{"type": "LEGACY", "data": {"s": 7}}]) == {"s": 7}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", 1),
        ("owner.name", "Ann"),
        ("owner.team.name", None),
        ("labels.name", ["a", "b"]),
        ("a.b", "dotted"),
        ("missing", None),
    ],
)
def test_a_field_within_a_field_has_the_value_that_is_there(path: str, value: object) -> None:
    labels = [{"name": "a"}, {"name": "b"}, {"color": "red"}]
    data = {"id": 1, "owner": {"name": "Ann", "team": None}, "labels": labels, "a.b": "dotted"}
    assert value_at(data, path) == value


def test_a_schema_says_which_fields_a_record_may_have() -> None:
    inner = {"properties": {"name": {}}}
    schema = {"properties": {"id": {}, "owner": inner, "labels": {"items": inner}, "free": {"type": "object"}}}
    names = ["id", "owner.name", "labels.name", "free.any", "owner.mail", "nothing"]
    assert [has_field(schema, name) for name in names] == [True, True, True, True, False, False]


def test_a_message_of_the_program_shows_no_value_of_its_configuration() -> None:
    configuration = {"url": "https://desk.example", "auth": {"tokens": ["s3cret-token", "s3cret"]}, "unit": "day"}
    text = "401 for https://desk.example/?token=s3cret-token\n(s3cret), once a day"
    assert without_secrets(text, configuration) == "401 for ***/?token=*** (***), once a day"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"type": "RECORD", "record": {"stream": "notes", "data": {"id": 1}}}', [Unstorable("notes", TOO_LARGE)]),
        (b'{"record": {"stream": "notes", "data": {"id": 1}}, "type": "RECORD"}', [Unstorable("notes", TOO_LARGE)]),
        (b'{"type": "TRACE", "trace": {"type": "ERROR", "error": {}}}', [Unstorable(None, TOO_LARGE)]),
        (b'{"type": "LOG", "log": {"level": "INFO", "message": "many words"}}', []),
        (b"a library prints many words", []),
    ],
)
def test_an_oversize_line_of_a_log_is_no_lost_record(line: bytes, expected: list[Unstorable]) -> None:
    assert [*Lines(20).feed(line + b"\n")] == expected
