"""The table and index of a generation: counting rows, building its graph, and removing what only retired generations
use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, LiteralString
from uuid import UUID

import structlog
from psycopg import sql
from psycopg.errors import Diagnostic, DiskFull

from pipeline.core.graph import build_parameters
from pipeline.core.model import STORES, Generation, Quantisation, Store
from pipeline.ledger import builds, generations
from pipeline.ledger.builds import LOCK_WAIT
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import Connection

log = structlog.get_logger()

GRAPH_BYTES_A_ROW, GRAPH_BYTES_A_NEIGHBOUR = 208, 32
"""The memory that building an HNSW graph takes for each row besides its vector, and for each of its neighbours
(pgvector's ``m``). Measured by the number of rows after which pgvector says that its memory is full: 716 to 719 bytes a
row with 16 neighbours, 971 to 974 with 24."""
GRAPH_BYTES_OF_BUILDERS = 4 * 2**20
"""The memory that parallel builders share beyond that: pgvector keeps 3 MB of it."""


async def desired_counts(connection: Connection, generation: Generation) -> tuple[int, int, int]:
    """The numbers of (documents, chunks, tokens) that this generation's stores should hold."""
    cursor = await connection.execute(
        "SELECT count(*), coalesce(sum(cardinality(m.chunk_ids)), 0)::bigint,"
        " coalesce(sum((SELECT sum(t) FROM unnest(m.token_counts) t)), 0)::bigint"
        " FROM documents d JOIN access_sets a ON a.id = d.access_id AND cardinality(a.acl_tags) > 0"
        " LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = %s"
        " WHERE d.deleted_at IS NULL AND d.version IS NOT NULL",
        [generation.name],
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2])


