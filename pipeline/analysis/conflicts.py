"""Task ``conflicts``: compares each new passage with its nearest neighbours, and stores what contradicts or repeats it.

Neighbours are passages of the same tenant that share a possible reader with it. A document's conflicts end when its
passages do, or when nobody may read both any more, also because a membership was lost. With another access set, all of
its passages are compared again. To slow no first load, the task waits while documents are pending, and is paced
(``SHARE``): it lags behind instead. Tenants share its pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal
from uuid import UUID

from psycopg import sql

from pipeline.analysis.memberships import Memberships, latest
from pipeline.analysis.task import Services
from pipeline.analysis.tasks import TOPICS
from pipeline.core.conflicts import Passage, examine, passage
from pipeline.core.graph import BUSY_AT_MOST_SECONDS, BUSY_DOCUMENTS, GROWN_AT_LATEST_SECONDS, READ_WHOLE_ROWS
from pipeline.core.identity import OWN_TAG
from pipeline.core.model import Generation
from pipeline.core.throttle import rest_after
from pipeline.kafka.client import deliver
from pipeline.ledger import conflicts, generations, work
from pipeline.ledger.conflicts import Conflict, Examined, Side
from pipeline.stores import graph
from pipeline.stores.postgres import Connection, translated
from topics.messages import ConflictChanged, DocumentIndexed, IdentityChanged, Message
from topics.registry import CONFLICTS

NEIGHBOURS = 6
"""How many neighbours a passage is compared with: as many as where detection was measured (docs/conflicts.md)."""
CANDIDATES = 24
"""How many nearest passages are looked up: some are of another access, and some are no longer desired."""
LEAST_SIMILAR = 0.4
"""The least cosine of a neighbour. Passages below share no statement."""
SHARE = 0.25
"""The share of its time in which the task works, for all tenants together. It leaves the database to others in the
rest."""
BUSY_CHECK_SECONDS = 1.0
"""Pause between two checks whether documents are pending."""
GRAPH_AT_MOST_SECONDS = GROWN_AT_LATEST_SECONDS + 300.0
"""How long comparisons wait for a graph: until it has to be begun, and some minutes to build it. It is ten minutes less
than the limit of the alert `PenstockAnalysisStuck`, because a batch takes time, too."""
READ_AT_ONCE = 32
MOST_TUPLES = 20_000
"""The most rows that a walk through the graph visits, where a tenant has few of a table's rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A passage from the chunk table, with its document's fields."""

    chunk_id: UUID
    document_id: UUID
    text: str
    access_id: int
    title: str
    headings: tuple[str, ...]
    modified_at: datetime | None

    def read(self) -> Passage:
        return passage(self.text, str(self.document_id), self.title, self.headings, self.modified_at)

    @property
    def side(self) -> Side:
        return Side(self.document_id, self.chunk_id)


class Conflicts:
    """Follows ``documents.indexed.v1``, and the memberships of ``identities.v1``."""

    name = "conflicts"
    topics = TOPICS[name]

    def __init__(self, services: Services) -> None:
        self._pool = services.pool
        self._memberships = Memberships(services.pool, services.settings.kafka)
        self._metrics = services.metrics
        self._producer = services.producer
        self._active = 0
        """How many tenants' messages are handled at the moment."""
        self._waited_seconds = 0.0
        """The time in which documents were pending, less the time in which they were not; between 0 and
        BUSY_AT_MOST_SECONDS."""
        self._graph_waited_seconds = 0.0
        self._checked_at = self._check_at = monotonic()

    async def handle(self, messages: Sequence[Message]) -> None:
        """Examine the documents of these messages, each once. Raises Retryable when Postgres is away."""
        documents = dict.fromkeys(UUID(m.document_id) for m in messages if isinstance(m, DocumentIndexed))
        self._active += 1
        try:
            for document_id in documents:
                await self._examine(document_id)
            await self._end_unread([m for m in messages if isinstance(m, IdentityChanged)])
        finally:
            self._active -= 1

    async def _end_unread(self, changes: Sequence[IdentityChanged]) -> None:
        """End the conflicts that nobody may read any more after these changes of memberships."""
        until = latest()
        for tenant, source in dict.fromkeys((change.tenant, change.source) for change in changes):
            documents = await self._divided(tenant, source)
            if not documents:
                continue
            of_source = [change for change in changes if (change.tenant, change.source) == (tenant, source)]
            await self._memberships.until_applied(of_source, until)
            for document_id in documents:
                began = monotonic()
                with translated("conflicts"):
                    async with self._pool.connection() as connection:
                        generation = await generations.active(connection)
                        document = await conflicts.examined(connection, generation.name, document_id)
                        if document is None:
                            continue
                        ended = await self._close_unread(connection, document_id, document)
                        await conflicts.forget_examined(connection, ended)
                        await self._announce(document, ended, "ended")
                self._metrics.conflicts_closed.inc(len(ended))
                await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Leave the database to others after work that began at this moment of ``monotonic``."""
        await asyncio.sleep(rest_after(monotonic() - began, SHARE / self._active))

    async def _divided(self, tenant: str, source: str) -> list[UUID]:
        with translated("conflicts"):
            async with self._pool.connection() as connection:
                return await conflicts.divided(connection, tenant, source)

    async def _examine(self, document_id: UUID) -> None:
        with translated("conflicts"):
            async with self._pool.connection() as connection:
                generation = await generations.active(connection)
                document = await conflicts.examined(connection, generation.name, document_id)
                if document is None:
                    return
                ended = await conflicts.close(connection, generation.name, document_id, document.chunk_ids)
                ended += await self._close_unread(connection, document_id, document)
                await self._announce(document, ended, "ended")
                searchable = generation.vectors == "pgvector" or not await graph.is_above(
                    connection, generation, READ_WHOLE_ROWS
                )
            self._metrics.conflicts_closed.inc(len(ended))
            if not searchable:  # this worker has no access to Elasticsearch, and the table no graph
                return
            done = [chunk for chunk in document.chunk_ids if chunk not in set(document.new_chunk_ids)]
            for start in range(0, len(document.new_chunk_ids) or 1, READ_AT_ONCE):
                some = document.new_chunk_ids[start : start + READ_AT_ONCE]
                await self._let_documents_go_first(generation)
                began = monotonic()
                async with self._pool.connection() as connection:
                    await self._compare(connection, generation, document, some)
                    # In the same transaction, after each part: a long document takes minutes, and a process may end.
                    done += some
                    await conflicts.record_examined(connection, generation.name, document_id, document, done)
                await self._pause(began)

    async def _let_documents_go_first(self, generation: Generation) -> None:
        """Wait while more than BUSY_DOCUMENTS are pending in a store, at most BUSY_AT_MOST_SECONDS: after that, the
        task waits again only for as long as they were not pending in between. Wait at most GRAPH_AT_MOST_SECONDS for
        the graph, which a first load gets at its end: without it, each comparison would read the whole table."""
        while monotonic() >= self._check_at:
            async with self._pool.connection() as connection:
                pending = await work.pending(
                    connection, generation.name, within_seconds=BUSY_AT_MOST_SECONDS, most=BUSY_DOCUMENTS + 1
                )
                lacks_graph = await graph.is_missed(connection, generation)
            now, is_busy = monotonic(), pending > BUSY_DOCUMENTS
            since = min(now - self._checked_at, 2 * BUSY_CHECK_SECONDS)  # while there were no messages, nothing waited
            waited = self._waited_seconds + (since if is_busy else -since)
            self._waited_seconds = min(max(0.0, waited), BUSY_AT_MOST_SECONDS)
            self._checked_at = now
            self._graph_waited_seconds = self._graph_waited_seconds + since if lacks_graph else 0.0
            if self._graph_waited_seconds >= GRAPH_AT_MOST_SECONDS:
                lacks_graph = False
            if not lacks_graph and (not is_busy or self._waited_seconds >= BUSY_AT_MOST_SECONDS):
                self._check_at = now + BUSY_CHECK_SECONDS
                return
            await asyncio.sleep(BUSY_CHECK_SECONDS)

    async def _close_unread(self, connection: Connection, document_id: UUID, document: Examined) -> list[Conflict]:
        """Close the document's conflicts that nobody may read any more."""
        readable = await self._with_common_reader(connection, document_id, document)
        return await conflicts.close_unread(connection, document_id, readable)

    async def _with_common_reader(self, connection: Connection, document_id: UUID, document: Examined) -> set[int]:
        """The access sets, of documents in conflict with this one, that share a possible reader with it."""
        others = await conflicts.other_access(connection, document_id)
        if document.access_id is None or not others:
            return set()
        return await sharing_readers(connection, document.tenant, document.access_id, others)

    async def _compare(
        self, connection: Connection, generation: Generation, document: Examined, chunk_ids: Sequence[UUID]
    ) -> None:
        results: list[Conflict] = []
        await connection.execute(
            "SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true),"
            " set_config('hnsw.max_scan_tuples', %s, true)",
            [str(2 * CANDIDATES), str(MOST_TUPLES)],
        )
        tenant, new = document.tenant, await rows(connection, generation, document.tenant, chunk_ids)
        near = await nearest(connection, generation, tenant, new)
        others = {id_ for ids in near.values() for id_ in ids} - {row.chunk_id for row in new}
        known = {row.chunk_id: row for row in (*new, *await rows(connection, generation, tenant, list(others)))}
        passages = {id_: row.read() for id_, row in known.items()}
        for row in new:
            neighbours = [known[id_] for id_ in near.get(row.chunk_id, ()) if id_ in known]
            for neighbour, result in zip(
                neighbours,
                examine(passages[row.chunk_id], [passages[neighbour.chunk_id] for neighbour in neighbours]),
                strict=True,
            ):
                if result is not None:
                    places = [(pair.kind, pair.a, pair.b) for pair in result.pairs]
                    results.append(
                        conflicts.conflict_of(
                            generation.name, result.kind, row.side, neighbour.side, result.older, places
                        )
                    )
        stored = set(await conflicts.store(connection, document.tenant, generation.name, results))
        opened = [conflict for conflict in {c.id: c for c in results}.values() if conflict.id in stored]
        await self._announce(document, opened, "open")
        self._metrics.conflicts_examined.inc(len(chunk_ids))
        for conflict in opened:
            self._metrics.conflicts_detected.labels(conflict.kind).inc()

    async def _announce(self, document: Examined, changed: Sequence[Conflict], state: Literal["open", "ended"]) -> None:
        """Publish what is about to be committed: a failure repeats both."""
        now = datetime.now(UTC)
        await deliver(
            self._producer.send(
                CONFLICTS,
                ConflictChanged(
                    tenant=document.tenant,
                    source=document.source,
                    observed_at=now,
                    conflict_id=conflict.id,
                    state=state,
                    difference=conflict.kind,
                    documents=[conflict.a.document_id, conflict.b.document_id],
                    passages=[conflict.a.chunk_id, conflict.b.chunk_id],
                ),
            )
            for conflict in changed
        )


