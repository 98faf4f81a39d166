"""Documents that both stores of the active generation hold: for callers that wait for them, and for announcements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pipeline.core.model import Lane
from pipeline.core.publication import Publication, is_reached
from pipeline.ledger.documents import Identity
from pipeline.stores.postgres import Connection


@dataclass(frozen=True, slots=True)
class Arrival:
    """The state of one document in the ledger and in the active generation's stores."""

    version: int | None
    access_observed_at: datetime | None
    deleted_floor: datetime | None
    settled: bool
    """Whether both stores hold what the ledger desires."""
    set_aside: bool
    """True if it failed in a store and waits for its next attempt."""
    searchable: bool
    """True if it has content, is not deleted, and somebody may read it."""
    chunks: int

    def has(self, publication: Publication) -> bool:
        """Whether the ledger has accepted this change, or a newer one of its kind."""
        return is_reached(
            publication,
            version=self.version,
            access_observed_at=self.access_observed_at,
            deleted_floor=self.deleted_floor,
        )


async def arrivals(connection: Connection, ids: Collection[UUID]) -> dict[UUID, Arrival]:
    """The states of these documents. A document that the ledger does not know is absent."""
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
        WHERE d.id = ANY(%s::uuid[])
        GROUP BY d.id, a.acl_tags
        """,
        [list(ids)],
    )
    return {id_: Arrival(*rest) for id_, *rest in await cursor.fetchall()}


async def known(connection: Connection, ids: Collection[UUID]) -> set[UUID]:
    """The ids of these documents that the ledger has a row for."""
    cursor = await connection.execute("SELECT id FROM documents WHERE id = ANY(%s)", [list(ids)])
    return {id_ for (id_,) in await cursor.fetchall()}


async def dead_since(connection: Connection, ids: Collection[UUID], since: datetime) -> set[UUID]:
    """The ids of these documents that had an event dead-lettered since then."""
    cursor = await connection.execute(
        "SELECT DISTINCT document_id FROM dead_letters"
        " WHERE document_id = ANY(%s) AND at >= %s AND replayed_at IS NULL",
        [list(ids), since],
    )
    return {id_ for (id_,) in await cursor.fetchall()}


async def embedded_ever(connection: Connection, ids: Collection[UUID]) -> int:
    """The number of chunks that were ever embedded for these documents. The difference between two calls is the number
    embedded in between."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE document_id = ANY(%s) AND store = 'vectors'",
        [list(ids)],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


@dataclass(frozen=True, slots=True)
class Announcement:
    """A document that both stores of the active generation hold as desired, and that is not announced yet."""

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
"""A cheap check before ``_READY``, which Postgres plans at each call (2 ms). It spares the plan in half of all calls:
the store that finishes first finds nothing to announce."""


async def ready_to_announce(connection: Connection, ids: Collection[UUID]) -> list[Announcement]:
    """The documents among these that can be announced."""
    cursor = await connection.execute(_REACHED, [list(ids)])
    reached = [id_ for (id_,) in await cursor.fetchall()]
    if not reached:
        return []
    cursor = await connection.execute(_READY + " AND d.id = ANY(%s) ORDER BY d.seq", [reached])
    return [_announcement(row) for row in await cursor.fetchall()]


async def missed_announcements(
    connection: Connection, *, after: int, limit: int
) -> tuple[list[Announcement], int | None]:
    """Look at the next ``limit`` unannounced documents whose seq is above ``after``; returns those that can be
    announced, and the seq after which the next page begins (None: this was the last page).

    It reads in pages because during a first load nearly all documents are unannounced, and hardly any was missed.
    """
    cursor = await connection.execute(
        "SELECT id, seq FROM documents WHERE announced_seq < seq AND seq > %s ORDER BY seq LIMIT %s", [after, limit]
    )
    page = await cursor.fetchall()
    ready = await ready_to_announce(connection, [id_ for id_, _ in page])
    return ready, page[-1][1] if len(page) == limit else None


def _announcement(row: tuple[Any, ...]) -> Announcement:
    id_, tenant, source, external_id, *rest = row
    return Announcement(Identity(id_, tenant, source, external_id), *rest)


async def mark_announced(connection: Connection, done: Sequence[Announcement]) -> None:
    """Record that these announcements were delivered. A document that has changed since is announced again."""
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
