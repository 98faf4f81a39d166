"""Passages that contradict or repeat each other (migration 0080): written by the analysis worker, read by people.

A conflict stands as long as both of its chunks are in their documents' manifests. A reader may see it only while it may
read both documents; that is decided in the statement that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID, uuid5

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pipeline.core.conflicts import Kind, OlderSide
from pipeline.core.model import Span
from pipeline.stores.postgres import Connection

_NAMESPACE = UUID("6f0d7f0c-5d0b-5c0e-9a54-1d3f8f6f2b80")
State = Literal["open", "dismissed", "accepted"]
Place = tuple[Kind, Span, Span]
"""A kind, and the characters of both chunks."""


@dataclass(frozen=True, slots=True)
class Side:
    """A passage of a conflict."""

    document_id: UUID
    chunk_id: UUID


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict to store. Its id is the same whichever side is ``a``."""

    id: UUID
    kind: Kind
    a: Side
    b: Side
    older: OlderSide
    places: Sequence[Place]


def conflict_of(generation: str, kind: Kind, a: Side, b: Side, older: OlderSide, places: Sequence[Place]) -> Conflict:
    """The conflict of these two passages, the one with the smaller chunk id as its ``a``."""
    if b.chunk_id < a.chunk_id:
        swapped: OlderSide = {"a": "b", "b": "a", None: None}[older]
        return conflict_of(generation, kind, b, a, swapped, [(kind, of_b, of_a) for kind, of_a, of_b in places])
    return Conflict(uuid5(_NAMESPACE, f"{generation}/{a.chunk_id}/{b.chunk_id}"), kind, a, b, older, places)


@dataclass(frozen=True, slots=True)
class Examined:
    """A document as the analysis needs it."""

    tenant: str
    source: str
    searchable: bool
    access_id: int | None
    """Its access set. None: it has none, and nobody may read it."""
    chunk_ids: tuple[UUID, ...]
    """Its desired chunks in the generation; empty where it is not searchable."""
    new_chunk_ids: tuple[UUID, ...]
    """Those that were not compared with their neighbours yet, as readers of this access set."""


