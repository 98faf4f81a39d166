"""Reads one document's story: its events, the decisions, the progress of both stores, and its connector's rows.

The connectors' tables are only read here: each row belongs to one runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg.errors import InsufficientPrivilege
from psycopg.rows import class_row

from pipeline.core.identity import INGESTED
from pipeline.diagnosis.story_model import (
    MAX_COUNTED_BEFORE,
    Access,
    DeadLetter,
    Document,
    Event,
    GenerationProgress,
    Published,
    Source,
    StoreProgress,
    StoreState,
    Story,
)
from pipeline.ledger.documents import EVENTS_PER_DOCUMENT, Identity
from pipeline.stores.postgres import Connection
from pipeline.stores.stored_json import from_jsonb

MAX_CANDIDATES = 20
MAX_INACTIVE_CONNECTORS = 10
"""Connectors that are reported for an unknown document."""
MAX_DEAD_LETTERS = 100
"""The most dead letters of a document that are read, the newest that are open before others: records that nobody has
signed may name it by the thousand."""

_SOURCES = (
    "SELECT tenant, source AS name, kind, paused, removed_at IS NOT NULL AS removed,"
    " loaded_at IS NOT NULL AS loaded, guard, activities,"
    " extract(epoch FROM clock_timestamp() - seen_at)::float8 AS silent_seconds"
    " FROM connectors WHERE tenant = %s"
)


async def find(
    connection: Connection, tenant: str, names: Sequence[str], *, source: str | None = None
) -> list[tuple[Identity, str | None]]:
    """Documents that one of the names may denote, with their titles; at most MAX_CANDIDATES.

    A name is an id or an external id (``source/external_id`` too); where no document matches, a URL, a title, or the
    end of an external id. source: search this one only.
    """
    qualified = [tuple(name.split("/", 1)) for name in names if "/" in name]
    values = {
        "tenant": tenant,
        "names": list(names),
        "lower": [n.lower() for n in names],
        "limit": MAX_CANDIDATES,
        "ids": [id_ for id_ in map(_uuid, names) if id_ is not None],
        "sources": [named for named, _ in qualified],
        "rests": [rest for _, rest in qualified],
        "source": source,
    }
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


async def find_exactly(
    connection: Connection, tenant: str, names: Sequence[str], ids: Sequence[UUID], *, source: str | None
) -> list[tuple[UUID, str, str, bool]]:
    """(id, source, external id, whether it was erased) of the documents with one of these external ids or ids. For
    destructive commands: titles, URLs and parts of names do not match."""
    ids = [*ids, *(id_ for id_ in map(_uuid, names) if id_ is not None)]
    cursor = await connection.execute(
        "SELECT id, source, external_id, erased_at IS NOT NULL FROM documents WHERE tenant = %(tenant)s"
        " AND (id = ANY(%(ids)s::uuid[]) OR external_id = ANY(%(names)s))"
        " AND (%(source)s::text IS NULL OR source = %(source)s) ORDER BY source, external_id LIMIT %(limit)s",
        {"tenant": tenant, "ids": ids, "names": list(names), "source": source, "limit": MAX_CANDIDATES},
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
"""Takes a second with two million documents; only people who wait for one answer use it."""


def _uuid(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


async def read(connection: Connection, document: UUID) -> Story:
    """Everything that the ledger knows about a document."""
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
        await _generations(connection, document, desired=known.alive and bool(acl)),
        await _dead(connection, "document_id = %s", [document]),
    )


async def dead_letters(
    connection: Connection, tenant: str, names: Sequence[str], *, source: str | None = None
) -> Story:
    """The dead letters of a document that was never accepted."""
    where = (
        "tenant = %s AND (%s::text IS NULL OR source = %s) AND (external_id = ANY(%s) OR document_id::text = ANY(%s)"
        " OR EXISTS (SELECT FROM unnest(%s::text[]) n WHERE right(external_id, length(n)) = n))"
    )
    return Story(None, dead=await _dead(connection, where, [tenant, source, source, *[list(names)] * 3]))


async def _events(connection: Connection, document: UUID, event_count: int) -> tuple[Event, ...]:
    cursor = await connection.execute(
        "SELECT at, kind, outcome, version, observed_at, seq, lane FROM document_events WHERE document_id = %s"
        " ORDER BY (slot - %s + %s) %% %s",  # a ring: the slot after the newest one's is the oldest
        [document, event_count % EVENTS_PER_DOCUMENT, EVENTS_PER_DOCUMENT, EVENTS_PER_DOCUMENT],
    )
    return tuple(Event(*row) for row in await cursor.fetchall())


async def _generations(connection: Connection, document: UUID, *, desired: bool) -> tuple[GenerationProgress, ...]:
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
    generations: dict[str, tuple[str, int, dict[str, StoreProgress]]] = {}
    for name, state, chunks, store, *columns in await cursor.fetchall():
        _, _, stores = generations.setdefault(name, (state, chunks, {}))
        if store is not None:
            stores[store] = _progress(desired, *columns)
    for name, (_, _, stores) in generations.items():
        for store, progress in stores.items():
            if progress.pending_since is not None:
                before = await _before(connection, name, store, progress.pending_since)
                stores[store] = replace(progress, before=before)
    missing = StoreProgress("pending" if desired else "withdrawn")
    return tuple(
        GenerationProgress(
            name,
            state == "active",
            chunks if desired else 0,
            stores.get("vectors", missing),
            stores.get("keywords", missing),
            state,
        )
        for name, (state, chunks, stores) in generations.items()
    )


async def _before(connection: Connection, generation: str, store: str, since: datetime) -> int:
    """How many of the store's first MAX_COUNTED_BEFORE pending documents have been pending for longer."""
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT pending_since FROM index_state WHERE seq < want_seq AND generation = %s"
        " AND store = %s LIMIT %s) waiting WHERE pending_since < %s",
        [generation, store, MAX_COUNTED_BEFORE, since],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


