"""A document's events of one batch applied in order to what the ledger knows, and what is to be written of it."""

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
    """A document's events of one batch, applied in order to what is known of it."""

    identity: Identity
    before: Known
    state: State
    steps: list[tuple[Arrival, Step]] = field(default_factory=list)
    content: Arrival | None = None
    """The upsert whose content and metadata hold at the end; None when the ledger's own still hold."""
    superseded: list[Arrival] = field(default_factory=list)
    """Lost by version although observed later than what won: kept, because a delete between the two may still come."""
    keeps_old: bool = False
    """The ledger's own content is superseded in that way."""

    @property
    def changes(self) -> set[str]:
        return {change for _, step in self.steps for change in step.changes}

    @property
    def needs_chunking(self) -> bool:
        """Its text, or the way that text is cut, is not what the manifests were made from."""
        if self.content is None or not self.state.alive or self.content.fields is None:
            return False
        return (
            self.state.content_hash != self.before.state.content_hash
            or self.content.fields.media_type != self.before.media_type
        )


def fold_batch(
    arrivals: Sequence[Arrival],
    known: Mapping[UUID, Known],
    stored: Mapping[UUID, Sequence[Superseded]] | None = None,
    current: Mapping[UUID, Superseded] | None = None,
) -> dict[UUID, Folded]:
    """Fold every event of the batch, in order; never keep only the newest. ``kept``: what earlier batches superseded
    of the documents that this one deletes; ``current``: the ledger's own content of those that it also upserts.

    Law: the order of arrival does not matter. Content is the greatest (version, observed_at, hash) among the upserts
    observed after the newest delete, access that of the newest observation.
    """
    folded: dict[UUID, Folded] = {}
    for arrival in arrivals:
        id_ = arrival.identity.id
        if id_ not in folded:
            before = known.get(id_, Known(State()))
            earlier = [_revived(arrival.identity, s) for s in (stored or {}).get(id_, ())]
            folded[id_] = Folded(arrival.identity, before, before.state, superseded=earlier)
        document = folded[id_]
        _apply(document, arrival)
        if isinstance(arrival.event, Delete) and not document.state.alive:
            own = (current or {}).get(id_) if document.keeps_old else None
            candidates = [*document.superseded, *([_revived(arrival.identity, own)] if own else [])]
            for superseded_by_version in candidates:
                _revive(document, superseded_by_version)
    return folded


def _apply(document: Folded, arrival: Arrival) -> None:
    before = document.state
    step = fold(before, arrival.event)
    if isinstance(arrival.event, Upsert):
        if _content_taken(before, step.state):
            if before.alive and before.observed_at is not None and arrival.event.observed_at < before.observed_at:
                if document.content is not None:
                    document.superseded.append(document.content)
                else:
                    document.keeps_old = True
            document.content = arrival
        elif _superseded(before, arrival.event):
            document.superseded.append(arrival)
    document.state = step.state
    document.steps.append((arrival, step))


def _superseded(state: State, event: Upsert) -> bool:
    """It lost by version alone: had a delete come in between, it would stand."""
    return state.alive and state.observed_at is not None and event.observed_at > state.observed_at


def _revive(document: Folded, arrival: Arrival) -> None:
    """Once more, now that a delete is known: its access was applied when it came."""
    event, floor = arrival.event, document.state.deleted_floor
    if isinstance(event, Upsert) and floor is not None and event.observed_at > floor:
        known = document.state
        again = replace(event, acl_tags=known.acl_tags, required_tags=known.required_tags)
        _apply(document, replace(arrival, event=again))


def to_keep(document: Folded) -> list[Superseded]:
    """The upserts that lost by version and that a late delete may bring back."""
    return [
        Superseded(e.version, e.observed_at, e.content_hash, e.meta_hash, a.fields, a.text)
        for a in document.superseded
        if isinstance(e := a.event, Upsert) and a.fields is not None and a.text is not None
    ]


def _revived(identity: Identity, stored: Superseded) -> Arrival:
    event = Upsert(stored.version, stored.observed_at, stored.content_hash, stored.meta_hash, (), ())
    return Arrival(identity, event, DocumentUpserted.kind, "live", stored.text, stored.fields)


def withdrawal(before: State, after: State) -> Literal["retired", "revoked"] | None:
    """Whether somebody who could read the document may no longer."""
    if not before.searchable:
        return None
    if not after.searchable:
        return "retired"
    lost = set(before.acl_tags) - set(after.acl_tags) or set(after.required_tags) - set(before.required_tags)
    return "revoked" if lost else None


def _content_taken(before: State, after: State) -> bool:
    """The upsert's version stands now (also when its content is the same as before)."""
    return (before.version, before.observed_at, before.content_hash, before.meta_hash, before.deleted_at) != (
        after.version,
        after.observed_at,
        after.content_hash,
        after.meta_hash,
        after.deleted_at,
    )


def outcome(step: Step) -> str:
    """As history and metrics name it: accepting what nobody may read is an outcome of its own."""
    return "nobody" if step.changes and step.state.alive and not step.state.acl_tags else step.outcome


def decision(folded: Folded, manifests: Mapping[str, Manifest]) -> Accepted:
    """The decision about a document, as the ledger writes it."""
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
    """When the source changed, for freshness: what the source says, but not before we last looked (an old file copied
    in place is not years late) and not after we saw it."""
    seen = arrival.event.observed_at
    said = arrival.fields.source_modified_at if arrival.fields else None
    looked = before.state.observed_at
    return max(min(said, seen), looked) if said and looked else seen
