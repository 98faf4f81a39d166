"""Sampling the vector index: does it find its own rows? A graph can be damaged although the rows of its table are
right."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import sql

from pipeline.audit.examine import Finding
from pipeline.core.graph import READ_WHOLE_ROWS
from pipeline.core.model import Generation
from pipeline.stores import graph
from pipeline.stores.postgres import Connection, Pool, translated

NEIGHBOURS = 100
EF_SEARCH = 1_000
"""The widest search that pgvector offers. A row that it does not find is found by no query."""
EQUAL = 1e-6
"""The largest cosine distance of two vectors that count as equal. In a graph of signs, no sign may differ."""


@dataclass(frozen=True, slots=True)
class Sample:
    rows: int
    """The number of rows that were searched for."""
    unreachable: tuple[Finding, ...] = ()
    problem: str | None = None
    """Why the index could not be searched at all; None: it could."""


async def sample(pool: Pool, generation: Generation, rows: int) -> Sample:
    """Search the graph for this many random rows of it, each by its own vector. Rows outside of the graph, and tables
    without one, need no sample: queries read them whole. A graph in the keyword index is Elasticsearch's own, which
    checks its files itself. Raises Retryable."""
    if generation.vectors != "pgvector":
        return Sample(0)
    ids: dict[UUID, None] = {}
    with translated("audit the vector index"):
        async with pool.connection() as connection:
            if await _needs_no_graph(connection, generation):
                return Sample(0)
            for _ in range(rows):
                if (id_ := await _random_row(connection, generation)) is not None:
                    ids[id_] = None
    return await reach(pool, generation, list(ids))


async def _needs_no_graph(connection: Connection, generation: Generation) -> bool:
    """Whether the table has no graph and is small, so that every search reads all of it."""
    if any(graph_index.valid for graph_index in (await graph.graphs(connection, generation)).values()):
        return False
    return await graph.rows(connection, generation, most=READ_WHOLE_ROWS + 1) <= READ_WHOLE_ROWS


async def _random_row(connection: Connection, generation: Generation) -> UUID | None:
    """A random row: the next one after a random id, because ids are hashes. It costs one probe of the index."""
    after = UUID(bytes=secrets.token_bytes(16))
    table = sql.Identifier(generation.chunk_table)
    for condition in ("id >= %s", "id < %s"):
        cursor = await connection.execute(
            sql.SQL("SELECT id FROM {} WHERE {} AND {} ORDER BY id LIMIT 1").format(
                table, graph.inside(generation), sql.SQL(condition)
            ),
            [after],
        )
        if row := await cursor.fetchone():
            return UUID(str(row[0]))
    return None


async def reach(pool: Pool, generation: Generation, ids: Sequence[UUID]) -> Sample:
    """Search for these rows. One that was deleted meanwhile counts as found."""
    lost: dict[UUID, int] = {}
    with translated("audit the vector index"):
        async with pool.connection() as connection, connection.transaction():
            await connection.execute("SET LOCAL enable_seqscan = off")
            await connection.execute("SET LOCAL enable_sort = off")
            await connection.execute(f"SET LOCAL hnsw.ef_search = {EF_SEARCH}")
            if ids and (problem := await _problem(connection, generation, ids[0])):
                return Sample(len(ids), problem=problem)
            for id_ in ids:
                if (document := await _lost(connection, generation, id_)) is not None:
                    lost[document] = lost.get(document, 0) + 1
            cursor = await connection.execute("SELECT id, external_id FROM documents WHERE id = ANY(%s)", [list(lost)])
            names: dict[UUID, str] = dict(await cursor.fetchall())
    return Sample(
        len(ids), tuple(Finding(d, "vectors", "unreachable", n, names.get(d)) for d, n in sorted(lost.items()))
    )


def _nearest(generation: Generation) -> sql.Composed:
    table, held = sql.Identifier(generation.chunk_table), sql.SQL(graph.column(generation))
    return sql.SQL("SELECT id, {distance} FROM {table} WHERE {inside} ORDER BY {distance} LIMIT %(limit)s").format(
        table=table,
        inside=graph.inside(generation),
        distance=graph.distance(generation, held, sql.SQL("(SELECT {} FROM {} WHERE id = %(id)s)").format(held, table)),
    )


async def _problem(connection: Connection, generation: Generation, id_: UUID) -> str | None:
    """Why the search would not use the graph, in which case its result would prove nothing; None: it would."""
    cursor = await connection.execute(
        sql.SQL("EXPLAIN (FORMAT JSON) ") + _nearest(generation), {"id": id_, "limit": NEIGHBOURS}
    )
    row = await cursor.fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    used = _indexes(plan[0]["Plan"])
    if used & {name for name, index in (await graph.graphs(connection, generation)).items() if index.valid}:
        return None
    return (
        f"{generation.chunk_table} has no usable HNSW index: every vector search reads the whole table;"
        f" `REINDEX INDEX CONCURRENTLY {generation.chunk_table}_hnsw`, or `penstock rebuild vectors`"
    )


def _indexes(plan: dict[str, Any]) -> set[str]:
    mine = {plan["Index Name"]} if plan["Node Type"] == "Index Scan" else set()
    return mine.union(*(_indexes(child) for child in plan.get("Plans", [])))


async def _lost(connection: Connection, generation: Generation, id_: UUID) -> UUID | None:
    """The document of a row that the index does not return among the nearest to the row's own vector.

    Many rows can have equal vectors (the same words in many documents): where only such are returned, as many as were
    asked for, the row is one of them as far as anybody can tell.
    """
    cursor = await connection.execute(_nearest(generation), {"id": id_, "limit": NEIGHBOURS})
    nearest = await cursor.fetchall()
    if any(other == id_ for other, _ in nearest):
        return None
    if len(nearest) == NEIGHBOURS and all(distance is not None and distance <= EQUAL for _, distance in nearest):
        return None
    cursor = await connection.execute(
        sql.SQL("SELECT document_id FROM {} WHERE id = %s AND {}").format(
            sql.Identifier(generation.chunk_table), graph.inside(generation)
        ),
        [id_],
    )
    row = await cursor.fetchone()
    return UUID(str(row[0])) if row is not None else None
