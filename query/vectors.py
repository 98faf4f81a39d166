"""Nearest neighbours from pgvector: through the graph where the caller reads much, exactly where that is little.

The graph filters while it walks: to find n rows where r of t rows pass, it visits about n · t / r. An exact scan reads
the r rows once each, and a visit costs about as much as VISIT_COST rows. So the scan is the cheaper one up to
r = √(VISIT_COST · n · t), and that is where we change over. (It is the better one too: the narrower the filter, the
more of the nearest a walk misses.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from pgvector import HalfVector, Vector
from psycopg import sql

from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from query.access import Caller, Readable
from query.model import Candidate

Scan = Literal["graph", "exact"]

VISIT_COST = 6
"""Measured: 22 µs a visit against 4 µs a row (60,000 rows of 384 dimensions, in memory)."""


OVERFETCH = 2
"""Of 64 nearest with a quarter of all rows readable, a walk for 64 finds 96 %, for 128 97 % (worst 77 and 86 %)."""


@dataclass(frozen=True, slots=True)
class Tuning:
    ef_search: int = 100
    max_scan_tuples: int = 200_000
    """Where a walk gives up. The changeover keeps the expected walk below it up to 50 M rows."""
    always_exact_rows: int = 5_000
    """An exact scan of so few takes about 20 ms; also the answer before the table's size is known."""
    random_page_cost: float = 1.0
    """The index is in memory or the service is too slow anyway; with the default a sequential scan looks cheaper."""


async def choose(
    connection: Connection, generation: Generation, caller: Caller, readable: Readable, *, limit: int, tuning: Tuning
) -> Scan:
    """Count what the caller may read, but no further than the changeover."""
    rows, per_document = await _size(connection, generation)
    most_rows = max(tuning.always_exact_rows, isqrt(VISIT_COST * OVERFETCH * limit * rows))
    cursor = await connection.execute(
        sql.SQL(
            """
            WITH mine AS MATERIALIZED (
                SELECT id FROM documents
                WHERE tenant = %(tenant)s AND access_id = ANY(%(ids)s::bigint[]) LIMIT %(documents)s + 1
            )
            SELECT (SELECT count(*) FROM mine) <= %(documents)s AND (
                SELECT count(*) FROM (
                    SELECT FROM mine JOIN {chunks} c ON c.document_id = mine.id LIMIT %(rows)s + 1
                ) counted
            ) <= %(rows)s
            """
        ).format(chunks=sql.Identifier(generation.chunk_table)),
        {
            "tenant": caller.tenant, "ids": list(readable.access_ids), "rows": most_rows,
            "documents": max(1, most_rows // per_document),
        },
    )  # fmt: skip
    row = await cursor.fetchone()
    return "exact" if row and row[0] else "graph"


async def _size(connection: Connection, generation: Generation) -> tuple[int, int]:
    """Rows of the chunk table and rows a document, as the planner estimates them."""
    cursor = await connection.execute(
        "SELECT greatest(c.reltuples, 0)::bigint, greatest(d.reltuples, 1)::bigint FROM pg_class c, pg_class d"
        " WHERE c.oid = to_regclass(%s) AND d.oid = to_regclass('documents')",
        [generation.chunk_table],
    )
    rows, documents = await cursor.fetchone() or (0, 1)
    return rows, max(1, rows // documents)


async def nearest(
    connection: Connection,
    generation: Generation,
    caller: Caller,
    readable: Readable,
    vector: Vectors,
    scan: Scan,
    *,
    limit: int,
    timeout_seconds: float,
    tuning: Tuning,
) -> tuple[list[Candidate], Scan]:
    """The nearest passages among those that this caller may read, nearest first, and how they were found.

    A walk that ends with too few is followed by an exact scan: fewer than ``limit`` means that there are no more.
    """
    async with connection.transaction():
        await connection.execute(LOCAL_SETTINGS, local_settings(limit, timeout_seconds, tuning))
        statement, values = build(generation, caller, readable, vector, scan, limit=limit)
        found = await _candidates(connection, statement, values)
        if scan == "graph" and len(found) < limit:
            scan = "exact"
            statement, values = build(generation, caller, readable, vector, scan, limit=limit)
            found = await _candidates(connection, statement, values)
    return found, scan


async def _candidates(connection: Connection, statement: sql.Composed, values: dict[str, Any]) -> list[Candidate]:
    # Never prepared: the best plan depends on the values (who asks), and a generic one cannot see them.
    cursor = await connection.execute(statement, values, prepare=False)
    return [Candidate(*row) for row in await cursor.fetchall()]


LOCAL_SETTINGS = """
    SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true),
        set_config('hnsw.max_scan_tuples', %s, true), set_config('hnsw.scan_mem_multiplier', '8', true),
        set_config('random_page_cost', %s, true), set_config('statement_timeout', %s, true)
"""


def local_settings(limit: int, timeout_seconds: float, tuning: Tuning) -> Sequence[str]:
    ef_search = min(1000, max(tuning.ef_search, 2 * limit))
    milliseconds = round(timeout_seconds * 1000)
    return [str(ef_search), str(tuning.max_scan_tuples), str(tuning.random_page_cost), str(milliseconds)]


_GRAPH = """
    WITH nearest AS MATERIALIZED (
        SELECT id, document_id, text, embedding <=> %(vector)s AS distance FROM {chunks}
        WHERE access_id = ANY(%(ids)s::bigint[])
        ORDER BY embedding <=> %(vector)s LIMIT %(walked)s
    )
    SELECT id, document_id, text, 1 - distance FROM nearest ORDER BY distance + 0, id LIMIT %(limit)s
"""
_EXACT = """
    SELECT c.id, c.document_id, c.text, 1 - (c.embedding <=> %(vector)s)
    FROM documents d JOIN {chunks} c ON c.document_id = d.id
    WHERE d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) AND d.deleted_at IS NULL
    ORDER BY (c.embedding <=> %(vector)s) + 0, c.id LIMIT %(limit)s
"""


def build(
    generation: Generation, caller: Caller, readable: Readable, vector: Vectors, scan: Scan, *, limit: int
) -> tuple[sql.Composed, dict[str, Any]]:
    """relaxed_order hands rows over slightly out of order: twice as many are taken and sorted again, by an expression
    that the graph does not serve."""
    value = HalfVector(vector) if generation.vector_type == "halfvec" else Vector(vector)
    statement = sql.SQL(_GRAPH if scan == "graph" else _EXACT).format(chunks=sql.Identifier(generation.chunk_table))
    return statement, {
        "vector": value, "ids": list(readable.access_ids), "tenant": caller.tenant,
        "limit": limit, "walked": OVERFETCH * limit,
    }  # fmt: skip
