"""Detect folds events to the state that the model expects, in any order of arrival and with repetitions."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.identity import qualify
from pipeline.stages.events import Arrival, read_message, to_arrival
from pipeline.stages.folding import fold_batch
from pipeline.stages.stage import Incoming
from tests.faults.model import Event, outcome
from tests.faults.story import KINDS, Story
from topics.codec import encode
from topics.messages import DocumentUpserted

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def arrival(event: Event) -> Arrival:
    record = encode(event)
    incoming = Incoming("t", 0, 0, record.key, record.value, record.headers, "live")
    return to_arrival(read_message(incoming, now=datetime.now(UTC)), "live")


def folded(events: list[Event]) -> tuple[object, ...] | None:
    """Return the state to which one batch folds the events; several batches are tested by the scenarios."""
    [document] = fold_batch([arrival(event) for event in events], {}).values()
    state = document.state
    if not state.searchable:
        return None
    return state.version, state.observed_at, state.content_hash, state.meta_hash, state.acl_tags, state.required_tags


def model_outcome(events: list[Event]) -> tuple[object, ...] | None:
    document = outcome(events)
    if document is None:
        return None
    upsert = arrival(document).event
    acl, required = (qualify(document.source, tags) for tags in (document.acl_tags, document.required_tags))
    return (document.version, document.observed_at, upsert.content_hash, upsert.meta_hash, acl, required)  # type: ignore[union-attr]


def story_events(seed: int, changes: list[str]) -> list[Event]:
    story, rng = Story("acme", ["a"], BEGIN), Random(seed)
    for kind in changes:
        story.change(kind, "a", rng)
    return story.events["a"]


@settings(max_examples=150, deadline=None, database=None)
@example(0, ["edit", "edit", "restart"], 1)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=9), st.integers(0, 2**32))
def test_folding_events_in_any_order_of_arrival_matches_the_model(seed: int, changes: list[str], shuffle: int) -> None:
    events, rng = story_events(seed, changes), Random(shuffle)
    if not events:  # a crawler has read a document and published nothing
        return
    arrived = [event for event in events for _ in range(rng.choice((1, 1, 2)))]
    rng.shuffle(arrived)
    assert folded(arrived) == model_outcome(events)
    assert folded(events) == model_outcome(events)


def test_the_model_handles_a_recreated_document() -> None:
    events = story_events(1, ["rewrite", "restart"])
    last = events[-1]
    assert isinstance(last, DocumentUpserted)
    assert last.version == 1
    expected = outcome(events)
    assert expected is None or expected.content == last.content
