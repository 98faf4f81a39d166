"""Nearest neighbours from pgvector: through the graph where the caller reads much, exactly where that is little.

The graph filters while it walks: to find n rows where r of t rows pass, it visits about n · t / r. An exact scan reads
the r rows once each, and a visit costs about as much as VISIT_COST rows. So the scan is the cheaper one up to
r = √(VISIT_COST · n · t), and that is where we change over. (It is the better one too: the narrower the filter, the
more of the nearest a walk misses.) Rows that pass are those that access and the question's filters leave.

Rows that wait outside of the graph (docs/adr/0030) are read exactly, in the statement that walks: no row is missing
from both, and none is in both. Where there is no graph, everything is.

Without filters a walk believes the rows' own access_id and looks nothing up. With them, or when too much of what it
offered turned out to be withheld, it asks the ledger about every row that it visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from time import monotonic
from typing import Any, Literal
from uuid import UUID

import numpy as np
from psycopg import sql

from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from pipeline.stores.vectors import value
from query.access.callers import Caller, Readable
from query.access.filters import NONE, Filters, conditions, values
from query.model import Candidate

Scan = Literal["graph", "whole graph", "exact"]
"""whole graph: one over all rows, as an older version left it; no row waits outside of that."""

VISIT_COST = 8
"""Measured: 22 µs a visit against 4 µs a row (60,000 rows of 384 dimensions, in memory); of 100,000 rows of 1,536
dimensions, a tenth readable, the walk took 41 ms where reading the 9,968 rows took 34."""


OVERFETCH = 2
"""Of 64 nearest with a quarter of all rows readable, a walk for 64 finds 96 %, for 128 97 % (worst 77 and 86 %)."""


@dataclass(frozen=True, slots=True)
class Tuning:
    ef_search: int = 300
    """Of 100,000 made-up passages of 1,536 dimensions the graph finds .960 of the ten nearest with 228, .973 with 300,
    and takes a sixth longer (docs/load.md)."""
    max_scan_tuples: int = 200_000
    """Where a walk gives up. The changeover keeps the expected walk below it up to 50 M rows."""
    always_exact_rows: int = 5_000
    """An exact scan of so few takes 15–35 ms; also the answer before the table's size is known."""
    random_page_cost: float = 1.0
    """The index is in memory or the service is too slow anyway; with the default a sequential scan looks cheaper."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is near to what, and for whom."""

    generation: Generation
    caller: Caller
    readable: Readable
    filters: Filters = NONE
    proven: bool = False
    """Offer only what the ledger and the manifest say may be shown: slower, and nothing of it is withheld later."""


