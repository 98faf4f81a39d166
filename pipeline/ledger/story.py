"""Reading one document's story: what was heard of it, what was decided, how far each store is. For ``why``.

Its shapes: ``story_shape``; what follows from it: ``story_verdict``; what connectors know of it: ``story_source``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import LiteralString
from uuid import UUID

from pipeline.ledger.documents import EVENTS_KEPT, Identity
from pipeline.ledger.story_shape import (
    MOST_BEFORE,
    Access,
    DeadLetter,
    Document,
    Event,
    GenerationProgress,
    StoreProgress,
    StoreState,
    Story,
)
from pipeline.stores.postgres import Connection

CANDIDATES_SHOWN = 20


async def find(
    connection: Connection, tenant: str, names: Sequence[str], *, source: str | None = None
) -> list[tuple[Identity, str | None]]:
    """The documents that one of these names means, with their titles; at most CANDIDATES_SHOWN. source: of it alone.

    A name is an id or an external id (``source/external_id`` too). Where none is one: a URL, a title, or the end of an
    external id.
    """
    qualified = [tuple(name.split("/", 1)) for name in names if "/" in name]
    values = {
        "tenant": tenant, "names": list(names), "lower": [n.lower() for n in names], "limit": CANDIDATES_SHOWN,
        "ids": [id_ for id_ in map(_uuid, names) if id_ is not None],
        "sources": [named for named, _ in qualified], "rests": [rest for _, rest in qualified], "source": source,
    }  # fmt: skip
    for condition in (_INDEXED, _SCANNED):
        cursor = await connection.execute(
            "SELECT id, tenant, source, external_id, title FROM documents"  # noqa: S608 — constants of this module
            f" WHERE tenant = %(tenant)s AND ({condition}) AND (%(source)s::text IS NULL OR source = %(source)s)"
            " ORDER BY source, external_id LIMIT %(limit)s".encode(),
            values,
        )
        if rows := await cursor.fetchall():
            return [(Identity(*identity), title) for *identity, title in rows]
    return []


async def exactly(
    connection: Connection, tenant: str, names: Sequence[str], ids: Sequence[UUID], *, source: str | None = None
) -> list[tuple[UUID, str, str, bool]]:
    """(id, source, external id, whether it was erased) of the documents that are called precisely so, or have one of
    these ids. For commands that destroy: nothing is found by a part of its name, by its title or by its address."""
    ids = [*ids, *(id_ for id_ in map(_uuid, names) if id_ is not None)]
    cursor = await connection.execute(
        "SELECT id, source, external_id, erased_at IS NOT NULL FROM documents WHERE tenant = %(tenant)s"
        " AND (id = ANY(%(ids)s::uuid[]) OR external_id = ANY(%(names)s))"
        " AND (%(source)s::text IS NULL OR source = %(source)s) ORDER BY source, external_id LIMIT %(limit)s",
        {"tenant": tenant, "ids": ids, "names": list(names), "source": source, "limit": CANDIDATES_SHOWN},
    )
    return [(id_, of_source, name, erased) for id_, of_source, name, erased in await cursor.fetchall()]


_INDEXED = """
    id = ANY(%(ids)s::uuid[]) OR external_id = ANY(%(names)s) OR (external_id = ANY(%(rests)s)
        AND EXISTS (SELECT FROM unnest(%(sources)s::text[], %(rests)s::text[]) n (source, rest)
                    WHERE n.source = documents.source AND n.rest = external_id))
"""
_SCANNED = """
    source_url = ANY(%(names)s) OR lower(title) = ANY(%(lower)s)
        OR EXISTS (SELECT FROM unnest(%(names)s::text[]) n WHERE right(external_id, length(n)) = n)
