"""What shall stand in a generation's stores, what stands in its table, and the graph over the table."""

from __future__ import annotations

from psycopg import sql
from psycopg.errors import DiskFull

from pipeline.core.model import Generation, Store
from pipeline.ledger import filling
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import Connection

GRAPH_BYTES_A_ROW = 500
"""What HNSW (m = 16) takes for a row besides its vector while it is built."""


async def wanted(connection: Connection, generation: Generation) -> tuple[int, int, int]:
    """(documents, chunks, tokens) that shall stand in this generation's stores."""
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
    if not await filling.table_exists(connection, table):
        return 0
    cursor = await connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def written(connection: Connection, generation: Generation, store: Store) -> int:
    """Chunks embedded, or entries written, since it was begun."""
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
