"""Folding: apply a batch's events to the documents' known states, in order, and decide what the ledger writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal
from uuid import UUID

from pipeline.core.fold import Delete, State, Step, Upsert, fold
from pipeline.core.model import Manifest
from pipeline.ledger.documents import Accepted, DocumentEvent, Identity, Known, Superseded
from pipeline.stages.events import Arrival
from topics.messages import DocumentUpserted


@dataclass(slots=True)
class Folded:
    """One document after its events of one batch were applied."""

    identity: Identity
    before: Known
    """The document as the ledger has it."""
    state: State
    """Its state after the events so far."""
    steps: list[tuple[Arrival, Step]] = field(default_factory=list)
    content: Arrival | None = None
    """The upsert whose content and metadata win. None: those in the ledger do."""
    superseded: list[Arrival] = field(default_factory=list)
    """The upserts that lost by version although they were observed later than the winner. They are stored, because a
    delete that was observed between the two may still arrive, and then they win."""
    stored_content_superseded: bool = False
    """Whether the content in the ledger has lost in that way."""

    @property
    def changes(self) -> set[str]:
        return {change for _, step in self.steps for change in step.changes}

    def needs_chunking(self, *, titled: bool) -> bool:
        """Whether the text or its media type differs from what the manifests were built from; with ``titled``, also
        whether the title does."""
        if self.content is None or not self.state.alive or self.content.fields is None:
            return False
        return (
            self.state.content_hash != self.before.state.content_hash
            or self.content.fields.media_type != self.before.media_type
            or (titled and self.content.fields.title != self.before.title)
        )


def fold_batch(
    arrivals: Sequence[Arrival],
    known: Mapping[UUID, Known],
    stored: Mapping[UUID, Sequence[Superseded]] | None = None,
    current: Mapping[UUID, Superseded] | None = None,
) -> dict[UUID, Folded]:
    """Apply every event of a batch, in order. (The newest one would not do, because an event may carry content alone or
    access alone, and the newest content need not have the newest access set.)

    known: the ledger's rows; a document without one is new. stored: the superseded upserts of earlier batches, for the
    documents that this batch deletes. current: the content in the ledger, for those of them that it also upserts.

    Law: the order of arrival does not matter. The content that wins is that of the upsert with the greatest (version,
    observed_at, hash) among those observed after the newest delete; the access set is that of the newest observation.
    """
    folded: dict[UUID, Folded] = {}
    for arrival in arrivals:
        id_ = arrival.identity.id
        if id_ not in folded:
            before = known.get(id_, Known(State()))
            earlier = [_arrival_of(arrival.identity, s) for s in (stored or {}).get(id_, ())]
            folded[id_] = Folded(arrival.identity, before, before.state, superseded=earlier)
        document = folded[id_]
        _apply(document, arrival)
        if isinstance(arrival.event, Delete) and not document.state.alive:
            own = (current or {}).get(id_) if document.stored_content_superseded else None
            candidates = [*document.superseded, *([_arrival_of(arrival.identity, own)] if own else [])]
            for candidate in candidates:
                _revive(document, candidate)
    return folded


def _apply(document: Folded, arrival: Arrival) -> None:
    before = document.state
    step = fold(before, arrival.event)
    if isinstance(arrival.event, Upsert):
        if _content_won(before, step.state):
            if before.alive and before.observed_at is not None and arrival.event.observed_at < before.observed_at:
                if document.content is not None:
                    document.superseded.append(document.content)
                else:
                    document.stored_content_superseded = True
            document.content = arrival
        elif _lost_by_version(before, arrival.event):
            document.superseded.append(arrival)
    document.state = step.state
    document.steps.append((arrival, step))


def _lost_by_version(state: State, event: Upsert) -> bool:
    """Whether this upsert lost by version alone: a delete that was observed before it would make it win."""
    return state.alive and state.observed_at is not None and event.observed_at > state.observed_at


def _revive(document: Folded, arrival: Arrival) -> None:
    """Apply a superseded upsert again, now that the delete before it is known. It keeps the document's present access
    set, because its own was applied when it arrived."""
    event, floor = arrival.event, document.state.deleted_floor
    if isinstance(event, Upsert) and floor is not None and event.observed_at > floor:
        known = document.state
        again = replace(event, acl_tags=known.acl_tags, required_tags=known.required_tags)
        _apply(document, replace(arrival, event=again))


def superseded_upserts(document: Folded) -> list[Superseded]:
    """The document's superseded upserts, as the ledger stores them."""
    return [
        Superseded(e.version, e.observed_at, e.content_hash, e.meta_hash, a.fields, a.text)
        for a in document.superseded
        if isinstance(e := a.event, Upsert) and a.fields is not None and a.text is not None
    ]