"""
"""A second on two million documents: people ask this one at a time."""


def _uuid(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


async def tell(connection: Connection, document: UUID) -> Story:
    """Everything that is known of a document."""
    cursor = await connection.execute(
        "SELECT d.id, d.tenant, d.source, d.external_id, d.seq, d.announced_seq, d.version, d.observed_at,"
        " d.content_hash, d.title, d.source_url, d.author, d.media_type, d.source_modified_at, d.received_at,"
        " d.changed_at, d.deleted_at, d.lane, d.event_count, a.acl_tags, a.required_tags, d.access_observed_at"
        " FROM documents d LEFT JOIN access_sets a ON a.id = d.access_id WHERE d.id = %s",
        [document],
    )
    row = await cursor.fetchone()
    if row is None:
        return Story(None, dead=await _dead(connection, "document_id = %s", [document]))
    known = Document(Identity(*row[:4]), *row[4:18])
    event_count, acl, required, access_observed_at = row[18:]
    return Story(
        known,
        Access(tuple(acl or ()), tuple(required or ()), access_observed_at),
        await _events(connection, document, event_count),
        await _generations(connection, document, wanted=known.alive and bool(acl)),
        await _dead(connection, "document_id = %s", [document]),
    )


async def dead_letters(
    connection: Connection, tenant: str, names: Sequence[str], *, source: str | None = None
) -> Story:
    """What is known of a document that was never accepted."""
    where = (
        "tenant = %s AND (%s::text IS NULL OR source = %s) AND (external_id = ANY(%s) OR document_id::text = ANY(%s)"
        " OR EXISTS (SELECT FROM unnest(%s::text[]) n WHERE right(external_id, length(n)) = n))"
    )
    return Story(None, dead=await _dead(connection, where, [tenant, source, source, *[list(names)] * 3]))


async def _events(connection: Connection, document: UUID, event_count: int) -> tuple[Event, ...]:
    cursor = await connection.execute(
        "SELECT at, kind, outcome, version, observed_at, seq, lane FROM document_events WHERE document_id = %s"
        " ORDER BY (slot - %s + %s) %% %s",  # a ring: the slot after the newest one's is the oldest
        [document, event_count % EVENTS_KEPT, EVENTS_KEPT, EVENTS_KEPT],
    )
    return tuple(Event(*row) for row in await cursor.fetchall())


async def _generations(connection: Connection, document: UUID, *, wanted: bool) -> tuple[GenerationProgress, ...]:
    cursor = await connection.execute(
        """
        SELECT g.name, g.state, coalesce(cardinality(m.chunk_ids), 0), s.store, s.seq, s.want_seq,
            s.settled_at, s.pending_since, s.next_at, s.attempts, s.error, cardinality(s.refused)
        FROM generations g
        LEFT JOIN manifests m ON (m.document_id, m.generation) = (%(id)s, g.name)
        LEFT JOIN index_state s ON (s.document_id, s.generation) = (%(id)s, g.name)
        WHERE g.state <> 'retired'
        ORDER BY (g.state = 'active') DESC, g.created_at DESC
        """,
        {"id": document},
    )
    found: dict[str, tuple[str, int, dict[str, StoreProgress]]] = {}
    for name, state, chunks, store, *progress in await cursor.fetchall():
        _, _, stores = found.setdefault(name, (state, chunks, {}))
        if store is not None:
            stores[store] = _progress(wanted, *progress)
    for name, (_, _, stores) in found.items():
        for store, one in stores.items():
            if one.pending_since is not None:
                stores[store] = replace(one, before=await _before(connection, name, store, one.pending_since))
    missing = StoreProgress("pending" if wanted else "withdrawn")
    return tuple(
        GenerationProgress(
            name,
            state == "active",
            chunks if wanted else 0,
            stores.get("vectors", missing),
            stores.get("keywords", missing),
            state,
        )
        for name, (state, chunks, stores) in found.items()
    )


async def _before(connection: Connection, generation: str, store: str, since: datetime) -> int:
    """How many documents of the store wait for longer, among the first MOST_BEFORE that wait."""
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT pending_since FROM index_state WHERE seq < want_seq AND generation = %s"
        " AND store = %s LIMIT %s) waiting WHERE pending_since < %s",
        [generation, store, MOST_BEFORE, since],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


def _progress(
    wanted: bool,
    seq: int,
    want_seq: int,
    settled_at: datetime | None,
    pending_since: datetime,
    next_at: datetime,
    attempts: int,
    error: str | None,
    refused: int,
) -> StoreProgress:
    if seq < want_seq:
        state: StoreState = "failed" if attempts else "pending"
        return StoreProgress(
            state, seq, want_seq, settled_at, pending_since, next_at if attempts else None, attempts, error
        )
    state = "withdrawn" if not wanted else "partial" if refused else "settled"
    return StoreProgress(state, seq, want_seq, settled_at, error=error, refused=refused)


async def _dead(connection: Connection, where: LiteralString, values: Sequence[object]) -> tuple[DeadLetter, ...]:
    cursor = await connection.execute(
        "SELECT id, stage, code, message, at, attempt, replay_of, replayed_at, dismissed_at, dismissed_by,"  # noqa: S608 — callers hand literals
        " dismissed_reason FROM dead_letters"
        f" WHERE {where} ORDER BY at".encode(),
        values,
    )
    return tuple(DeadLetter(*row) for row in await cursor.fetchall())
