"""The audit trail's chains: whatever is done to a stored trail is found."""

from __future__ import annotations

import os
import pwd
import tracemalloc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from pipeline.core.trail import (
    KEY_OVERLAP,
    UNANCHORED,
    Day,
    Finding,
    Head,
    Heads,
    Keys,
    Record,
    Sealed,
    seal,
    seal_head,
)
from pipeline.ledger.trail import MOST_FINDINGS, TrailReport
from pipeline.runtime.settings import RetentionSettings, TrailSettings
from pipeline.trail import recorded
from query.http.app import describe_app
from query.http.audit_trail import ACTIONS, UNRECORDED

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
KEYS = Keys("k" * 32)
LATER = NOON + timedelta(hours=3)


def record(number: int, **fields: object) -> Record:
    made = Record(NOON + timedelta(seconds=number), "ann", "token", "search", "acme", documents=(UUID(int=number),))
    return replace(made, **fields)  # type: ignore[arg-type]


def make_chain(chain: UUID, count: int, keys: Keys = KEYS) -> list[Sealed]:
    rows: list[Sealed] = []
    for number in range(1, count + 1):
        rows.append(seal(keys, record(number), chain, number, "query@host:1", rows[-1].mac if rows else b""))
    return rows


def make_head(
    rows: Sequence[Sealed], at: datetime | None = None, before: Head | None = None, keys: Keys = KEYS
) -> Head:
    last = rows[-1]
    number, previous = (before.number + 1, before.mac) if before else (1, b"")
    at = at or last.record.at
    return seal_head(keys, Head(number, at, last.record.day, last.chain, last.number, last.mac, ""), previous)


def findings_of(
    rows: Sequence[Sealed], heads: Sequence[Head], keys: Keys = KEYS, noted: Collection[tuple[int, bytes]] = ()
) -> set[str]:
    checked = Heads(keys, oldest=None, noted=noted)
    findings: list[Finding] = [*(finding for head in heads for finding in checked.head(head)), *checked.end()]
    day = Day(keys, NOON.date(), checked.of.get(NOON.date(), {}), LATER)
    for row in sorted(rows, key=lambda row: (row.chain, row.number)):
        findings += day.record(row)
    findings += day.end()
    assert all(finding.line for finding in findings)
    return {finding.kind for finding in findings}


def kinds_of(heads: Sequence[Head], oldest: date) -> list[str]:
    """The findings about heads of which earlier ones may have gone by age."""
    checked = Heads(KEYS, oldest=oldest)
    return [finding.kind for head in heads for finding in checked.head(head)] + [f.kind for f in checked.end()]


def relink_heads(heads: Sequence[Head], keys: Keys) -> list[Head]:
    """Each made anew with its own key, behind the one before."""
    known = {Keys(key).id: Keys(key) for key in (keys.newest, *keys.previous)}
    made: list[Head] = []
    for head in heads:
        made.append(seal_head(known[head.key_id], head, made[-1].mac if made else b""))
    return made


ONE, TWO = UUID(int=1), UUID(int=2)


@pytest.fixture
def rows() -> list[Sealed]:
    return [*make_chain(ONE, 8), *make_chain(TWO, 5)]


@pytest.fixture
def heads(rows: list[Sealed]) -> list[Head]:
    first = make_head(rows[:3])
    second = make_head(rows[8:], before=first)
    return [first, second, make_head(rows[:8], before=second)]


def test_an_unmodified_trail_is_intact(rows: list[Sealed], heads: list[Head]) -> None:
    assert findings_of(rows, heads) == set()
    assert findings_of([], []) == set()


