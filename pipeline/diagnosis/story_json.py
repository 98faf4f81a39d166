"""A document's story as JSON: the shape of ``penstock why --json``, and what of it a mere reader may see."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from pipeline.core.addresses import openable
from pipeline.diagnosis.story_model import Context, Person, QueryRank, Source, StoreProgress, Story
from pipeline.diagnosis.story_verdict import Verdict, judge


def as_json(story: Story, verdict: Verdict | None = None) -> dict[str, Any]:
    """Everything that the ledger knows, for operators; times in ISO 8601. verdict: replaces the ledger's own."""
    document, access = story.document, story.access
    verdict = verdict or judge(story)
    return {
        "document": None
        if document is None
        else {
            "id": str(document.identity.id),
            "tenant": document.identity.tenant,
            "source": document.identity.source,
            "external_id": document.identity.external_id,
            "title": document.title,
            "source_url": openable(document.source_url),
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
                "dismissed_at": _iso(d.dismissed_at),
                "dismissed_by": d.dismissed_by,
                "dismissed_reason": d.dismissed_reason,
            }
            for d in story.dead
        ],
        "searchable": verdict.searchable,
        "reason": verdict.reason,
        "state": verdict.state,
        "next": verdict.next,
        "notes": list(verdict.notes),
    }


def context_json(context: Context) -> dict[str, Any]:
    """The parts of ``penstock why`` that do not come from the ledger; null: not requested, or named in ``away``."""
    return {
        "source": _source_json(context.source) if context.source else None,
        "queues": [
            {
                "stage": q.stage,
                "topic": q.topic,
                "partition": q.partition,
                "behind": q.behind,
                "members": q.members,
            }
            for q in context.queues
        ],
        "trouble": dict(context.outages),
        "superseded": list(context.superseded),
        "stores": None
        if context.differences is None
        else [
            {"generation": h.generation, "store": h.store, "kind": h.kind, "chunks": h.chunks}
            for h in context.differences
        ],
        **({"readable_by": _person_json(context.person)} if context.person else {}),
        **({"query": _query_rank_json(context.query_rank)} if context.query_rank else {}),
        "away": list(context.away),
    }


def _source_json(source: Source) -> dict[str, Any]:
    item = source.item
    return {
        "name": source.name,
        "kind": source.kind,
        "state": source.state,
        "trouble": source.problem,
        "asked_at": source.last_success_at,
        "activities": dict(source.activities),
        "cursor": source.cursor,
        "guard": source.guard,
        "silent_seconds": source.silent_seconds,
        "document": None
        if item is None
        else {
            "external_id": item.external_id,
            "version": item.version,
            "gone": item.gone,
            "problem_code": item.problem_code,
            "problem_message": item.problem_message,
            "content_at": _iso(item.content_at),
            "access_at": _iso(item.access_at),
            "seen_at": _iso(item.seen_at),
            "difference": item.difference,
            "difference_at": _iso(item.difference_at),
            "in_doubt_since": _iso(item.in_doubt_since),
            "unlisted_since": _iso(item.unlisted_since),
        },
    }


def _person_json(person: Person) -> dict[str, Any]:
    return {
        "principals": list(person.names),
        "may_read": person.may_read,
        "by": list(person.by),
        "lacks": list(person.lacks),
    }


def _query_rank_json(query_rank: QueryRank) -> dict[str, Any]:
    return {
        "query": query_rank.query,
        "rank": query_rank.rank,
        "of": query_rank.of,
        "ranks": dict(query_rank.ranks),
        "reason": query_rank.reason,
    }


def for_reader(story: Story, tags: Collection[str]) -> dict[str, Any]:
    """The same shape for a reader of the document who is no operator: without dead letters (a later event may be for
    others), errors of the stores, versions of the ledger, and the tags of others. tags: the reader's."""
    own = Story(story.document, story.access, story.events, story.generations)
    document_story = as_json(own)
    document_story |= {"next": None, "notes": []}
    for name in ("seq", "announced_seq", "content_hash", "lane"):
        del document_story["document"][name]
    for event in document_story["events"]:
        for name in ("seq", "lane"):
            del event[name]
    document_story["generations"] = [g for g in document_story["generations"] if g["active"]]
    for generation in document_story["generations"]:
        for store in ("vectors", "keywords"):
            progress = generation[store]
            generation[store] = {name: progress[name] for name in ("state", "at", "pending_since", "refused")}
    document_story["access"]["acl_tags"] = [tag for tag in document_story["access"]["acl_tags"] if tag in tags]
    if story.active is not None and not (story.active.vectors.reached and story.active.keywords.reached):
        document_story["reason"] = "it has changed, and not every store has followed yet"
    return document_story


def _store_json(progress: StoreProgress) -> dict[str, Any]:
    return {
        "state": progress.state,
        "seq": progress.seq,
        "want_seq": progress.want_seq,
        "at": _iso(progress.at),
        "pending_since": _iso(progress.pending_since),
        "next_retry": _iso(progress.next_retry),
        "before": progress.before,
        "attempts": progress.attempts,
        "error": progress.error,
        "refused": progress.refused,
    }


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None