_DESIRED = """
    d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL AND d.access_id IS NOT NULL
    AND m.generation = %(generation)s
"""


async def rows(connection: Connection, generation: Generation, tenant: str, chunk_ids: Sequence[UUID]) -> list[Row]:
    """The passages of these chunks that are still desired and have a vector, in no order."""
    if not chunk_ids:
        return []
    cursor = await connection.execute(
        sql.SQL(
            """
            SELECT c.id, c.document_id, c.text, d.access_id, coalesce(d.title, ''),
                coalesce(m.headings -> (array_position(m.chunk_ids, c.id) - 1), '[]'::jsonb), d.source_modified_at
            FROM {chunks} c JOIN documents d ON d.id = c.document_id JOIN manifests m ON m.document_id = d.id
            WHERE c.id = ANY(%(chunks)s::uuid[]) AND {desired} AND c.id = ANY(m.chunk_ids)
            """
        ).format(chunks=_table(generation), desired=sql.SQL(_DESIRED)),
        {"chunks": list(chunk_ids), "tenant": tenant, "generation": generation.name},
    )
    return [_row(values) for values in await cursor.fetchall()]


async def nearest(
    connection: Connection, generation: Generation, tenant: str, new: Sequence[Row]
) -> dict[UUID, list[UUID]]:
    """The nearest passages of each of these, of one document, in the tenant that share a possible reader with it: their
    ids, nearest first. In one statement, which leaves vectors and texts where they are."""
    if not new:
        return {}
    held = graph.column(generation)
    cursor = await connection.execute(
        sql.SQL(
            """
            SELECT one.id, near.id, d.access_id
            FROM {chunks} one
            CROSS JOIN LATERAL (
                WITH inside AS MATERIALIZED (
                    SELECT c.id, c.document_id, c.embedding <=> one.embedding AS distance FROM {chunks} c
                    WHERE {inside} AND c.id <> one.id AND {of_tenant}
                    ORDER BY {order} LIMIT %(walked)s
                ), outside AS MATERIALIZED (
                    SELECT c.id, c.document_id, c.embedding <=> one.embedding AS distance FROM {chunks} c
                    WHERE {outside} AND c.id <> one.id AND {of_tenant} ORDER BY distance LIMIT %(limit)s
                )
                SELECT id, document_id, distance FROM (TABLE inside UNION ALL TABLE outside) around
                WHERE distance <= %(farthest)s ORDER BY distance + 0 LIMIT %(limit)s
            ) near
            JOIN documents d ON d.id = near.document_id JOIN manifests m ON m.document_id = d.id
            WHERE one.id = ANY(%(chunks)s::uuid[]) AND {desired} AND near.id = ANY(m.chunk_ids)
            ORDER BY near.distance
            """
        ).format(
            order=graph.distance(generation, sql.SQL(f"c.{held}"), sql.SQL(f"one.{held}")),
            inside=graph.inside(generation, "c."),
            outside=graph.outside(generation, "c."),
            chunks=_table(generation),
            desired=sql.SQL(_DESIRED),
            of_tenant=sql.SQL(
                "EXISTS (SELECT FROM documents d WHERE d.id = c.document_id AND d.tenant = %(tenant)s"
                " AND d.deleted_at IS NULL OFFSET 0)"
            ),
        ),
        {
            "chunks": [row.chunk_id for row in new],
            "tenant": tenant,
            "generation": generation.name,
            "limit": CANDIDATES,
            "walked": graph.RESCORED[generation.quantisation] * CANDIDATES,
            "farthest": 1 - LEAST_SIMILAR,
        },
        prepare=False,  # the best plan depends on the tenant
    )
    candidates = await cursor.fetchall()
    shared = await sharing_readers(connection, tenant, new[0].access_id, {access for _, _, access in candidates})
    near: dict[UUID, list[UUID]] = {}
    for chunk_id, other, access in candidates:
        if access in shared and len(others := near.setdefault(chunk_id, [])) < NEIGHBOURS:
            others.append(other)
    return near


