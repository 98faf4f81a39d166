"""The order of arrival does not matter: whatever batches a document's events come in, the same content stands."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.fold import Delete, State, Upsert
from pipeline.ledger.documents import Known, Superseded
from pipeline.stages.events import Arrival, DocumentEvent, to_arrival
from pipeline.stages.folding import fold_batch
from tests.support.portion import portion
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted

START = datetime(2026, 1, 1, tzinfo=UTC)
NAME = {"tenant": "t", "source": "s", "external_id": "d"}


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def upsert(version: int, second: int, content: str = "", tag: str = "a") -> DocumentUpserted:
    content = content or f"v{version}@{second}"
    return DocumentUpserted(**NAME, version=version, observed_at=at(second), title="T", content=content, acl_tags=[tag])  # type: ignore[arg-type]


def deletion(second: int) -> DocumentDeleted:
    return DocumentDeleted(**NAME, version=1, observed_at=at(second))  # type: ignore[arg-type]


def access(second: int, tag: str) -> AccessChanged:
    return AccessChanged(**NAME, observed_at=at(second), acl_tags=[tag])  # type: ignore[arg-type]


EVENTS = st.one_of(
    st.builds(upsert, st.integers(1, 3), st.integers(1, 5), st.sampled_from(["", "x", "y"]), st.sampled_from("ab")),
    st.builds(deletion, st.integers(1, 5)),
    st.builds(access, st.integers(1, 5), st.sampled_from("abc")),
)


def arrival(message: AnyMessage) -> Arrival:
    assert isinstance(message, DocumentEvent)
    return to_arrival(message, "live")


def run(batches: Sequence[Sequence[Arrival]]) -> State:
    """As detect runs them, the ledger's memory between batches included."""
    state, content, kept = State(), None, list[Superseded]()
    for batch in batches:
        if not batch:
            continue
        id_ = batch[0].identity.id
        deletes = any(isinstance(a.event, Delete) for a in batch)
        current = {id_: content} if deletes and content is not None else {}
        [folded] = fold_batch(batch, {id_: Known(state)}, {id_: kept} if deletes else {}, current).values()
        if folded.stored_content_superseded and content is not None:
            kept.append(content)
        kept += [revision for revision in map(_superseded_of, folded.superseded) if revision not in kept]
        if folded.content is not None:
            content = _superseded_of(folded.content)
        state = folded.state
        kept = [s for s in kept if not _is_outdated(s, state)]
    return state


def _superseded_of(a: Arrival) -> Superseded:
    e = a.event
    assert isinstance(e, Upsert)
    assert a.fields is not None
    assert a.text is not None
    return Superseded(e.version, e.observed_at, e.content_hash, e.meta_hash, a.fields, a.text)


def _is_outdated(kept: Superseded, state: State) -> bool:
    below = state.deleted_floor is not None and kept.observed_at <= state.deleted_floor
    return below or (state.alive and state.observed_at is not None and kept.observed_at <= state.observed_at)


def model(events: Sequence[Arrival]) -> tuple[object, ...]:
    """Return the expected final state, which is the same for every order of arrival."""
    upserts = [a.event for a in events if isinstance(a.event, Upsert)]
    floor = max((a.event.observed_at for a in events if isinstance(a.event, Delete)), default=None)
    alive = [e for e in upserts if floor is None or e.observed_at > floor]
    if not alive:
        return (False,)
    won = max(alive, key=lambda e: (e.version, e.observed_at, e.content_hash, e.meta_hash))
    heard = [a.event for a in events if not isinstance(a.event, Delete)]
    newest = max(e.observed_at for e in heard)
    tags = set.intersection(*(set(e.acl_tags) for e in heard if e.observed_at == newest))
    return True, won.version, won.observed_at, won.content_hash, tags


def result(state: State) -> tuple[object, ...]:
    if not state.alive:
        return (False,)
    return True, state.version, state.observed_at, state.content_hash, set(state.acl_tags)


@settings(max_examples=portion(1000))
@given(st.lists(EVENTS, min_size=3, max_size=7), st.data())
def test_events_in_any_order_and_batches_end_in_the_same_state(events: list[AnyMessage], data: st.DataObject) -> None:
    arrivals = [arrival(e) for e in events]
    order = data.draw(st.permutations(arrivals))
    order += data.draw(st.lists(st.sampled_from(arrivals), max_size=3))  # some come twice
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    edges = [0, *cuts, len(order)]
    batches = [order[a:b] for a, b in pairwise(edges)]
    assert result(run(batches)) == model(arrivals)


@example([0, 1, 2])
@given(st.permutations([0, 1, 2]))
def test_a_recreated_document_survives_when_the_earlier_delete_arrives_last(order: list[int]) -> None:
    events = [arrival(e) for e in (upsert(5, 10), upsert(1, 30), deletion(20))]
    state = run([[events[n]] for n in order])
    assert (state.alive, state.version) == (True, 1)


def test_a_batch_that_overwrites_and_deletes_an_older_version_keeps_the_recreated_document() -> None:
    events = [arrival(e) for e in (upsert(1, 30), upsert(5, 10), deletion(20))]
    state = run([[events[0]], [events[1], events[2]]])
    assert (state.alive, state.version) == (True, 1)