async def examined(connection: Connection, generation: str, document_id: UUID) -> Examined | None:
    """The document's desired chunks, and which of them are new. None: there is no such document."""
    cursor = await connection.execute(
        """
        SELECT d.tenant, d.source, d.deleted_at IS NULL AND d.version IS NOT NULL, d.access_id, m.chunk_ids, e.chunk_ids
        FROM documents d
        LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
        LEFT JOIN conflict_examined e
            ON e.document_id = d.id AND e.generation = %(generation)s AND e.access_id = d.access_id
        WHERE d.id = %(document)s
        """,
        {"document": document_id, "generation": generation},
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    tenant, source, alive, access_id, chunk_ids, before = row
    chunks = tuple(dict.fromkeys(chunk_ids or ())) if alive else ()
    new_chunks = tuple(chunk for chunk in chunks if chunk not in set(before or ()))
    return Examined(tenant, source, alive, access_id, chunks, new_chunks)


async def record_examined(
    connection: Connection, generation: str, document_id: UUID, of: Examined, chunk_ids: Sequence[UUID]
) -> None:
    """Record that these chunks of the document, and no others, were compared with their neighbours."""
    await connection.execute(
        """
        INSERT INTO conflict_examined (document_id, tenant, generation, chunk_ids, access_id)
        VALUES (%(document)s, %(tenant)s, %(generation)s, %(chunks)s, %(access)s)
        ON CONFLICT (document_id) DO UPDATE
        SET generation = excluded.generation, chunk_ids = excluded.chunk_ids, access_id = excluded.access_id
        """,
        {
            "document": document_id,
            "tenant": of.tenant,
            "generation": generation,
            "chunks": list(chunk_ids),
            "access": of.access_id,
        },
    )


async def store(connection: Connection, tenant: str, generation: str, conflicts: Sequence[Conflict]) -> list[UUID]:
    """Store conflicts whose passages both still stand, and return the ids of those that are new or have changed."""
    stored = []
    for conflict in conflicts:
        cursor = await connection.execute(
            """
            INSERT INTO conflicts AS c
                (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, older, places)
            SELECT %(id)s, %(tenant)s, %(generation)s, %(kind)s, %(document_a)s, %(document_b)s,
                %(chunk_a)s, %(chunk_b)s, %(older)s, %(places)s
            WHERE EXISTS (SELECT FROM manifests m WHERE m.document_id = %(document_a)s
                    AND m.generation = %(generation)s AND %(chunk_a)s = ANY(m.chunk_ids))
              AND EXISTS (SELECT FROM manifests m WHERE m.document_id = %(document_b)s
                    AND m.generation = %(generation)s AND %(chunk_b)s = ANY(m.chunk_ids))
            ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, older = excluded.older, places = excluded.places
            WHERE (c.kind, c.older, c.places) IS DISTINCT FROM (excluded.kind, excluded.older, excluded.places)
            RETURNING c.id
            """,
            {
                "id": conflict.id,
                "tenant": tenant,
                "generation": generation,
                "kind": conflict.kind,
                "document_a": conflict.a.document_id,
                "document_b": conflict.b.document_id,
                "chunk_a": conflict.a.chunk_id,
                "chunk_b": conflict.b.chunk_id,
                "older": conflict.older,
                "places": Jsonb([[kind, list(a), list(b)] for kind, a, b in conflict.places]),
            },
        )
        stored += [id_ for (id_,) in await cursor.fetchall()]
    return stored


async def close(
    connection: Connection, generation: str, document_id: UUID, chunk_ids: Collection[UUID]
) -> list[Conflict]:
    """Delete the conflicts of a document's passages other than these, and return them."""
    cursor = await connection.execute(
        """
        DELETE FROM conflicts
        WHERE (document_a = %(document)s OR document_b = %(document)s) AND (
            generation <> %(generation)s
            OR document_a = %(document)s AND chunk_a <> ALL(%(chunks)s::uuid[])
            OR document_b = %(document)s AND chunk_b <> ALL(%(chunks)s::uuid[])
        )
        RETURNING id, kind, document_a, chunk_a, document_b, chunk_b, older
        """,
        {"document": document_id, "generation": generation, "chunks": list(chunk_ids)},
    )
    return [_conflict(row) for row in await cursor.fetchall()]


async def other_access(connection: Connection, document_id: UUID) -> set[int]:
    """The access sets of the documents that this one has conflicts with."""
    cursor = await connection.execute(
        """
        SELECT DISTINCT o.access_id FROM conflicts c
        JOIN documents o ON o.id = CASE c.document_a WHEN %(document)s THEN c.document_b ELSE c.document_a END
        WHERE (c.document_a = %(document)s OR c.document_b = %(document)s) AND o.access_id IS NOT NULL
        """,
        {"document": document_id},
    )
    return {access_id for (access_id,) in await cursor.fetchall()}


async def close_unread(connection: Connection, document_id: UUID, access_ids: Collection[int]) -> list[Conflict]:
    """Delete the conflicts of a document with documents of other access sets than these, and return them."""
    cursor = await connection.execute(
        """
        DELETE FROM conflicts c USING documents o
        WHERE (c.document_a = %(document)s OR c.document_b = %(document)s)
          AND o.id = CASE c.document_a WHEN %(document)s THEN c.document_b ELSE c.document_a END
          AND (o.access_id IS NULL OR o.access_id <> ALL(%(access_ids)s::bigint[]))
        RETURNING c.id, c.kind, c.document_a, c.chunk_a, c.document_b, c.chunk_b, c.older
        """,
        {"document": document_id, "access_ids": list(access_ids)},
    )
    return [_conflict(row) for row in await cursor.fetchall()]


async def divided(connection: Connection, tenant: str, source: str) -> list[UUID]:
    """The first documents of the tenant's conflicts between two access sets, of which at least one document is of this
    source: whether somebody may read both may depend on memberships."""
    cursor = await connection.execute(
        """
        SELECT DISTINCT c.document_a FROM conflicts c
        JOIN documents a ON a.id = c.document_a JOIN documents b ON b.id = c.document_b
        WHERE c.tenant = %(tenant)s AND a.access_id IS DISTINCT FROM b.access_id AND %(source)s IN (a.source, b.source)
        """,
        {"tenant": tenant, "source": source},
    )
    return [document_id for (document_id,) in await cursor.fetchall()]


async def forget_examined(connection: Connection, ended: Sequence[Conflict]) -> None:
    """Have the documents of conflicts that ended without a change of theirs compared again when one is announced."""
    documents = [side.document_id for conflict in ended for side in (conflict.a, conflict.b)]
    await connection.execute("DELETE FROM conflict_examined WHERE document_id = ANY(%s)", [documents])


def _conflict(row: Sequence[Any]) -> Conflict:
    id_, kind, document_a, chunk_a, document_b, chunk_b, older = row
    return Conflict(id_, kind, Side(document_a, chunk_a), Side(document_b, chunk_b), older, ())


@dataclass(frozen=True, slots=True)
class Listed:
    """A conflict as it is shown."""

    id: UUID
    kind: Kind
    state: State
    at: datetime
    older: OlderSide
    document_a: UUID
    document_b: UUID
    chunk_a: UUID
    chunk_b: UUID
    external_id_a: str
    external_id_b: str
    source_a: str
    source_b: str
    title_a: str
    title_b: str
    source_url_a: str | None
    source_url_b: str | None
    places: list[Any]

    @property
    def older_side(self) -> int | None:
        """The passage whose document is older: 0 or 1. None: not known."""
        return {"a": 0, "b": 1, None: None}[self.older]


_STANDING = """
    SELECT c.id, c.kind, coalesce(k.state, 'open') AS state, c.at, c.older, c.document_a, c.document_b, c.chunk_a,
        c.chunk_b, a.external_id AS external_id_a, b.external_id AS external_id_b, a.source AS source_a,
        b.source AS source_b, coalesce(a.title, '') AS title_a, coalesce(b.title, '') AS title_b,
        a.source_url AS source_url_a, b.source_url AS source_url_b, c.places
    FROM conflicts c
    JOIN documents a ON a.id = c.document_a JOIN documents b ON b.id = c.document_b
    JOIN generations g ON g.name = c.generation AND g.state = 'active'
    LEFT JOIN conflict_decisions k ON k.conflict_id = c.id AND k.tenant = c.tenant
    WHERE c.tenant = %(tenant)s AND a.tenant = %(tenant)s AND b.tenant = %(tenant)s
      AND a.deleted_at IS NULL AND b.deleted_at IS NULL AND a.version IS NOT NULL AND b.version IS NOT NULL
      AND (%(access_ids)s::bigint[] IS NULL
        OR a.access_id = ANY(%(access_ids)s::bigint[]) AND b.access_id = ANY(%(access_ids)s::bigint[]))
      AND EXISTS (SELECT FROM manifests m WHERE m.document_id = a.id AND m.generation = c.generation
            AND c.chunk_a = ANY(m.chunk_ids))
      AND EXISTS (SELECT FROM manifests m WHERE m.document_id = b.id AND m.generation = c.generation
            AND c.chunk_b = ANY(m.chunk_ids))
      AND (%(id)s::uuid IS NULL OR c.id = %(id)s)
      AND (%(state)s::text IS NULL OR coalesce(k.state, 'open') = %(state)s)
      AND (%(kinds)s::text[] IS NULL OR c.kind = ANY(%(kinds)s))
      AND (%(sources)s::text[] IS NULL OR a.source = ANY(%(sources)s) OR b.source = ANY(%(sources)s))
      AND (%(after_at)s::timestamptz IS NULL OR c.at < %(after_at)s OR c.at = %(after_at)s AND c.id > %(after_id)s)
      AND (%(document)s::text IS NULL OR %(document)s IN (a.external_id, b.external_id, a.id::text, b.id::text))
    ORDER BY c.at DESC, c.id LIMIT %(limit)s
"""


async def standing(
    connection: Connection,
    tenant: str,
    *,
    access_ids: Sequence[int] | None,
    state: State | None = "open",
    kinds: Sequence[Kind] | None = None,
    sources: Sequence[str] | None = None,
    document: str | None = None,
    id_: UUID | None = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int = 100,
) -> list[Listed]:
    """The tenant's conflicts whose passages both stand, the newest first. after: only those that follow the one with
    this time and id. access_ids: the access sets that the caller
    satisfies now, so that it sees only what it may read both sides of; None for an operator, who sees no text. sources,
    document: one of the passages is of such a source, or of the document with this id or external id."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            _STANDING,
            {
                "tenant": tenant,
                "access_ids": None if access_ids is None else list(access_ids),
                "state": state,
                "kinds": None if kinds is None else list(kinds),
                "sources": None if sources is None else list(sources),
                "document": document,
                "id": id_,
                "after_at": after and after[0],
                "after_id": after and after[1],
                "limit": limit,
            },
        )
        return [Listed(**row) for row in await cursor.fetchall()]


async def decide(connection: Connection, tenant: str, id_: UUID, state: State) -> None:
    """Record a decision on a conflict of the tenant, which the caller has looked up; ``open`` takes it back."""
    if state == "open":
        await connection.execute("DELETE FROM conflict_decisions WHERE conflict_id = %s AND tenant = %s", [id_, tenant])
        return
    await connection.execute(
        """
        INSERT INTO conflict_decisions AS k (conflict_id, tenant, state) VALUES (%(id)s, %(tenant)s, %(state)s)
        ON CONFLICT (conflict_id) DO UPDATE SET state = excluded.state, at = clock_timestamp()
        WHERE k.tenant = %(tenant)s
        """,
        {"id": id_, "tenant": tenant, "state": state},
    )
