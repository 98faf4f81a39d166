"""Has what was published arrived, and do both stores hold it? For whoever waits for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.stores.postgres import Connection


@dataclass(frozen=True, slots=True)
class Arrival:
    """One document as the ledger and the active generation's stores have it."""

    version: int | None
    access_observed_at: datetime | None
    deleted_floor: datetime | None
    settled: bool
    """Both stores equal the ledger."""
    set_aside: bool
    """It failed in a store and waits for its next try."""
    searchable: bool
    """Alive, readable by somebody, and with content."""
    chunks: int


async def arrivals(connection: Connection, ids: Collection[UUID]) -> dict[UUID, Arrival]:
    """What is known of these documents; one that never arrived is absent."""
    cursor = await connection.execute(
        """
        SELECT d.id, d.version, d.access_observed_at, d.deleted_floor,
            coalesce(bool_and(s.seq >= s.want_seq), true),
            coalesce(bool_or(s.seq < s.want_seq AND s.attempts > 0), false),
            d.deleted_at IS NULL AND d.version IS NOT NULL AND coalesce(cardinality(a.acl_tags) > 0, false),
            coalesce(max(cardinality(m.chunk_ids)), 0)
        FROM documents d
        LEFT JOIN access_sets a ON a.id = d.access_id
        LEFT JOIN generations g ON g.state = 'active'
        LEFT JOIN index_state s ON s.document_id = d.id AND s.generation = g.name
        LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = g.name
        WHERE d.id = ANY(%s)
        GROUP BY d.id, a.acl_tags
        """,
        [list(ids)],
    )
    return {id_: Arrival(*rest) for id_, *rest in await cursor.fetchall()}


async def known(connection: Connection, ids: Collection[UUID]) -> set[UUID]:
    """Which of these documents the ledger has heard of."""
    cursor = await connection.execute("SELECT id FROM documents WHERE id = ANY(%s)", [list(ids)])
    return {id_ for (id_,) in await cursor.fetchall()}


async def dead_since(connection: Connection, ids: Collection[UUID], since: datetime) -> set[UUID]:
    """Which of these documents had an event dead-lettered since then."""
    cursor = await connection.execute(
        "SELECT DISTINCT document_id FROM dead_letters"
        " WHERE document_id = ANY(%s) AND at >= %s AND replayed_at IS NULL",
        [list(ids), since],
    )
    return {id_ for (id_,) in await cursor.fetchall()}


async def embedded_ever(connection: Connection, ids: Collection[UUID]) -> int:
    """Chunks embedded for these documents, ever: the difference of two readings is what was embedded between."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE document_id = ANY(%s) AND store = 'vectors'",
        [list(ids)],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0
