"""A dead letter gives its record back exactly, whatever the record was; so does a replayed one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.letters import (
    CONNECT,
    OURS,
    REPLAY,
    Failure,
    NotALetter,
    RawRecord,
    Replay,
    mark_replay,
    read_replay,
    seal,
    unseal,
)
from topics.registry import MAX_MESSAGE_BYTES

WHEN = datetime(2026, 11, 21, 3, 4, 5, 678, tzinfo=UTC)
FAILURE = Failure("documents.live.v1", 3, 41, "detect", "invalid", "title: too long", 1, WHEN, WHEN)
REPLAYED = Replay("documents.live.v1:3:41", 2, WHEN)

names = st.one_of(
    st.text(max_size=8),
    st.sampled_from([f"{CONNECT}topic", f"{OURS}attempt", f"{OURS}own-headers", f"{REPLAY}of", f"{REPLAY}own-headers"]),
)
values = st.one_of(st.binary(max_size=8), st.sampled_from([b"0", b"1", b"2", b"-1", b"99"]))
records = st.builds(
    RawRecord,
    st.none() | st.binary(max_size=20),
    st.none() | st.binary(max_size=50),
    st.lists(st.tuples(names, values), max_size=6),
)


@given(records)
def test_a_record_is_restored_unchanged_from_its_dead_letter(record: RawRecord) -> None:
    letter = unseal(seal(record, FAILURE))
    assert (letter.record, letter.failure, letter.omitted) == (record, FAILURE, {})


@given(records)
def test_a_dead_letter_of_a_dead_letter_is_restored_unchanged(record: RawRecord) -> None:
    inner = seal(record, FAILURE)
    assert unseal(seal(inner, FAILURE)).record == inner


@given(records)
def test_a_replayed_record_keeps_its_bytes_with_marks_appended_to_the_headers(record: RawRecord) -> None:
    marked = mark_replay(record, REPLAYED)
    assert (marked.key, marked.value) == (record.key, record.value)
    assert marked.headers[: len(record.headers)] == record.headers
    assert read_replay(marked.headers) == (record.headers, REPLAYED)


@given(records)
def test_headers_of_a_record_without_replay_marks_are_unchanged(record: RawRecord) -> None:
    own, replay = read_replay(record.headers)
    assert replay is None or own != record.headers
    if replay is None:
        assert own == record.headers


@pytest.mark.parametrize(
    "headers",
    [
        [(f"{REPLAY}own-headers", b"0")],
        [(f"{REPLAY}of", b"x"), (f"{REPLAY}own-headers", b"7")],
        [(f"{REPLAY}of", b"x"), (f"{REPLAY}own-headers", b"zero")],
        [*mark_replay(RawRecord(b"", b"", []), REPLAYED).headers, ("later", b"")],
        *(
            mark_replay(RawRecord(b"", b"", []), replay).headers
            for replay in (
                replace(REPLAYED, attempt=-5),
                replace(REPLAYED, first_failed_at=WHEN.replace(tzinfo=None)),
                replace(REPLAYED, first_failed_at=datetime.fromisoformat("0001-01-01T00:00:00+14:00")),
                replace(REPLAYED, first_failed_at=datetime.fromisoformat("9999-12-31T23:59:59-14:00")),
                replace(REPLAYED, letter="Ann Lovelace"),
                replace(REPLAYED, letter="documents.live.v1:3:" + "4" * 20),
                replace(REPLAYED, letter="x" * 10_000 + ":3:41"),
            )
        ),
    ],
)
def test_invalid_replay_marks_are_treated_as_the_records_own_headers(headers: list[tuple[str, bytes]]) -> None:
    assert read_replay(headers) == (headers, None)


def test_dead_letter_headers_follow_kafka_connect() -> None:
    sealed = seal(RawRecord(b"k", b"v", [("a", b"1")]), FAILURE)
    assert sealed.headers == [
        ("a", b"1"),
        ("__connect.errors.topic", b"documents.live.v1"),
        ("__connect.errors.partition", b"3"),
        ("__connect.errors.offset", b"41"),
        ("__connect.errors.stage", b"detect"),
        ("__connect.errors.exception.class.name", b"invalid"),
        ("__connect.errors.exception.message", b"title: too long"),
        ("penstock.dead.attempt", b"1"),
        ("penstock.dead.failed-at", b"2026-11-21T03:04:05.000678+00:00"),
        ("penstock.dead.first-failed-at", b"2026-11-21T03:04:05.000678+00:00"),
        ("penstock.dead.own-headers", b"1"),
    ]


def test_oversized_parts_of_a_dead_letter_are_replaced_by_size_and_digest() -> None:
    huge = b"x" * (MAX_MESSAGE_BYTES + 1)
    value = unseal(seal(RawRecord(b"k", huge, [("a", b"1")]), FAILURE))
    assert (value.record, list(value.omitted)) == (RawRecord(b"k", None, [("a", b"1")]), ["value"])
    assert value.omitted["value"].startswith(f"{len(huge)} bytes, sha256 ")
    headers = unseal(seal(RawRecord(b"k", b"v", [("a", huge)]), FAILURE))
    assert (headers.record, list(headers.omitted)) == (RawRecord(b"k", None, []), ["value", "headers"])
    key = unseal(seal(RawRecord(huge, None, []), FAILURE))
    assert (key.record, list(key.omitted)) == (RawRecord(b"", None, []), ["key"])


@pytest.mark.parametrize("headers", [[], [("a", b"1")], [(f"{OURS}own-headers", b"0")]])
def test_a_record_without_dead_letter_headers_is_not_a_dead_letter(headers: list[tuple[str, bytes]]) -> None:
    with pytest.raises(NotALetter):
        unseal(RawRecord(b"k", b"v", headers))
