"""What a source's answer leads to, against what was published last."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from connectors.runner.compare import Row, Seen, decide, is_stale
from connectors.runner.membership import Held, holders, merged
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

START = datetime(2026, 11, 21, tzinfo=UTC)


def seen(second: int, version: int = 1_000) -> Seen:
    return Seen(tenant="t", source="s", at=START + timedelta(seconds=second), next_version=version + second)


def document(content: str = "text", **fields: object) -> Document:
    return Document(**{"external_id": "d", "title": "T", "content": content, "acl_tags": ["a"], **fields})  # type: ignore[arg-type]


def after(*entries: Entry) -> Row | None:
    row: Row | None = None
    for second, entry in enumerate(entries):
        row = decide(row, entry, seen(second)).row
    return row


entries = st.one_of(
    st.builds(
        document, st.sampled_from(["one", "two"]), acl_tags=st.lists(st.sampled_from("abc"), max_size=2),
        required_tags=st.lists(st.sampled_from("xy"), max_size=1),
    ),
    st.just(Gone("d")),
    st.builds(
        lambda acl: Unreadable(external_id="d", code="encrypted", message="a password", acl_tags=acl),
        st.lists(st.sampled_from("abc"), max_size=2),
    ),
)  # fmt: skip


@given(st.lists(entries, min_size=1, max_size=8))
def test_asked_twice_the_same_answer_publishes_nothing(history: list[Entry]) -> None:
    row = after(*history)
    assert decide(row, history[-1], seen(100)).events == []


@given(st.lists(entries, min_size=1, max_size=8))
def test_what_is_published_ends_as_the_source_is(history: list[Entry]) -> None:
    """Who folds the events as the ledger does has the last answer, and its readers."""
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
def test_late_answers_change_no_text(history: list[Entry], data: st.DataObject) -> None:
    row = after(*history)
    late = data.draw(entries)
    decision = decide(row, late, seen(-1))
    assert decision.outcome == "late"
    assert decision.events == []


def test_a_source_that_counts_its_versions_is_believed() -> None:
    row = after(document(version=7))
    older = decide(row, document("older", version=6, acl_tags=["b"]), seen(1))
    assert [type(event) for event in older.events] == [AccessChanged]
    newer = decide(row, document("newer", version=8), seen(2))
    assert [event.version for event in newer.events if isinstance(event, DocumentUpserted)] == [8]
    again = decide(after(document(version=7), Gone("d")), document("begun anew", version=1), seen(3))
    assert [event.version for event in again.events if isinstance(event, DocumentUpserted)] == [1]


def test_too_many_readers_to_say_are_none() -> None:
    many = [f"tag-{n}" for n in range(1_001)]
    decision = decide(after(document()), document(acl_tags=many), seen(5))
    assert [event.acl_tags for event in decision.events if isinstance(event, AccessChanged)] == [[]]


def test_when_a_listed_document_has_to_be_fetched() -> None:
    def listed(revision: str | None) -> Listed:
        return Listed(external_id="d", acl_tags=["a"], revision=revision)

    row = after(document(revision="1"))
    assert is_stale(None, listed("1"))
    assert not is_stale(row, listed("1"))
    assert is_stale(row, listed("2"))
    assert not is_stale(row, listed(None))
    assert is_stale(after(document(revision="1"), Gone("d")), listed("1"))
    unreadable = Unreadable(external_id="d", code="encrypted", message="m", acl_tags=["a"], revision="1")
    assert not is_stale(after(unreadable), listed("1"))
    assert is_stale(after(unreadable), listed("2"))


def held(tag: str, members: set[str], of: set[str] = frozenset(), second: int = 0) -> Held:  # type: ignore[assignment]
    return Held(tag, tuple(sorted(members)), tuple(sorted(of)), START + timedelta(seconds=second))


tags = st.sampled_from(["t1", "t2", "t3", "t4"])
graphs = st.dictionaries(tags, st.tuples(st.sets(st.sampled_from("abc")), st.sets(tags)), max_size=4)


@given(graphs)
def test_groups_within_groups_are_resolved_whatever_the_cycles(graph: dict[str, tuple[set[str], set[str]]]) -> None:
    found = holders({tag: held(tag, members, of) for tag, (members, of) in graph.items()})

    def holds(principal: str, tag: str, seen: frozenset[str] = frozenset()) -> bool:
        members, of = graph.get(tag, (set(), set()))
        return principal in members or any(holds(principal, inner, seen | {tag}) for inner in of - seen - {tag})

    expected = {p: frozenset(tag for tag in graph if holds(p, tag)) for p in "abc"}
    assert found == {principal: held_tags for principal, held_tags in expected.items() if held_tags}


def test_a_listing_takes_away_what_it_asked_for_and_lacks_but_nothing_newer() -> None:
    at = START + timedelta(seconds=5)
    known = {"old": held("old", {"a"}), "newer": held("newer", {"b"}, second=9)}
    listed = [held("new", {"c"}, second=5), held("newer", {"x"}, second=5)]
    assert {tag: one.members for tag, one in merged(known, listed, at, None).items()} == {
        "new": ("c",), "newer": ("b",),
    }  # fmt: skip
    some = merged(known, [], at, ["old", "newer", "unknown"])
    assert {tag: one.members for tag, one in some.items()} == {"old": (), "newer": ("b",), "unknown": ()}