async def choose(connection: Connection, asked: Asked, *, limit: int, tuning: Tuning) -> Scan:
    """Count what access and filters leave, but no further than the changeover."""
    graph, rows, per_document = await _size(connection, asked.generation)
    if graph is None:
        return "exact"
    most_rows = max(tuning.always_exact_rows, isqrt(VISIT_COST * OVERFETCH * limit * rows))
    cursor = await connection.execute(
        sql.SQL(
            """
            WITH mine AS MATERIALIZED (
                SELECT d.id FROM documents d
                WHERE d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) {filters}
                LIMIT %(documents)s + 1
            )
            SELECT (SELECT count(*) FROM mine) <= %(documents)s AND (
                SELECT count(*) FROM (
                    SELECT FROM mine JOIN {chunks} c ON c.document_id = mine.id LIMIT %(rows)s + 1
                ) counted
            ) <= %(rows)s
            """
        ).format(chunks=sql.Identifier(asked.generation.chunk_table), filters=conditions(asked.filters)),
        {
            **values(asked.filters),
            "tenant": asked.caller.tenant,
            "ids": list(asked.readable.access_ids),
            "rows": most_rows,
            "documents": max(1, most_rows // per_document),
        },
        prepare=False,  # the best plan depends on the filter's values
    )
    row = await cursor.fetchone()
    return "exact" if row and row[0] else graph


async def _size(connection: Connection, generation: Generation) -> tuple[Scan | None, int, int]:
    """How its graph is walked, if it has one; rows of the chunk table and rows a document, as the planner estimates
    them."""
    cursor = await connection.execute(
        "SELECT (SELECT bool_or(i.indpred IS NOT NULL) FROM pg_index i JOIN pg_class g ON g.oid = i.indexrelid"
        "  JOIN pg_am a ON a.oid = g.relam WHERE i.indrelid = c.oid AND a.amname = 'hnsw' AND i.indisvalid),"
        " greatest(c.reltuples, 0)::bigint, greatest(d.reltuples, 1)::bigint FROM pg_class c, pg_class d"
        " WHERE c.oid = to_regclass(%s) AND d.oid = to_regclass('documents')",
        [generation.chunk_table],
    )
    partial, rows, documents = await cursor.fetchone() or (None, 0, 1)
    graph: Scan | None = None if partial is None else "graph" if partial else "whole graph"
    return graph, rows, max(1, rows // documents)


async def nearest(
    connection: Connection,
    asked: Asked,
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
    ends = monotonic() + timeout_seconds
    async with connection.pipeline(), connection.transaction():
        await connection.execute(LOCAL_SETTINGS, local_settings(scan, limit, timeout_seconds, tuning))
        candidates = await _candidates(connection, *build(asked, vector, scan, limit=limit))
        if scan != "exact" and len(candidates) < limit:
            scan = "exact"
            await connection.execute(LOCAL_SETTINGS, local_settings(scan, limit, ends - monotonic(), tuning))
            candidates = await _candidates(connection, *build(asked, vector, scan, limit=limit))
    return candidates, scan


async def likeness(
    connection: Connection, generation: Generation, ids: Sequence[UUID], vector: Vectors
) -> dict[UUID, float]:
    """Cosine of each of these chunks to the vector, where the generation holds it. Raises psycopg.Error."""
    cursor = await connection.execute(
        sql.SQL("SELECT id, 1 - (embedding <=> %s) FROM {chunks} WHERE id = ANY(%s::uuid[])").format(
            chunks=sql.Identifier(generation.chunk_table)
        ),
        [value(generation, vector), list(ids)],
    )
    return dict(await cursor.fetchall())


async def embeddings(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
    """The stored vectors of these chunks (float32, unit length); a chunk that has none is absent. Raises
    psycopg.Error."""
    cursor = await connection.execute(
        sql.SQL("SELECT id, embedding FROM {chunks} WHERE id = ANY(%s::uuid[])").format(
            chunks=sql.Identifier(generation.chunk_table)
        ),
        [list(ids)],
        binary=True,  # as text, 1,536 numbers are parsed one by one
    )
    return {
        id_: np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value, dtype=np.float32)
        for id_, value in await cursor.fetchall()
    }


async def _candidates(connection: Connection, statement: sql.Composed, values: dict[str, Any]) -> list[Candidate]:
    # Never prepared: the best plan depends on the values (who asks), and a generic one cannot see them.
    cursor = await connection.execute(statement, values, prepare=False)
    return [Candidate(*row) for row in await cursor.fetchall()]


LOCAL_SETTINGS = """
    SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true),
        set_config('hnsw.max_scan_tuples', %s, true), set_config('hnsw.scan_mem_multiplier', '8', true),
        set_config('random_page_cost', %s, true), set_config('statement_timeout', %s, true),
        set_config('enable_seqscan', %s, true)
"""


def local_settings(scan: Scan, limit: int, timeout_seconds: float, tuning: Tuning) -> Sequence[str]:
    """The few rows that wait outside are found by their index, whatever share of the table they were when Postgres last
    counted them."""
    ef_search = min(1000, max(tuning.ef_search, 2 * limit))
    milliseconds = max(1, round(timeout_seconds * 1000))  # 0: as long as it likes
    return [
        str(ef_search),
        str(tuning.max_scan_tuples),
        str(tuning.random_page_cost),
        str(milliseconds),
        "off" if scan == "graph" else "on",
    ]


_WALK = """
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {chunks} c
        WHERE {inside} c.access_id = ANY(%(ids)s::bigint[]) {ledger}
        ORDER BY c.embedding <=> %(vector)s LIMIT %(walked)s
"""
_OUTSIDE = """
        SELECT * FROM (
            SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {chunks} c
            WHERE NOT c.in_graph AND c.access_id = ANY(%(ids)s::bigint[]) {ledger} OFFSET 0
        ) waiting ORDER BY distance, id LIMIT %(limit)s
"""
_GRAPH = """
    WITH inside AS MATERIALIZED ({walk}), outside AS MATERIALIZED ({outside})
    SELECT id, document_id, text, 1 - distance FROM (TABLE inside UNION ALL TABLE outside) nearest
    ORDER BY distance + 0, id LIMIT %(limit)s
"""
"""+ 0: the planner takes the walk's order for the distances', which it only nearly is, and would not sort."""
_WHOLE_GRAPH = """
    WITH inside AS MATERIALIZED ({walk})
    SELECT id, document_id, text, 1 - distance FROM inside ORDER BY distance + 0, id LIMIT %(limit)s
"""
_EXACT = """
    SELECT id, document_id, text, 1 - distance FROM (
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance
        FROM documents d JOIN {chunks} c ON c.document_id = d.id
        WHERE {mine} {filters} {listed} OFFSET 0
    ) found ORDER BY distance, id LIMIT %(limit)s
"""
"""OFFSET 0: each distance is computed once, though it is both shown and sorted by; and never by a walk."""
_MINE = "d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) AND d.deleted_at IS NULL"
_IN_LEDGER = "AND EXISTS (SELECT FROM documents d WHERE d.id = c.document_id AND {mine} {filters} {listed} OFFSET 0)"
"""OFFSET 0: asked for each row that the walk visits. As a join, all that may be read would be collected first."""
_LISTED = """AND EXISTS (
    SELECT FROM manifests m
    WHERE m.document_id = c.document_id AND m.generation = %(generation)s AND c.id = ANY(m.chunk_ids) OFFSET 0)"""


def build(asked: Asked, vector: Vectors, scan: Scan, *, limit: int) -> tuple[sql.Composed, dict[str, Any]]:
    """relaxed_order hands rows over slightly out of order: twice as many are taken and sorted again."""
    generation = asked.generation
    parts = {
        "mine": sql.SQL(_MINE),
        "filters": conditions(asked.filters),
        "listed": sql.SQL(_LISTED if asked.proven else ""),
    }
    chunks = sql.Identifier(generation.chunk_table)
    if scan == "exact":
        statement = sql.SQL(_EXACT).format(chunks=chunks, **parts)
    else:
        ledger = sql.SQL(_IN_LEDGER).format(**parts) if asked.filters or asked.proven else sql.SQL("")
        inside = sql.SQL("c.in_graph AND" if scan == "graph" else "")
        walk = sql.SQL(_WALK).format(chunks=chunks, ledger=ledger, inside=inside)
        outside = sql.SQL(_OUTSIDE).format(chunks=chunks, ledger=ledger)
        statement = sql.SQL(_GRAPH if scan == "graph" else _WHOLE_GRAPH).format(walk=walk, outside=outside)
    return statement, {
        **values(asked.filters),
        "vector": value(generation, vector),
        "ids": list(asked.readable.access_ids),
        "tenant": asked.caller.tenant,
        "generation": generation.name,
        "limit": limit,
        "walked": OVERFETCH * limit,
    }