def _arrival_of(identity: Identity, stored: Superseded) -> Arrival:
    event = Upsert(stored.version, stored.observed_at, stored.content_hash, stored.meta_hash, (), ())
    return Arrival(identity, event, DocumentUpserted.kind, "live", stored.text, stored.fields)


def access_loss(before: State, after: State) -> Literal["retired", "revoked"] | None:
    """How people lose access by this change: "retired" when nobody may read the document any more, "revoked" when
    somebody who could read it may no longer, None when nobody loses access."""
    if not before.searchable:
        return None
    if not after.searchable:
        return "retired"
    lost = set(before.acl_tags) - set(after.acl_tags) or set(after.required_tags) - set(before.required_tags)
    return "revoked" if lost else None


def _content_won(before: State, after: State) -> bool:
    """Whether an upsert won, also with the same content as before."""
    return (before.version, before.observed_at, before.content_hash, before.meta_hash, before.deleted_at) != (
        after.version,
        after.observed_at,
        after.content_hash,
        after.meta_hash,
        after.deleted_at,
    )


def outcome(step: Step) -> str:
    """The outcome of an event for the document's history and the metrics: that of the step, or ``nobody`` for a change
    after which nobody may read the document."""
    return "nobody" if step.changes and step.state.alive and not step.state.acl_tags else step.outcome


def decide(folded: Folded, manifests: Mapping[str, Manifest]) -> Accepted:
    """The decision for a document, as ``documents.write`` takes it. manifests: the new ones, by generation."""
    state, before = folded.state, folded.before
    changes = folded.changes
    effective = [arrival for arrival, step in folded.steps if step.changes]
    content = folded.content if state.alive else None
    text_changed = content is not None and state.content_hash != before.state.content_hash
    meta_changed = content is not None and state.meta_hash != before.state.meta_hash
    history = tuple(
        DocumentEvent(
            arrival.kind,
            outcome(step),
            getattr(arrival.event, "version", None),
            arrival.event.observed_at,
            None if step.changes else before.seq,
            arrival.lane,
        )
        for arrival, step in folded.steps
        if step.outcome != "duplicate"  # a retry is no event
    )
    return Accepted(
        folded.identity,
        before,
        state,
        lane="live" if any(a.lane == "live" for a in effective or [a for a, _ in folded.steps]) else "backfill",
        draws_seq=bool(changes),
        history=history,
        changed_at=_changed_at(effective[-1], before) if effective else None,
        fields=content.fields if content and (meta_changed or text_changed) else None,
        text=content.text if content and text_changed else None,
        manifests=manifests,
        erased=not state.alive and bool(changes),
    )


def _changed_at(arrival: Arrival, before: Known) -> datetime:
    """When the document changed at the source, which is where freshness begins: the source's time of modification, but
    not before the last observation (an old file that is copied into place is not years late), nor after this one."""
    observed_at = arrival.event.observed_at
    modified_at = arrival.fields.source_modified_at if arrival.fields else None
    last_observed_at = before.state.observed_at
    if modified_at and last_observed_at:
        return max(min(modified_at, observed_at), last_observed_at)
    return observed_at
