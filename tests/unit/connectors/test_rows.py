"""Rows become documents as the options declare, and what does not fit is denied."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from connectors.database.options import DatabaseOptions
from connectors.rows import (
    BadValue,
    NoValue,
    Template,
    bounded,
    external_id,
    is_true,
    key_of,
    tags_of,
    text_of,
    time_of,
)
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from pipeline.core.errors import Misconfigured

BASE: dict[str, Any] = {"dsn": "sqlite://", "table": "t", "title": "{subject}", "text": "{subject}\n\n{body}"}
ROW = {"id": 7, "subject": "Printer", "body": "It is on fire.", "team": "staff", "level": "", "v": 1, "gone": None}


def template(**options: Any) -> Template:
    declared = DatabaseOptions.model_validate({**BASE, **options})
    return Template(declared, declared.id, revision=declared.revision)


def entry(options: dict[str, Any], **values: Any) -> Entry:
    [entry] = template(**options).entries([{**ROW, **values}]).values()
    return entry


def test_a_row_becomes_the_declared_document() -> None:
    options = {
        "url": "https://desk.example/{id}",
        "author": "{team}",
        "acl": ["team"],
        "modified": "at",
        "metadata": ["price", "labels"],
    }
    at = datetime(2026, 11, 21, 8, 30, tzinfo=UTC)
    document = entry(options, at=at, price=Decimal("1.50"), labels=["a", date(2026, 1, 2)])
    assert isinstance(document, Document)
    assert (document.external_id, document.title, document.content) == ("7", "Printer", "Printer\n\nIt is on fire.")
    assert (document.source_url, document.author) == ("https://desk.example/7", "staff")
    assert (document.source_modified_at, document.acl_tags) == (at, ("staff",))
    assert document.metadata == {"price": "1.50", "labels": ["a", "2026-01-02"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": "SELECT 1"}, "either table or query"),
        ({"table": None}, "either table or query"),
        ({"text": "{body.__class__}"}, "write {column}"),
        ({"text": "{body!r}"}, "write {column}"),
        ({"text": "{body:>9999999}"}, "write {column}"),
        ({"text": "{0}"}, "write {column}"),
        ({"text": "{"}, "Single '{'"),
        ({"url": "javascript:{id}"}, "write an https address"),
        ({"url": "{scheme}://{host}"}, "write an https address"),
        ({"acl": ["team"], "acl_tags": ["staff"]}, "acl_tags would open every row"),
        ({"members_query": "SELECT 1", "members": {"a": ["b"]}}, "either members_query"),
        ({"id": []}, "at least 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        template(**options)


@pytest.mark.parametrize(
    ("value", "tags"),
    [
        (["a", "b"], ["a", "b"]),
        ("a, b,,", ["a", "b"]),
        ('["a", "b, c"]', ["a", "b, c"]),
        ("user:ann@acme.example", ["user:ann@acme.example"]),
        (7, ["7"]),
        ("", []),
    ],
)
def test_access_columns_hold_tags_in_usual_forms(value: object, tags: list[str]) -> None:
    assert tags_of("team", value) == tags


TOO_MANY_TAGS = ",".join(f"team-{n}" for n in range(1_001))


@pytest.mark.parametrize("value", ['["a"', ["a", None], {"a": "b"}, 1.5, True, b"a", '[{"a": 1}]', [""], TOO_MANY_TAGS])
def test_a_row_with_an_invalid_access_value_can_be_read_by_nobody(value: object) -> None:
    for options in ({"acl": ["team"]}, {"acl_tags": ["all"], "required": ["team"]}):
        denied = entry(options, team=value)
        assert isinstance(denied, Unreadable)
        assert (denied.code, denied.acl_tags, denied.required_tags) == ("bad_access", (), ())
        assert "column team" in denied.message


def test_null_admits_nobody_and_null_requirements_deny_everybody() -> None:
    assert entry({"acl": ["team"]}, team=None).acl_tags == ()  # type: ignore[union-attr]
    required = {"acl_tags": ["all"], "required": ["level"]}
    assert isinstance(entry(required, level=None), Unreadable)
    assert isinstance(entry(required, level=""), Document)


def test_several_rows_with_one_id_can_be_read_by_nobody() -> None:
    """A join of documents and readers returned each document several times, with a reader each."""
    made = template(acl=["team"])
    rows = [ROW, {**ROW, "team": "board"}, {**ROW, "id": 8}]
    entries = made.entries(rows)
    assert isinstance(entries["7"], Unreadable)
    assert (entries["7"].code, entries["7"].acl_tags) == ("ambiguous", ())
    assert isinstance(entries["8"], Document)
    assert [(listed.external_id, list(listed.acl_tags)) for listed in made.listed(rows)] == [
        ("7", []),
        ("8", ["staff"]),
    ]


def test_deleted_rows_are_gone_unless_another_row_has_their_id() -> None:
    made = template(deleted="gone", acl_tags=["all"])
    deleted = {**ROW, "gone": datetime(2026, 1, 1, tzinfo=UTC)}
    assert made.entries([deleted]) == {"7": Gone("7")}
    assert made.listed([deleted]) == []
    for rows in ([deleted, ROW], [ROW, deleted]):
        assert isinstance(made.entries(rows)["7"], Document)


@pytest.mark.parametrize(
    ("value", "deleted"),
    [
        *((value, False) for value in (None, False, 0, b"\x00", "", "false", "f")),
        *((value, True) for value in (True, 1, b"\x01", "2026-01-01", datetime(2026, 1, 1), "true")),
    ],
)
def test_marks_of_deletion(value: object, deleted: bool) -> None:
    assert is_true(value) is deleted


@pytest.mark.parametrize("revision", [None, "v"])
def test_a_listing_shows_what_reading_shows(revision: str | None) -> None:
    made = template(revision=revision, acl=["team"], required=["level"], deleted="gone")
    bad = [{"body": b"\x00"}, {"team": 1.5}, {"level": None}, {"team": None}, {"gone": True}, {}]
    rows = [{**ROW, "id": number, **values} for number, values in enumerate(bad)]
    read = [
        Listed(external_id=e.external_id, acl_tags=e.acl_tags, required_tags=e.required_tags, revision=e.revision)
        for e in made.entries(rows).values()
        if not isinstance(e, Gone)
    ]
    assert made.listed([{name: row[name] for name in made.listed_columns} for row in rows]) == read
    assert len(read) == len(rows) - 1


@pytest.mark.parametrize("revision", [None, "v"])
def test_another_declaration_makes_another_revision(revision: str | None) -> None:
    [first] = template(revision=revision).entries([ROW]).values()
    [second] = template(revision=revision, text="{body}").entries([ROW]).values()
    assert first.revision != second.revision  # type: ignore[union-attr]


def test_access_that_becomes_valid_is_read_again_although_the_revision_column_is_the_same() -> None:
    made = template(revision="v", acl=["team"])
    [denied], [allowed] = made.listed([{**ROW, "team": 1.5}]), made.listed([ROW])
    assert denied.revision != allowed.revision


def test_half_of_a_character_concerns_its_row_and_no_other() -> None:
    """Where a topic is read as a table, the author of one value stopped the reading of all rows."""
    options = {"acl_tags": ["all"], "url": "https://a.example/{subject}", "id": ["id", "subject"]}
    entries = template(**options).entries([{**ROW, "subject": "\ud800"}, ROW])
    assert list(entries) == ["7/%ED%A0%80", "7/Printer"]


class Odd:
    """A value of a driver that fails however it is used."""

    def __eq__(self, other: object) -> bool:
        raise AttributeError("no such thing")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("row", "code"), [({"body": {1: "a", "b": 2}}, "bad_value"), ({"deleted": Odd()}, "bad_access")]
)
def test_a_value_that_no_code_expects_concerns_its_row_and_no_other(row: dict[str, object], code: str) -> None:
    options = {"acl_tags": ["all"], "deleted": "deleted"}
    entries = template(**options).entries([{**ROW, "deleted": None, **row}, {**ROW, "id": 8, "deleted": None}])
    odd, good = entries["7"], entries["8"]
    assert isinstance(odd, Unreadable)
    assert (odd.code, tuple(odd.acl_tags)) == (code, () if code == "bad_access" else ("all",))
    assert isinstance(good, Document)


def test_values_of_a_row_cannot_leave_their_place_in_an_address() -> None:
    document = entry({"url": "https://desk.example/{subject}"}, subject="a/../b?c#d e")
    assert document.source_url == "https://desk.example/a%2F..%2Fb%3Fc%23d%20e"  # type: ignore[union-attr]
    for address, expected in (("https://a.example/b?c=d", "https://a.example/b?c=d"), ("javascript:alert(1)", None)):
        assert entry({"url": "{link}"}, link=address).source_url == expected  # type: ignore[union-attr]


def test_braces_in_a_value_are_text() -> None:
    assert entry({}, body="{subject} {0} {}").content == "Printer\n\n{subject} {0} {}"  # type: ignore[union-attr]


@pytest.mark.parametrize("values", [[[]] * 1_200_000, {"a": [0.5] * 3_000_000}])
def test_lists_that_take_very_much_memory_are_not_retained(values: object) -> None:
    """A value of JSON of a few megabytes can take a hundred."""
    values = json.loads(json.dumps(values))  # the same list in many places would take none
    row = bounded({"id": values, "body": values, "tags": ["a"] * 1_000, "vector": [0.5] * 1_536}, ["id"])
    assert isinstance(row["body"], NoValue)
    assert (row["id"], row["tags"], row["vector"]) == (values, ["a"] * 1_000, [0.5] * 1_536)


def test_binary_values_are_no_text() -> None:
    unreadable = entry({"acl_tags": ["all"]}, body=b"secret")
    assert isinstance(unreadable, Unreadable)
    assert unreadable.code == "bad_value"
    assert "column body holds bytes" in unreadable.message
    assert "secret" not in unreadable.message


def test_text_of_values() -> None:
    values = [None, True, 1, Decimal("1.0"), date(2026, 1, 2), ["a", 1], {"ä": [1]}, UUID(int=1)]
    assert [text_of("c", value) for value in values] == [
        "",
        "true",
        "1",
        "1.0",
        "2026-01-02",
        "a, 1",
        '{"ä": [1]}',
        "00000000-0000-0000-0000-000000000001",
    ]


@pytest.mark.parametrize(
    "value",
    [
        1_795_941_000,
        1_795_941_000_000,
        1_795_941_000_000_000,
        1_795_941_000_000_000_000,
        "2026-11-29T08:30:00Z",
        "2026-11-29 08:30:00",
        datetime(2026, 11, 29, 8, 30),
    ],
)
def test_times_in_usual_forms(value: object) -> None:
    assert time_of("at", value) == datetime(2026, 11, 29, 8, 30, tzinfo=UTC)


@pytest.mark.parametrize("value", ["yesterday", True, [1], float("inf"), float("nan")])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(BadValue, match="column at"):
        time_of("at", value)


KEYS = st.one_of(st.integers(), st.text(), st.uuids(), st.decimals(allow_nan=False, allow_infinity=False))


@given(st.lists(KEYS, min_size=1, max_size=3).map(tuple))
def test_a_key_can_be_read_back_from_its_external_id(key: tuple[Any, ...]) -> None:
    assert key_of(external_id(key), [type(value) for value in key]) == key


@pytest.mark.parametrize("text", ["", "a", "07", " 7", "7.0", "7/8", "+7", "7\x00"])
def test_an_external_id_that_no_row_can_have(text: str) -> None:
    assert key_of(text, [int]) is None


@pytest.mark.parametrize("value", [True, None, 1.5, b"a", datetime(2026, 1, 1)])
def test_keys_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(Misconfigured, match="whole numbers, texts or UUIDs"):
        external_id((1, value))


def test_a_tag_that_a_join_repeats_counts_once() -> None:
    """Its 1,500 values left the document without readers."""
    assert tags_of("team", [f"team-{n % 20}" for n in range(1_500)]) == [f"team-{n}" for n in range(20)]
    with pytest.raises(BadValue, match="more than 1,000 tags"):
        tags_of("team", list(range(1_001)))