async def sharing_readers(connection: Connection, tenant: str, access_id: int, others: set[int]) -> set[int]:
    """The access sets among ``others`` that somebody satisfies who satisfies this one too: by one tag of both and their
    required ones, or as a person with the memberships for both."""
    unknown = others - {access_id}
    if not unknown:
        return others
    cursor = await connection.execute(
        """
        WITH mine AS (SELECT acl_tags, required_tags FROM access_sets WHERE id = %(mine)s AND tenant = %(tenant)s),
        theirs AS (
            SELECT id, acl_tags, required_tags FROM access_sets WHERE id = ANY(%(theirs)s) AND tenant = %(tenant)s
        ), tags AS (
            SELECT DISTINCT tag, split_part(tag, '/', 1) AS source, substr(tag, strpos(tag, '/') + 1) AS name
            FROM (TABLE mine UNION ALL SELECT acl_tags, required_tags FROM theirs) sets,
                unnest(sets.acl_tags || sets.required_tags) tag
        ), held AS (
            SELECT principal, array_agg(tag) AS tags FROM (
                SELECT s.principal, t.tag FROM tags t JOIN memberships s
                    ON s.tenant = %(tenant)s AND s.source = t.source AND t.name = ANY(s.groups)
                UNION
                SELECT substr(tag, strpos(tag, '/' || %(own)s) + 1 + length(%(own)s)), tag FROM tags
                WHERE strpos(tag, '/' || %(own)s) > 0
            ) of_principals GROUP BY principal
        )
        SELECT t.id FROM theirs t CROSS JOIN mine
        WHERE t.acl_tags && mine.acl_tags AND mine.required_tags = t.required_tags
           OR EXISTS (
            SELECT FROM held h WHERE h.tags && t.acl_tags AND h.tags @> t.required_tags
              AND h.tags && mine.acl_tags AND h.tags @> mine.required_tags)
        """,
        {"mine": access_id, "theirs": list(unknown), "tenant": tenant, "own": OWN_TAG},
    )
    return {id_ for (id_,) in await cursor.fetchall()} | (others & {access_id})


def _table(generation: Generation) -> sql.Identifier:
    return sql.Identifier(generation.chunk_table)


def _row(values: Sequence[Any]) -> Row:
    chunk_id, document_id, text, access_id, title, headings, modified_at = values
    return Row(chunk_id, document_id, text, access_id, title, tuple(headings), modified_at)