FIELDS: dict[str, object] = {
    "at": NOON,
    "actor": "eve",
    "credential": "key",
    "action": "answer",
    "tenant": "other",
    "access": ("user:eve",),
    "object": "x",
    "documents": (),
    "decision": "refused",
    "reason": "x",
    "address": "10.0.0.1",
    "request": "x",
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_field_of_a_trail_record_is_detected(rows: list[Sealed], heads: list[Head], field: str) -> None:
    assert set(FIELDS) == set(Record.__dataclass_fields__)
    rows[4] = replace(rows[4], record=replace(rows[4].record, **{field: FIELDS[field]}))
    assert findings_of(rows, heads) == {"altered"}


def test_a_changed_process_of_a_trail_record_is_detected(rows: list[Sealed], heads: list[Head]) -> None:
    rows[4] = replace(rows[4], process="another")
    assert findings_of(rows, heads) == {"altered"}


@pytest.mark.parametrize("index", range(13))
def test_a_removed_trail_record_is_detected(rows: list[Sealed], heads: list[Head], index: int) -> None:
    del rows[index]
    assert findings_of(rows, heads) in ({"removed"}, {"cut-off"})


def test_removed_and_renumbered_trail_records_are_detected(rows: list[Sealed], heads: list[Head]) -> None:
    closed = [*rows[:4], *(replace(row, number=row.number - 1) for row in rows[5:8]), *rows[8:]]
    assert findings_of(closed, heads) == {"altered", "cut-off"}


def test_swapped_trail_records_are_detected(rows: list[Sealed], heads: list[Head]) -> None:
    rows[4], rows[5] = replace(rows[5], number=5), replace(rows[4], number=6)
    assert findings_of(rows, heads) == {"altered"}


def test_an_inserted_trail_record_is_detected(rows: list[Sealed], heads: list[Head]) -> None:
    forged = seal(Keys("another key of thirty-two letters"), record(9), ONE, 9, "query@host:1", rows[7].mac)
    assert findings_of([*rows, replace(forged, key_id=KEYS.id)], heads) == {"altered"}
    assert findings_of([*rows, forged], heads) == {"unknown-key"}
    without_key = make_chain(uuid4(), 2, Keys())
    assert findings_of([*rows, *without_key], heads) == {"unknown-key", "without-head"}


def test_a_chain_that_lost_its_end_is_detected(rows: list[Sealed], heads: list[Head]) -> None:
    assert findings_of([*rows[:6], *rows[8:]], heads) == {"cut-off"}
    assert findings_of(rows[:8], heads) == {"chain-removed"}


def test_removed_changed_and_swapped_heads_are_detected(rows: list[Sealed], heads: list[Head]) -> None:
    assert findings_of(rows, [heads[0], heads[2]]) >= {"head-removed"}
    assert findings_of(rows, heads[1:]) == {"head-removed"}
    assert "head-altered" in findings_of(rows, [heads[0], replace(heads[1], count=4, digest=rows[11].mac), heads[2]])
    assert findings_of(rows[:8], [heads[0], replace(heads[2], number=2)]) == {"head-altered"}


def test_a_chain_rewritten_without_the_key_is_detected(rows: list[Sealed], heads: list[Head]) -> None:
    again = make_chain(ONE, 7, Keys())
    first = make_head(rows[8:], keys=Keys())
    anew = [*again, *rows[8:]], [first, make_head(again, before=first, keys=Keys())]
    assert findings_of(*anew) == {"unknown-key"}
    assert findings_of(*anew, Keys(KEYS.newest, [None])) == set(), (
        "where it is said that there are older ones without a key"
    )


def test_removing_the_newest_records_and_heads_is_detected_by_a_head_noted_elsewhere(
    rows: list[Sealed], heads: list[Head]
) -> None:
    kept = [(heads[2].number, heads[2].mac)]
    assert findings_of(rows, heads, noted=kept) == set()
    assert findings_of([*rows[:3], *rows[8:]], heads[:2]) == set(), "within the database nothing is missing"
    assert findings_of([*rows[:3], *rows[8:]], heads[:2], noted=kept) == {"heads-cut-off"}
    again = make_head(rows[:3], before=heads[1])
    assert findings_of([*rows[:3], *rows[8:]], [*heads[:2], again], noted=kept) == {"heads-cut-off"}
    logged = [*kept, (again.number, again.mac)]
    assert findings_of([*rows[:3], *rows[8:]], [*heads[:2], again], noted=logged) == {"heads-cut-off"}, (
        "a process that goes on after the removal logs a head of the same number"
    )


def test_a_killed_process_leaves_an_intact_trail(rows: list[Sealed], heads: list[Head]) -> None:
    tail = make_chain(TWO, 60)
    assert findings_of([*rows[:8], *tail], heads) == set(), "what came after its last head"
    last = replace(tail[-1].record, at=NOON + UNANCHORED + timedelta(minutes=1))
    added = seal(KEYS, last, TWO, 61, "query@host:1", tail[-1].mac)
    assert findings_of([*rows[:8], *tail, added], heads) == {"without-head"}


def test_heads_removed_by_retention_are_not_reported_as_missing(rows: list[Sealed], heads: list[Head]) -> None:
    next_day = heads[1].day + timedelta(days=1)
    assert kinds_of(heads[1:], next_day) == []
    assert kinds_of(heads[1:], heads[1].day) == ["head-removed"]


def test_a_changed_day_of_the_first_head_does_not_hide_that_earlier_heads_were_removed(heads: list[Head]) -> None:
    """Nothing authenticates the first head that is left: without the key, all before it could be removed."""
    oldest = heads[0].day - timedelta(days=400)
    aged = replace(heads[1], day=oldest - timedelta(days=20))
    assert kinds_of([aged, heads[2]], oldest) == ["head-removed"]
    assert kinds_of([aged], oldest) == ["head-removed"]


def test_a_flood_of_heads_takes_little_memory_and_a_flood_of_findings_is_counted() -> None:
    """Every login of ours may add heads and records. A million of them ended the check for want of memory."""

    def flood() -> Iterator[Head]:
        return (Head(n, NOON, NOON.date(), ONE, n, bytes(32), KEYS.id, bytes(32)) for n in range(1, 50_001))

    checked, report = Heads(KEYS, oldest=None), TrailReport()
    tracemalloc.start()
    try:
        for head in flood():
            report.add(checked.head(head))
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()
    assert (len(report.findings), report.more) == (MOST_FINDINGS, 50_000 - MOST_FINDINGS)
    assert (checked.count, checked.of[NOON.date()][ONE].count) == (50_000, 50_000)


def test_older_trail_records_are_verified_with_the_previous_key(rows: list[Sealed], heads: list[Head]) -> None:
    assert findings_of(rows, heads, Keys("n" * 32, ["k" * 32])) == set()
    assert findings_of(rows, heads, Keys("n" * 32)) == {"unknown-key"}


@pytest.mark.parametrize("older", [None, "o" * 32], ids=["no key", "an old key"])
def test_trail_records_added_with_a_replaced_key_are_detected(
    rows: list[Sealed], heads: list[Head], older: str | None
) -> None:
    """Whose key was taken from him, or who never had one, adds a chain with a head of its own, or lengthens another."""
    was, keys = Keys(older), Keys(KEYS.newest, [older])
    before = make_chain(UUID(int=3), 2, was)
    begun = make_head(before, keys=was)
    known = relink_heads([begun, *(replace(head, number=head.number + 1) for head in heads)], keys)
    assert findings_of([*rows, *before], known, keys) == set(), "what is from before the key is not outdated"
    forged = make_chain(UUID(int=4), 1, was)
    at = heads[-1].at + KEY_OVERLAP + timedelta(seconds=1)
    assert findings_of([*rows, *before, *forged], [*known, make_head(forged, at, known[-1], was)], keys) == {
        "outdated-key"
    }
    during = make_head(forged, heads[-1].at, known[-1], was)
    assert findings_of([*rows, *before, *forged], [*known, during], keys) == set(), (
        "a process that is not started anew yet"
    )
    longer = seal(was, record(9), TWO, 6, "query@host:1", rows[-1].mac)
    assert findings_of([*rows, *before, longer], known, keys) == {"outdated-key"}
    later = seal_head(KEYS, Head(during.number, at, NOON.date(), TWO, 5, rows[-1].mac, ""), known[-1].mac)
    backdated = make_head(forged, heads[-1].at, later, was)
    assert findings_of([*rows, *before, *forged], [*known, later, backdated], keys) == {"outdated-key"}, (
        "whatever it says"
    )


def test_a_persons_pseudonym_in_the_trail_is_reproduced_only_with_the_key() -> None:
    name = KEYS.name("jane@acme.com")
    assert "jane" not in name
    assert name in Keys("n" * 32, ["k" * 32]).names("jane@acme.com")
    assert name not in Keys("n" * 32).names("jane@acme.com")


@given(st.text(max_size=2_000), st.text())
def test_any_actor_name_is_stored_in_a_bounded_form_without_nul(name: str, reason: str) -> None:
    one = record(1, actor=name, reason=reason)
    assert replace(one) == one
    stored = one.actor.encode()
    assert b"\x00" not in stored
    assert len(stored) <= 2_000


def test_a_command_is_recorded_under_the_operating_system_user_and_not_environment_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert recorded("export").actor == pwd.getpwuid(os.getuid()).pw_name


def test_a_record_of_very_many_documents_is_stored_in_parts_that_name_each_of_them() -> None:
    """The table refuses a record of more than 100,000, which an answer with a long history could have: it was tried
    again and again, and no other record of the process was written."""
    documents = tuple(UUID(int=n) for n in range(120_001))
    parts = record(1, documents=documents).parts
    assert [id_ for part in parts for id_ in part.documents] == list(documents)
    assert max(len(part.documents) for part in parts) <= 100_000
    assert {replace(part, documents=()) for part in parts} == {record(1, documents=())}
    assert list(record(1).parts) == [record(1)]
    assert list(record(1, documents=()).parts) == [record(1, documents=())]


def test_every_http_route_is_audited_or_listed_as_unrecorded() -> None:
    routes = {path for path in describe_app().openapi()["paths"] if path.startswith("/v1")}
    assert routes == ACTIONS.keys() | UNRECORDED
    assert not ACTIONS.keys() & UNRECORDED


def test_trail_settings_reject_a_short_key_and_a_short_retention() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        TrailSettings(key=SecretStr("short"))
    assert TrailSettings(key="").key is None, "as Compose says it"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 30"):
        RetentionSettings(trail_days=7)
