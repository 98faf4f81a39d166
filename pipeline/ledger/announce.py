"""Which documents may be announced: both stores of the active generation reached what is wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pipeline.core.model import Lane
from pipeline.ledger.documents import Identity
from pipeline.stores.postgres import Connection


@dataclass(frozen=True, slots=True)
class Announcement:
    identity: Identity
    seq: int
    version: int | None
    state: Literal["searchable", "partial", "retired"]
    generation: str
    chunks: int
    lane: Lane
    changed_at: datetime | None
    """When the source changed; freshness is announced_at − changed_at."""
    accepted_at: datetime


_READY = """
    SELECT d.id, d.tenant, d.source, d.external_id, d.seq, d.version,
        CASE WHEN d.deleted_at IS NOT NULL OR cardinality(a.acl_tags) = 0 THEN 'retired'
             WHEN cardinality(v.refused) > 0 THEN 'partial' ELSE 'searchable' END,
        g.name, coalesce(cardinality(m.chunk_ids), 0), d.lane, d.changed_at, d.received_at
    FROM documents d
    JOIN generations g ON g.state = 'active'
    JOIN index_state v ON (v.document_id, v.generation, v.store) = (d.id, g.name, 'vectors')
    JOIN index_state k ON (k.document_id, k.generation, k.store) = (d.id, g.name, 'keywords')
    LEFT JOIN manifests m ON (m.document_id, m.generation) = (d.id, g.name)
    LEFT JOIN access_sets a ON a.id = d.access_id
    WHERE d.announced_seq < d.seq AND v.seq >= v.want_seq AND k.seq >= k.want_seq
"""


_REACHED = """
    SELECT document_id FROM index_state
    WHERE document_id = ANY(%s) AND generation = (SELECT name FROM generations WHERE state = 'active')
    GROUP BY document_id HAVING bool_and(seq >= want_seq)
"""
"""Asked first: the store that is done first finds nothing to announce, and ``_READY`` is planned anew each time, which
takes Postgres two milliseconds."""


async def ready(connection: Connection, ids: Collection[UUID]) -> list[Announcement]:
    """What can be announced among these documents."""
    cursor = await connection.execute(_REACHED, [list(ids)])
    reached = [id_ for (id_,) in await cursor.fetchall()]
    if not reached:
        return []
    cursor = await connection.execute(_READY + " AND d.id = ANY(%s) ORDER BY d.seq", [reached])
    return [_announcement(row) for row in await cursor.fetchall()]


async def missed(connection: Connection, *, after: int, limit: int) -> tuple[list[Announcement], int | None]:
    """What can be announced among the next ``limit`` unannounced documents by seq, and where to go on; None at the end.

    Paged, because during a first load everything is unannounced and hardly anything was missed.
    """
    cursor = await connection.execute(
        "SELECT id, seq FROM documents WHERE announced_seq < seq AND seq > %s ORDER BY seq LIMIT %s", [after, limit]
    )
    page = await cursor.fetchall()
    found = await ready(connection, [id_ for id_, _ in page])
    return found, page[-1][1] if len(page) == limit else None


def _announcement(row: tuple[Any, ...]) -> Announcement:
    id_, tenant, source, external_id, *rest = row
    return Announcement(Identity(id_, tenant, source, external_id), *rest)


async def announced(connection: Connection, done: Sequence[Announcement]) -> None:
    """They were delivered. A document that moved meanwhile stays to be announced again."""
    ids = [a.identity.id for a in done]
    await connection.execute(
        """
        WITH locked AS (  -- in detect's order: an UPDATE takes its rows in whatever order its join brings them
            SELECT id FROM documents WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE
        )
        UPDATE documents d SET announced_seq = greatest(d.announced_seq, w.seq)
        FROM locked JOIN unnest(%s::uuid[], %s::bigint[]) AS w (id, seq) USING (id) WHERE d.id = locked.id
        """,
        [ids, ids, [a.seq for a in done]],
    )
