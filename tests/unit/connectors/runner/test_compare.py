"""Decisions of a connector about a source's response, given what was published last."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

from hypothesis import given
from hypothesis import strategies as st

from connectors.runner.compare import (
    Decision,
    Event,
    Observation,
    Row,
    access_of,
    decide,
    decide_access,
    fingerprint,
    is_stale,
)
from connectors.runner.membership import GroupMembers, merge_listing, tags_by_principal
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from pipeline.core.fold import State
from tests.support.pipeline.folded import fold_all
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

START = datetime(2026, 11, 21, tzinfo=UTC)


def seen(second: int) -> Observation:
    return Observation(tenant="t", source="s", at=START + timedelta(seconds=second))


def document(content: str = "text", **fields: object) -> Document:
    return Document(**{"external_id": "d", "title": "T", "content": content, "acl_tags": ["a"], **fields})  # type: ignore[arg-type]


def after(*entries: Entry) -> Row | None:
    row: Row | None = None
    for second, entry in enumerate(entries):
        row = decide(row, entry, seen(second)).row
    return row


def test_a_withdrawn_document_is_not_published_again_whatever_the_source_returns() -> None:
    row = after(document("one"))
    assert row is not None
    withdrawn = replace(row, is_withdrawn=True)
    decision = decide(withdrawn, document("two"), seen(5))
    assert [type(event) for event in decision.events] == [DocumentDeleted], "its row still said that it is published"
    assert decision.row is not None
    for answer in (document("three"), document("four", acl_tags=["b"]), Gone("d")):
        assert decide(decision.row, answer, seen(6)).events == []
    entry = Listed(external_id="d", acl_tags=["b"], required_tags=[], revision="9")
    assert decide_access(decision.row, entry, seen(6)).events == []
    assert not is_stale(decision.row, entry), "it is not read at every sweep for nothing"
    assert is_stale(withdrawn, entry)


entries = st.one_of(
    st.builds(
        document,
        st.sampled_from(["one", "two"]),
        acl_tags=st.lists(st.sampled_from("abc"), max_size=2),
        required_tags=st.lists(st.sampled_from("xy"), max_size=1),
    ),
    st.just(Gone("d")),
    st.builds(
        lambda acl: Unreadable(external_id="d", code="encrypted", message="a password", acl_tags=acl),
        st.lists(st.sampled_from("abc"), max_size=2),
    ),
)


@given(st.lists(entries, min_size=1, max_size=8))
def test_the_same_entry_twice_publishes_nothing_the_second_time(history: list[Entry]) -> None:
    row = after(*history)
    assert decide(row, history[-1], seen(100)).events == []


@given(st.lists(entries, min_size=1, max_size=8))
def test_the_published_events_end_in_the_sources_last_state(history: list[Entry]) -> None:
    """Folding the events as the ledger does ends with the last response and its readers."""
    text: str | None = None
    access: tuple[list[str], list[str]] = ([], [])
    version, row = -1, None
    for second, entry in enumerate(history):
        decision = decide(row, entry, seen(second))
        row = decision.row
        for event in decision.events:
            assert event.observed_at == seen(second).at
            match event:
                case DocumentUpserted():
                    assert event.version > version
                    version, text, access = event.version, event.content, (event.acl_tags, event.required_tags)
                case AccessChanged():
                    access = (event.acl_tags, event.required_tags)
                case DocumentDeleted():
                    text = None
    last = history[-1]
    assert isinstance(last, Gone) <= (text is None)
    if isinstance(last, Document):
        assert text == last.content
    if text is not None and not isinstance(last, Gone):
        assert access == (sorted(set(last.acl_tags)), sorted(set(last.required_tags)))


@given(st.lists(entries, min_size=2, max_size=6), st.data())
def test_an_entry_read_earlier_than_the_row_publishes_nothing(history: list[Entry], data: st.DataObject) -> None:
    row = after(*history)
    late = data.draw(entries)
    decision = decide(row, late, seen(-1))
    assert decision.outcome == "late"
    assert decision.events == []


Fate = Literal["confirmed", "sent", "not sent"]
"""The fate of an intent: confirmed; sent, with the confirmation lost; lost before anything was sent."""


def after_intent(row: Row | None, decision: Decision, at: datetime) -> Row:
    """As ``Rows.intend`` leaves it."""
    assert decision.row is not None
    return replace(
        row or Row(external_id="d"),
        version=decision.row.version or 0,
        fingerprint=None,
        gone=False,
        in_doubt_since=at,
    )


@given(st.lists(st.tuples(entries, st.sampled_from(get_args(Fate))), min_size=1, max_size=8), entries)
def test_after_lost_confirmations_the_next_read_brings_the_ledger_to_the_sources_state(
    history: list[tuple[Entry, Fate]], last: Entry
) -> None:
    sent: list[Event] = []
    row: Row | None = None
    for second, (entry, fate) in enumerate([*history, (last, "confirmed")]):
        decision = decide(row, entry, seen(second))
        if fate != "not sent":
            sent += decision.events
        lost = decision.events and fate != "confirmed"
        row = after_intent(row, decision, seen(second).at) if lost else decision.row
    assert row is not None
    assert not row.is_in_doubt
    ledger = fold_all(sent).get("d", State())
    if isinstance(last, Gone):
        assert not ledger.alive
        return
    if isinstance(last, Document):
        assert ledger.alive
        assert ledger.content_hash == last.content.encode()
    if ledger.alive:
        assert (ledger.acl_tags, ledger.required_tags) == access_of(last.acl_tags, last.required_tags)
    assert decide(row, last, seen(100)).events == []


def test_a_listed_document_in_doubt_has_its_access_published_and_is_fetched() -> None:
    row = after(document(acl_tags=["a"], revision="1"))
    assert row is not None
    row = replace(row, in_doubt_since=seen(3).at, fingerprint=None)
    entry = Listed(external_id="d", acl_tags=["a"], revision="1")
    assert decide_access(row, entry, seen(2)).events == [], "asked before the event that is in doubt"
    decision = decide_access(row, entry, seen(4))
    assert [event.acl_tags for event in decision.events if isinstance(event, AccessChanged)] == [["a"]]
    assert is_stale(decision.row, entry)


def test_an_entry_read_earlier_gets_a_lower_version() -> None:
    newer = decide(None, document("new"), seen(2)).events[0]
    older = decide(None, document("old"), seen(1)).events[0]
    assert isinstance(newer, DocumentUpserted)
    assert isinstance(older, DocumentUpserted)
    assert newer.version > older.version


def test_the_sources_own_version_numbers_are_used() -> None:
    row = after(document(version=7))
    older = decide(row, document("older", version=6, acl_tags=["b"]), seen(1))
    assert [type(event) for event in older.events] == [AccessChanged]
    newer = decide(row, document("newer", version=8), seen(2))
    assert [event.version for event in newer.events if isinstance(event, DocumentUpserted)] == [8]
    again = decide(after(document(version=7), Gone("d")), document("begun anew", version=1), seen(3))
    assert [event.version for event in again.events if isinstance(event, DocumentUpserted)] == [1]


def test_a_document_with_too_many_access_tags_has_no_readers() -> None:
    many = [f"tag-{n}" for n in range(1_001)]
    decision = decide(after(document()), document(acl_tags=many), seen(5))
    assert [event.acl_tags for event in decision.events if isinstance(event, AccessChanged)] == [[]]


def test_a_listed_document_is_stale_when_its_revision_differs() -> None:
    def shown(revision: str | None) -> Listed:
        return Listed(external_id="d", acl_tags=["a"], revision=revision)

    row = after(document(revision="1"))
    assert is_stale(None, shown("1"))
    assert not is_stale(row, shown("1"))
    assert is_stale(row, shown("2"))
    assert not is_stale(row, shown(None))
    assert is_stale(after(document(revision="1"), Gone("d")), shown("1"))
    unreadable = Unreadable(external_id="d", code="encrypted", message="m", acl_tags=["a"], revision="1")
    assert not is_stale(after(unreadable), shown("1"))
    assert is_stale(after(unreadable), shown("2"))
    unconfined = Unreadable(external_id="d", code="unconfined", message="m", acl_tags=["a"], revision="1")
    assert is_stale(after(unconfined), shown("1"), can_extract=True)


def test_unconfined_files_are_not_fetched_again_until_extraction_works() -> None:
    row = after(Unreadable(external_id="d", code="unconfined", message="m", acl_tags=["a"], revision="1"))
    for revision, expected in (("1", False), ("2", True), (None, False)):
        entry = Listed(external_id="d", acl_tags=["a"], revision=revision)
        assert is_stale(row, entry, can_extract=False) is expected, revision
        assert is_stale(row, entry, can_extract=True), "they are read once it can"


def group_members(tag: str, members: set[str], of: set[str] = frozenset(), second: int = 0) -> GroupMembers:  # type: ignore[assignment]
    return GroupMembers(tag, tuple(sorted(members)), tuple(sorted(of)), START + timedelta(seconds=second))


tags = st.sampled_from(["t1", "t2", "t3", "t4"])
graphs = st.dictionaries(tags, st.tuples(st.sets(st.sampled_from("abc")), st.sets(tags)), max_size=4)


@given(graphs)
def test_nested_groups_are_resolved_even_with_cycles(graph: dict[str, tuple[set[str], set[str]]]) -> None:
    tags = tags_by_principal({tag: group_members(tag, members, of) for tag, (members, of) in graph.items()})

    def holds(principal: str, tag: str, seen: frozenset[str] = frozenset()) -> bool:
        members, of = graph.get(tag, (set(), set()))
        return principal in members or any(holds(principal, inner, seen | {tag}) for inner in of - seen - {tag})

    expected = {p: frozenset(tag for tag in graph if holds(p, tag)) for p in "abc"}
    assert tags == {principal: held_tags for principal, held_tags in expected.items() if held_tags}


def test_a_listing_of_groups_removes_missing_ones_unless_they_are_newer() -> None:
    at = START + timedelta(seconds=5)
    known = {"old": group_members("old", {"a"}), "newer": group_members("newer", {"b"}, second=9)}
    listed = [group_members("new", {"c"}, second=5), group_members("newer", {"x"}, second=5)]
    assert {tag: value.members for tag, value in merge_listing(known, listed, at, None).items()} == {
        "new": ("c",),
        "newer": ("b",),
    }
    some = merge_listing(known, [], at, ["old", "newer", "unknown"])
    assert {tag: value.members for tag, value in some.items()} == {"old": (), "newer": ("b",), "unknown": ()}


def test_the_fingerprint_of_a_document_is_the_same_in_every_release() -> None:
    """Another one would publish every document of every source again after an upgrade."""
    event = DocumentUpserted(
        tenant="t",
        source="s",
        external_id="d",
        version=7,
        observed_at=START,
        acl_tags=["a"],
        title="Über uns",
        content="one\n\ntwo",
        media_type="text/markdown",
        source_url="https://wiki.example/d",
        author="Ann",
        source_modified_at=START,
        metadata={"team": ["a", "b"], "size": 3},
    )
    digest = "977f9d053f9d98a178ff3ced8ab59392aa27a3c556e392805212acffb02c0aa2"
    assert fingerprint(event).hex() == digest
    assert fingerprint(event.model_copy(update={"version": 8, "acl_tags": ["b"]})).hex() == digest


PUBLISHED = Row(
    external_id="d",
    version=1,
    fingerprint=b"1",
    revision="r",
    acl_tags=("a",),
    content_at=seen(1).at,
    access_at=seen(1).at,
)


def test_a_document_in_doubt_stays_so_until_it_is_fetched() -> None:
    doubtful = replace(PUBLISHED, in_doubt_since=seen(2).at)
    entry = Listed(external_id="d", acl_tags=["a"], revision="r")
    row = decide_access(doubtful, entry, seen(5)).row
    assert row is not None
    assert row.is_in_doubt
    assert is_stale(doubtful, entry)
    assert not is_stale(PUBLISHED, entry)


def test_a_change_of_the_title_alone_is_published() -> None:
    row = after(document(title="old"))
    assert decide(row, document(title="new"), seen(5)).outcome == "upserted"


def test_access_from_a_later_listing_is_not_overwritten_by_an_older_read() -> None:
    row = replace(PUBLISHED, acl_tags=("b",), access_at=seen(9).at)
    decision = decide(row, document("new text", acl_tags=["a"]), seen(5))
    assert decision.row is not None
    assert decision.row.acl_tags == ("b",)
    assert [event.acl_tags for event in decision.events if isinstance(event, DocumentUpserted)] == [["b"]]


def test_a_required_tag_that_is_too_long_leaves_no_readers() -> None:
    assert access_of(["a"], ["x" * 1_000]) == ((), ())


def test_very_many_tags_of_a_document_are_not_looked_into() -> None:
    """A row of a table with a million tags stopped all connectors for a second."""

    class Looked(str):
        def __hash__(self) -> int:
            raise AssertionError("a tag was looked into")

        __eq__ = str.__eq__

    assert access_of([Looked(f"{n}") for n in range(10_001)], []) == ((), ())
    assert access_of(["a"], [Looked(f"{n}") for n in range(10_001)]) == ((), ())
    assert access_of([*["a"] * 5_000, *["b"] * 5_000], []) == (("a", "b"), ())
