"""The rows, table and index of a generation: how many there should be and are, the graph, and removing those that only
retired generations use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, LiteralString
from uuid import UUID

from psycopg import sql
from psycopg.errors import DiskFull

from pipeline.core.model import STORES, Generation, Store
from pipeline.ledger import builds, generations
from pipeline.ledger.builds import LOCK_WAIT
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import Connection

GRAPH_BYTES_A_ROW = 500
"""Memory that HNSW (m = 16) takes for a row, without its vector, while it is built."""


async def desired_counts(connection: Connection, generation: Generation) -> tuple[int, int, int]:
    """(documents, chunks, tokens) that this generation's stores shall hold."""
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
    """Chunks embedded, or entries written, since the generation was begun."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(written), 0)::bigint FROM index_state WHERE generation = %s AND store = %s",
        [generation.name, store],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def build_graph(
    connection: Connection, generation: Generation, *, name: str | None = None, alone: bool = False
) -> None:
    """Once over all rows, while writers go on. name: unless it is the graph's own. alone: by one process, so that
    writers keep the other processors."""
    await _allow_memory(connection, generation)
    one, many = "SET max_parallel_maintenance_workers = 0", "RESET max_parallel_maintenance_workers"
    await connection.execute(one if alone else many)
    try:
        await create_graph(connection, generation, name=name, concurrently=True)
    except DiskFull:  # a container's small /dev/shm: parallel builders share the graph there, one alone does not
        if alone:
            raise
        await connection.execute(one)
        await create_graph(connection, generation, name=name, concurrently=True)
    await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(generation.chunk_table)))


async def _allow_memory(connection: Connection, generation: Generation) -> None:
    """Enough maintenance_work_mem for the graph where the server has it: up to a quarter of what it says it may use
    (effective_cache_size). A graph that does not fit is built too, only slower."""
    bytes_a_value = 2 if generation.vector_type == "halfvec" else 4
    held = await rows(connection, generation.chunk_table)
    needed = held * (generation.dimensions * bytes_a_value + GRAPH_BYTES_A_ROW) // 1024
    await connection.execute(
        "SELECT set_config('maintenance_work_mem', greatest("
        " pg_size_bytes(current_setting('maintenance_work_mem')) / 1024,"
        " least(%s::bigint, pg_size_bytes(current_setting('effective_cache_size')) / 4096))::text || 'kB', false)",
        [needed],
    )


CLEAR_ROWS = 1_000


async def uncleared(connection: Connection) -> list[Generation]:
    """Retired generations that still have rows, a table or an index."""
    cursor = await connection.execute("SELECT name FROM generations WHERE state = 'retired' AND cleared_at IS NULL")
    names = {name for (name,) in await cursor.fetchall()}
    return [g for g in await generations.every(connection) if g.name in names]


async def clear_rows(connection: Connection, retired: Generation) -> None:
    """Remove a retired generation's manifests and states, CLEAR_ROWS at a time. What it counted as written goes over
    to the active one, so that a document's count never falls. Repeats are harmless."""
    active = (await generations.active(connection)).name
    for store in STORES:
        names: dict[str, Any] = {"retired": retired.name, "active": active, "store": store, "limit": CLEAR_ROWS}
        after = UUID(int=0)
        while batch := await _batch(connection, "index_state", names | {"after": after}, "AND store = %(store)s"):
            async with connection.transaction():
                await connection.execute(_LOCK_HEIRS, names | {"ids": batch})
                await connection.execute(_BEQUEATH, names | {"ids": batch})
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


_LOCK_HEIRS = """
    SELECT FROM index_state WHERE generation = %(active)s AND store = %(store)s AND document_id = ANY(%(ids)s)
    ORDER BY document_id FOR UPDATE
"""
_BEQUEATH = """
    WITH gone AS (
        DELETE FROM index_state
        WHERE generation = %(retired)s AND store = %(store)s AND document_id = ANY(%(ids)s)
        RETURNING document_id, written
    )
    UPDATE index_state s SET written = s.written + gone.written FROM gone
    WHERE s.document_id = gone.document_id AND s.generation = %(active)s AND s.store = %(store)s AND gone.written > 0
"""


async def orphaned(connection: Connection, of: Collection[Generation]) -> tuple[set[str], set[str]]:
    """(tables, indexes) of these retired generations that no living one uses."""
    living = await generations.writable(connection)
    tables = {g.chunk_table for g in of} - {g.chunk_table for g in living}
    indexes = {g.keyword_index for g in of} - {g.keyword_index for g in living}
    return tables, indexes


async def drop_table(connection: Connection, table: str) -> None:
    """Remove a chunk table that nobody uses any more; a missing one is fine."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        await connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table)))


async def mark_cleared(connection: Connection, retired: Generation) -> None:
    await connection.execute("UPDATE generations SET cleared_at = clock_timestamp() WHERE name = %s", [retired.name])
