"""The order of events: latest wins, deletes are floors, access by observation alone, the narrower at a tie."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.fold import Access, Delete, Event, State, Upsert, fold

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def upsert(
    version: int, observed: int, content: str = "a", *, meta: str = "m", acl: Sequence[str] = ("s/x",)
) -> Upsert:
    return Upsert(version, at(observed), content.encode(), meta.encode(), tuple(acl), ())


def run(*events: Event) -> State:
    state = State()
    for event in events:
        state = fold(state, event).state
    return state


def test_a_new_document_is_created() -> None:
    step = fold(State(), upsert(1, 1))
    assert step.outcome == "created"
    assert step.changes == {"content", "metadata", "access"}
    assert step.state.searchable


def test_a_late_older_version_is_stale_even_after_an_unchanged_newer_one() -> None:
    state = run(upsert(1, 1, "a"), upsert(5, 5, "a"))
    step = fold(state, upsert(3, 3, "b"))
    assert step.outcome == "stale"
    assert not step.changes
    assert step.state.content_hash == b"a"


def test_an_unchanged_upsert_advances_version_and_observation_time_without_changes() -> None:
    step = fold(run(upsert(1, 1)), upsert(2, 2))
    assert (step.outcome, step.changes) == ("unchanged", frozenset())
    assert (step.state.version, step.state.observed_at) == (2, at(2))


def test_a_repeated_upsert_is_a_duplicate() -> None:
    assert fold(run(upsert(1, 1)), upsert(1, 1)).outcome == "duplicate"


def test_a_title_only_change_is_metadata() -> None:
    step = fold(run(upsert(1, 1)), upsert(2, 2, meta="n"))
    assert step.changes == {"metadata"}


def test_a_tag_only_change_is_access() -> None:
    step = fold(run(upsert(1, 1)), upsert(2, 2, acl=("s/y",)))
    assert (step.outcome, step.changes) == ("access", frozenset({"access"}))


def test_a_delete_wins_over_a_higher_version_observed_before_it() -> None:
    state = run(upsert(1, 1), Delete(1, at(5)))
    assert fold(state, upsert(9, 4)).outcome == "stale"
    assert not state.alive


def test_a_delete_with_the_same_version_and_observation_time_as_an_upsert_wins() -> None:
    assert not run(upsert(1, 1), Delete(1, at(1))).alive
    assert not run(Delete(1, at(1)), upsert(1, 1)).alive


def test_a_recreated_document_may_start_at_version_one_again() -> None:
    step = fold(run(upsert(7, 1), Delete(7, at(2))), upsert(1, 3))
    assert step.outcome == "recreated"
    assert "content" in step.changes
    assert step.state.version == 1


def test_a_delete_observed_before_the_upsert_does_not_remove_the_document() -> None:
    step = fold(run(upsert(2, 10)), Delete(1, at(5)))
    assert (step.outcome, step.changes) == ("stale", frozenset())
    assert step.state.alive
    assert fold(step.state, upsert(3, 4)).outcome == "stale"


def test_a_delete_before_the_first_upsert_makes_earlier_upserts_stale() -> None:
    state = run(Delete(0, at(5)))
    assert fold(state, upsert(1, 4)).outcome == "stale"
    assert fold(state, upsert(1, 6)).outcome == "created"


def test_of_two_deletes_the_later_observed_one_sets_the_floor_in_either_order() -> None:
    earlier, later = Delete(1, at(3)), Delete(1, at(5))
    for events in ((earlier, later), (later, earlier)):
        assert fold(run(upsert(1, 1), *events), upsert(2, 4)).outcome == "stale"
        assert fold(run(*events), upsert(2, 4)).outcome == "stale"


def test_access_received_before_the_first_upsert_is_preserved() -> None:
    state = run(Access(at(5), ("s/narrow",), ()), upsert(1, 1, acl=("s/wide",)))
    assert state.acl_tags == ("s/narrow",)


def test_an_upsert_observed_before_a_revocation_does_not_undo_it() -> None:
    state = run(upsert(1, 1, acl=("s/a", "s/b")), Access(at(5), ("s/a",), ()), upsert(2, 3, "b", acl=("s/a", "s/b")))
    assert state.acl_tags == ("s/a",)
    assert state.content_hash == b"b"


def test_at_equal_observation_times_the_narrower_access_wins_in_either_order() -> None:
    one, two = Access(at(5), ("s/a", "s/b"), ("s/r",)), Access(at(5), ("s/b", "s/c"), ())
    for events in ((one, two), (two, one)):
        state = run(upsert(1, 1), *events)
        assert (state.acl_tags, state.required_tags) == (("s/b",), ("s/r",))


def test_empty_access_tags_make_a_document_unsearchable_at_once() -> None:
    step = fold(run(upsert(1, 1)), Access(at(2), (), ()))
    assert step.changes == {"access"}
    assert step.state.alive
    assert not step.state.searchable


def test_a_stale_upsert_still_applies_newer_access() -> None:
    step = fold(run(upsert(5, 1)), upsert(4, 9, "b", acl=("s/z",)))
    assert (step.outcome, step.changes) == ("access", frozenset({"access"}))
    assert step.state.content_hash == b"a"
    assert step.state.acl_tags == ("s/z",)


hashes = st.sampled_from(["a", "b", "c"])
tags = st.sets(st.sampled_from(["s/1", "s/2", "s/3"])).map(lambda s: tuple(sorted(s)))
seconds = st.integers(0, 6)
upserts = st.builds(
    lambda v, o, h, m, a: Upsert(v, at(o), h.encode(), m.encode(), a, ()),
    st.integers(0, 5),
    seconds,
    hashes,
    hashes,
    tags,
)
events = st.one_of(
    upserts,
    st.builds(lambda o: Delete(0, at(o)), seconds),
    st.builds(lambda o, a, r: Access(at(o), a, r), seconds, tags, tags),
)


@given(st.lists(events, max_size=8))
def test_replaying_all_events_changes_no_access_and_revives_no_deleted_document(history: list[Event]) -> None:
    once = run(*history)
    twice = run(*history, *history)
    assert (twice.acl_tags, twice.required_tags) == (once.acl_tags, once.required_tags)
    assert twice.deleted_floor == once.deleted_floor
    if not once.alive:
        assert not twice.alive or twice.observed_at > (once.deleted_floor or START)  # type: ignore[operator]


@given(st.lists(events, max_size=8), st.randoms(use_true_random=False))
def test_access_does_not_depend_on_the_order_of_arrival(history: list[Event], random: object) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = run(*history), run(*shuffled)
    assert (one.acl_tags, one.required_tags) == (two.acl_tags, two.required_tags)


@given(st.lists(upserts, min_size=1, max_size=8), st.randoms())
def test_without_deletes_the_highest_version_wins_in_any_order(history: list[Upsert], random: object) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    best = max(history, key=lambda e: (e.version, e.observed_at, e.content_hash, e.meta_hash))
    state = run(*shuffled)
    assert (state.version, state.content_hash, state.meta_hash) == (best.version, best.content_hash, best.meta_hash)


@given(st.lists(events, max_size=8))
def test_only_a_document_observed_after_the_newest_delete_is_alive(history: list[Event]) -> None:
    state = run(*history)
    deletes = [e.observed_at for e in history if isinstance(e, Delete)]
    if deletes and state.alive:
        assert state.observed_at is not None
        assert state.observed_at > max(deletes)


@pytest.mark.parametrize("event", [upsert(1, 1), Delete(1, at(1)), Access(at(1), ("s/a",), ())])
def test_a_repeated_event_changes_nothing(event: Event) -> None:
    state = run(upsert(0, 0), event)
    step = fold(state, event)
    assert step.state == state
    assert not step.changes
