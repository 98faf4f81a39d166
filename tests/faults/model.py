"""Computes the expected state of a document from the *set* of its events: pure, and independent of their order.

Written from the wire contract, not from ``pipeline.core.fold``, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.core.identity import content_hash, meta_hash
from pipeline.core.normalise import normalise
from pipeline.ledger.documents import Fields
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

Event = DocumentUpserted | DocumentDeleted | AccessChanged


def outcome(events: Iterable[Event]) -> DocumentUpserted | None:
    """Return the document that both stores must hold, with its current access; None if they must hold nothing of it.

    events: all events of one document, in any order and repeated at will.

    Content: of the upserts observed after the newest delete, the maximum by (version, observed_at, content hash,
    metadata hash). Access: that of the newest observed_at among upserts and access changes; of several with that time,
    what all of them allow. A document that nobody may read is not stored.
    """
    known = list(events)
    floor = max((e.observed_at for e in known if isinstance(e, DocumentDeleted)), default=None)
    alive = [e for e in known if isinstance(e, DocumentUpserted) and (floor is None or e.observed_at > floor)]
    if not alive:
        return None
    content = max(alive, key=_rank)
    access_events = [e for e in known if not isinstance(e, DocumentDeleted)]
    newest = max(e.observed_at for e in access_events)
    last = [e for e in access_events if e.observed_at == newest]
    acl = set.intersection(*(set(e.acl_tags) for e in last))
    required = set.union(*(set(e.required_tags) for e in last))
    if not acl:
        return None
    return content.model_copy(update={"acl_tags": sorted(acl), "required_tags": sorted(required)})


def _rank(event: DocumentUpserted) -> tuple[object, ...]:
    text, media_type = normalise(event.content, event.media_type)
    meta = meta_hash(
        Fields(event.title, event.source_url, event.author, media_type, event.source_modified_at, dict(event.metadata))
    )
    return event.version, event.observed_at, content_hash(text), meta


def readable(document: DocumentUpserted | None, tags: Iterable[str]) -> bool:
    """Whether a caller with these (unqualified) tags may read the document."""
    held = set(tags)
    return document is not None and bool(held & set(document.acl_tags)) and held >= set(document.required_tags)