async def rows(connection: Connection, table: str) -> int:
    if not await builds.table_exists(connection, table):
        return 0
    cursor = await connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def written(connection: Connection, generation: Generation, store: Store) -> int:
    """The number of chunks embedded, or of entries written, since the generation was created."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE generation = %s AND store = %s",
        [generation.name, store],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def build_graph(
    connection: Connection, generation: Generation, *, name: str | None = None, alone: bool = False
) -> None:
    """Build the graph over all rows of the table, while writers continue. name: the graph's, if it is not the usual
    one. alone: with one process, which leaves the other processors to the writers."""
    await _allow_memory(connection, generation)

    def note_overflow(notice: Diagnostic) -> None:
        if "no longer fits" in (notice.message_primary or ""):
            log.warning("graph_exceeds_memory", generation=generation.name, reason=notice.message_primary)

    connection.add_notice_handler(note_overflow)
    try:
        await _build(connection, generation, name, alone=alone)
    finally:
        connection.remove_notice_handler(note_overflow)
    # Searches compare the two tables' estimates (query.retrieval.vectors), so both should be of the same time. A login
    # that does not own documents gets a warning, and autovacuum's estimates stay.
    await connection.execute(sql.SQL("ANALYZE {}, documents").format(sql.Identifier(generation.chunk_table)))


async def _build(connection: Connection, generation: Generation, name: str | None, *, alone: bool) -> None:
    one, many = "SET max_parallel_maintenance_workers = 0", "RESET max_parallel_maintenance_workers"
    await connection.execute(one if alone else many)
    try:
        await create_graph(connection, generation, name=name, concurrently=True)
    except DiskFull:  # parallel builders share the graph in /dev/shm, which is small in a container; one alone does not
        if alone:
            raise
        await connection.execute(one)
        await create_graph(connection, generation, name=name, concurrently=True)


def graph_build_bytes(
    rows: int, dimensions: int, quantisation: Quantisation, *, vector_type: str = "halfvec", sketched: bool = True
) -> int:
    """The memory in which a graph of so many rows is built. vector_type: of its vectors, where it holds them."""
    bits = 1 if quantisation == "binary" else 16 if vector_type == "halfvec" else 32
    row = dimensions * bits // 8 + GRAPH_BYTES_A_ROW
    row += build_parameters(dimensions, quantisation, sketched=sketched).neighbours * GRAPH_BYTES_A_NEIGHBOUR
    return rows * row + GRAPH_BYTES_OF_BUILDERS


async def _allow_memory(connection: Connection, generation: Generation) -> None:
    """Raise maintenance_work_mem so that the graph fits into it, but not above a quarter of effective_cache_size. The
    rows of a graph that do not fit are added one by one, which takes several times as long."""
    held = await rows(connection, generation.chunk_table)
    needed = graph_build_bytes(
        held,
        generation.dimensions,
        generation.quantisation,
        vector_type=generation.vector_type,
        sketched=generation.sketched,
    )
    needed //= 1024
    cursor = await connection.execute(
        "SELECT pg_size_bytes(set_config('maintenance_work_mem', greatest("
        " pg_size_bytes(current_setting('maintenance_work_mem')) / 1024,"
        " least(%s::bigint, pg_size_bytes(current_setting('effective_cache_size')) / 4096))::text || 'kB', false))"
        " / 1024",
        [needed],
    )
    [allowed] = await cursor.fetchone() or (needed,)
    if allowed < needed:
        log.warning(
            "graph_exceeds_memory", generation=generation.name, needed_mb=needed >> 10, allowed_mb=allowed >> 10
        )


CLEAR_ROWS = 1_000


async def uncleared(connection: Connection) -> list[Generation]:
    """Retired generations that still have rows, a table or an index."""
    cursor = await connection.execute("SELECT name FROM generations WHERE state = 'retired' AND cleared_at IS NULL")
    names = {name for (name,) in await cursor.fetchall()}
    return [g for g in await generations.every(connection) if g.name in names]


async def clear_rows(connection: Connection, retired: Generation) -> None:
    """Remove a retired generation's manifests and states, CLEAR_ROWS at a time. Its counts of written chunks are added
    to the active generation's, so that no document's count falls. Repeats are harmless."""
    active = (await generations.active(connection)).name
    for store in STORES:
        names: dict[str, Any] = {"retired": retired.name, "active": active, "store": store, "limit": CLEAR_ROWS}
        after = UUID(int=0)
        while batch := await _batch(connection, "index_state", names | {"after": after}, "AND store = %(store)s"):
            async with connection.transaction():
                await connection.execute(_LOCK_ACTIVE_STATES, names | {"ids": batch})
                await connection.execute(_MOVE_COUNTS, names | {"ids": batch})
            after = batch[-1]
    after = UUID(int=0)
    names = {"retired": retired.name, "limit": CLEAR_ROWS}
    while batch := await _batch(connection, "manifests", names | {"after": after}):
        await connection.execute(
            "DELETE FROM manifests WHERE generation = %(retired)s AND document_id = ANY(%(ids)s)",
            names | {"ids": batch},
        )
        after = batch[-1]


async def _batch(
    connection: Connection,
    table: Literal["index_state", "manifests"],
    names: dict[str, Any],
    condition: LiteralString = "",
) -> list[UUID]:
    cursor = await connection.execute(
        f"SELECT document_id FROM {table} WHERE generation = %(retired)s AND document_id > %(after)s {condition}"  # noqa: S608 — callers hand literals
        " ORDER BY document_id LIMIT %(limit)s",
        names,
    )
    return [id_ for (id_,) in await cursor.fetchall()]


_LOCK_ACTIVE_STATES = """
    SELECT FROM index_state WHERE generation = %(active)s AND store = %(store)s AND document_id = ANY(%(ids)s)
    ORDER BY document_id FOR UPDATE
"""
_MOVE_COUNTS = """
    WITH gone AS (
        DELETE FROM index_state
        WHERE generation = %(retired)s AND store = %(store)s AND document_id = ANY(%(ids)s)
        RETURNING document_id, written
    )
    UPDATE index_state s SET written = s.written + gone.written FROM gone
    WHERE s.document_id = gone.document_id AND s.generation = %(active)s AND s.store = %(store)s AND gone.written > 0
"""


async def orphaned(connection: Connection, of: Collection[Generation]) -> tuple[set[str], set[str]]:
    """The (tables, indexes) of these retired generations that no other generation uses."""
    in_use = await generations.writable(connection)
    tables = {g.chunk_table for g in of} - {g.chunk_table for g in in_use}
    indexes = {g.keyword_index for g in of} - {g.keyword_index for g in in_use}
    return tables, indexes


async def drop_table(connection: Connection, table: str) -> None:
    """Drop a chunk table that no generation uses, if it exists. Raises psycopg.Error when a reader keeps it locked for
    LOCK_WAIT."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        await connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier("canaries", table)))
        await connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table)))


async def mark_cleared(connection: Connection, retired: Generation) -> None:
    """Record that nothing is left of a retired generation."""
    await connection.execute("UPDATE generations SET cleared_at = clock_timestamp() WHERE name = %s", [retired.name])