def _progress(
    desired: bool,
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
            state, seq, want_seq, settled_at, pending_since, next_at if attempts or error else None, attempts, error
        )
    state = "withdrawn" if not desired else "partial" if refused else "settled"
    return StoreProgress(state, seq, want_seq, settled_at, error=error, refused=refused)


async def _dead(connection: Connection, where: LiteralString, values: Sequence[object]) -> tuple[DeadLetter, ...]:
    """The newest letters, before others those that nobody has replayed or dismissed; the oldest of them first.
    OFFSET 0: found by the document, not by their times."""
    cursor = await connection.execute(
        "SELECT * FROM (SELECT id, stage, code, message, at, attempt, replay_of, replayed_at, dismissed_at,"  # noqa: S608 — callers hand literals
        f" dismissed_by, dismissed_reason FROM dead_letters WHERE {where} OFFSET 0) d"
        " ORDER BY coalesce(replayed_at, dismissed_at) IS NULL DESC, at DESC, id DESC"
        f" LIMIT {MAX_DEAD_LETTERS}".encode(),
        values,
    )
    letters = [DeadLetter(*row) for row in await cursor.fetchall()]
    return tuple(sorted(letters, key=lambda letter: (letter.at, letter.id)))


async def read_source(connection: Connection, tenant: str, name: str, external_ids: Sequence[str]) -> Source | None:
    """The connector of this name, with its row of the first of these documents that it knows. For the documents of
    `penstock ingest` there is that row only. None: no connector has this name (a publisher of one's own)."""
    async with connection.cursor(row_factory=class_row(Source)) as cursor:
        await cursor.execute(f"{_SOURCES} AND source = %s".encode(), [tenant, name])
        known = await cursor.fetchone()
    if known is None:
        item = await _item(connection, tenant, name, external_ids) if name == INGESTED else None
        return Source(tenant, name, "ingest", False, True, None, {}, None, item=item) if item is not None else None
    return replace(
        known,
        cursor=await _cursor(connection, tenant, name),
        item=await _item(connection, tenant, name, external_ids),
    )


async def connector_documents(
    connection: Connection, tenant: str, external_ids: Sequence[str]
) -> list[tuple[str, str]]:
    """(source, external id) of the connectors' documents with one of these ids, published or not."""
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT source, external_id FROM connector_items WHERE tenant = %(tenant)s AND (external_id ="
                " ANY(%(ids)s) OR source || '/' || external_id = ANY(%(ids)s)) ORDER BY 1, 2 LIMIT 20",
                {"tenant": tenant, "ids": list(external_ids)},
            )
            return [(name, external_id) for name, external_id in await cursor.fetchall()]
    except InsufficientPrivilege:  # a role without access to the connectors' rows
        return []


async def inactive_connectors(connection: Connection, tenant: str) -> tuple[Source, ...]:
    """The tenant's connectors that do not follow their source at present."""
    async with connection.cursor(row_factory=class_row(Source)) as cursor:
        await cursor.execute(f"{_SOURCES} ORDER BY source LIMIT 500".encode(), [tenant])
        return tuple([source async for source in cursor if source.state != "following"][:MAX_INACTIVE_CONNECTORS])


async def superseded(connection: Connection, document: UUID) -> tuple[int, ...]:
    """Versions that are retained although they lost, the oldest observation first."""
    cursor = await connection.execute(
        "SELECT version FROM superseded WHERE document_id = %s ORDER BY observed_at", [document]
    )
    return tuple(version for (version,) in await cursor.fetchall())


async def memberships(
    connection: Connection, tenant: str, principals: Sequence[str]
) -> tuple[tuple[str, str, Any], ...]:
    """(source, principal, observed_at) of these people's known group memberships."""
    cursor = await connection.execute(
        "SELECT source, principal, observed_at FROM memberships WHERE tenant = %s AND principal = ANY(%s)"
        " ORDER BY 1, 2",
        [tenant, list(principals)],
    )
    return tuple((name, principal, at) for name, principal, at in await cursor.fetchall())


async def _cursor(connection: Connection, tenant: str, name: str) -> object | None:
    """The connector's cursor; None for roles that may not read it: all but the connectors' own and the owner."""
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT coalesce(full_cursor, changes_cursor) FROM connectors WHERE tenant = %s AND source = %s",
                [tenant, name],
            )
            row = await cursor.fetchone()
            return from_jsonb(row[0]) if row else None
    except InsufficientPrivilege:
        return None


async def _item(connection: Connection, tenant: str, name: str, external_ids: Sequence[str]) -> Published | None:
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT external_id, version, gone, problem_code, problem_message, content_at, access_at,"
                " greatest(swept_at, 'epoch'), difference, difference_at, in_doubt_since, unlisted_since"
                " FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
                " ORDER BY array_position(%s::text[], external_id::text) LIMIT 1",
                [tenant, name, list(external_ids), list(external_ids)],
            )
            row = await cursor.fetchone()
            return Published(*row) if row else None
    except InsufficientPrivilege:
        return None
