"""A document's story as JSON: the shape of ``penstock why --json``, and what of it a mere reader may see."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from pipeline.ledger.story import StoreProgress, Story, verdict


def as_json(story: Story) -> dict[str, Any]:
    """For whoever operates the machine: everything. Times in ISO 8601."""
    document, access = story.document, story.access
    searchable, reason = verdict(story)
    return {
        "document": None
        if document is None
        else {
            "id": str(document.identity.id),
            "tenant": document.identity.tenant,
            "source": document.identity.source,
            "external_id": document.identity.external_id,
            "title": document.title,
            "source_url": document.source_url,
            "author": document.author,
            "media_type": document.media_type,
            "seq": document.seq,
            "announced_seq": document.announced_seq,
            "version": document.version,
            "observed_at": _iso(document.observed_at),
            "content_hash": document.content_hash.hex() if document.content_hash else None,
            "source_modified_at": _iso(document.source_modified_at),
            "changed_at": _iso(document.changed_at),
            "received_at": _iso(document.received_at),
            "deleted_at": _iso(document.deleted_at),
            "lane": document.lane,
        },
        "events": [
            {
                "at": _iso(e.at),
                "kind": e.kind,
                "outcome": e.outcome,
                "version": e.version,
                "observed_at": _iso(e.observed_at),
                "seq": e.seq,
                "lane": e.lane,
            }
            for e in story.events
        ],
        "generations": [
            {
                "generation": g.name,
                "active": g.active,
                "chunks": g.chunks,
                "vectors": _store_json(g.vectors),
                "keywords": _store_json(g.keywords),
            }
            for g in story.generations
        ],
        "access": {
            "acl_tags": list(access.acl_tags),
            "required_tags": list(access.required_tags),
            "observed_at": _iso(access.observed_at),
        },
        "dead": [
            {
                "id": d.id,
                "stage": d.stage,
                "code": d.code,
                "message": d.message,
                "at": _iso(d.at),
                "attempt": d.attempt,
                "replay_of": d.replay_of,
                "replayed_at": _iso(d.replayed_at),
            }
            for d in story.dead
        ],
        "searchable": searchable,
        "reason": reason,
    }


def for_reader(story: Story, held: Collection[str]) -> dict[str, Any]:
    """The same shape for somebody who may read the document and does not operate the machine: without dead letters (a
    later event may be for others), errors of the stores, versions of the ledger, and the tags of others. held: the
    reader's tags."""
    own = Story(story.document, story.access, story.events, story.generations)
    told = as_json(own)
    for name in ("seq", "announced_seq", "content_hash", "lane"):
        del told["document"][name]
    for event in told["events"]:
        for name in ("seq", "lane"):
            del event[name]
    told["generations"] = [g for g in told["generations"] if g["active"]]
    for generation in told["generations"]:
        for store in ("vectors", "keywords"):
            progress = generation[store]
            generation[store] = {name: progress[name] for name in ("state", "at", "pending_since", "refused")}
    told["access"]["acl_tags"] = [tag for tag in told["access"]["acl_tags"] if tag in held]
    if story.active is not None and not (story.active.vectors.reached and story.active.keywords.reached):
        told["reason"] = "it has changed, and not every store has followed yet"
    return told


def _store_json(progress: StoreProgress) -> dict[str, Any]:
    return {
        "state": progress.state,
        "seq": progress.seq,
        "want_seq": progress.want_seq,
        "at": _iso(progress.at),
        "pending_since": _iso(progress.pending_since),
        "next_retry": _iso(progress.next_retry),
        "attempts": progress.attempts,
        "error": progress.error,
        "refused": progress.refused,
    }


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None
