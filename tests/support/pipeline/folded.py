"""Computes the state that the pipeline derives from messages, without running it."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.core.fold import Access, Delete, Event, State, Upsert, fold
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted


def fold_all(messages: Iterable[AnyMessage]) -> dict[str, State]:
    """External id → the ledger's state."""
    states: dict[str, State] = {}
    for message in messages:
        if isinstance(message, DocumentUpserted | AccessChanged | DocumentDeleted):
            states[message.external_id] = fold(states.get(message.external_id, State()), event_of(message)).state
    return states


def event_of(message: DocumentUpserted | AccessChanged | DocumentDeleted) -> Event:
    """The event that the ledger folds. A content hash is the text itself."""
    match message:
        case DocumentUpserted():
            access = tuple(message.acl_tags), tuple(message.required_tags)
            return Upsert(message.version, message.observed_at, message.content.encode(), b"", *access)
        case AccessChanged():
            return Access(message.observed_at, tuple(message.acl_tags), tuple(message.required_tags))
        case DocumentDeleted():
            return Delete(message.version, message.observed_at)
