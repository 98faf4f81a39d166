"""A generation's HNSW graph in pgvector, and the rows that wait outside of it (docs/adr/0030)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import LiteralString

import structlog
from psycopg import sql
from psycopg.errors import LockNotAvailable

from pipeline.core.graph import FRONT_ROWS, GRAPH_FROM_ROWS, READ_WHOLE_ROWS, USUAL_PARAMETERS, Graph, build_parameters
from pipeline.core.model import Generation, Lane, Quantisation
from pipeline.stores.postgres import Connection

log = structlog.get_logger()

_LOCK_ATTEMPTS, _LOCK_WAIT, _LOCK_PAUSE_SECONDS = 10, "1500ms", 5.0
"""Searches wait behind a change of the index's options, so it waits shortly for those that read it, several times. It
waits for longer than ``deadlock_timeout`` (1 s), after which Postgres ends an autovacuum that is in the way."""
RESCORED: Mapping[Quantisation, int] = {"halfvec": 1, "binary": 4}
"""How many rows a walk has to fetch for each that is wanted, to be compared by their whole vectors: one bit for each
dimension says little about the order of near rows (docs/adr/0106, docs/adr/0122)."""


def own_name(generation: Generation) -> str:
    return f"{generation.chunk_table}_hnsw"


def successor_name(generation: Generation) -> str:
    """The name of a graph that is built while an older version's is still in use."""
    return f"{generation.chunk_table}_hnsw_new"


def older_name(generation: Generation) -> str:
    """The name of a graph over all rows, made for the return to an older version (docs/upgrade.md)."""
    return f"{generation.chunk_table}_hnsw_all"


def column(generation: Generation) -> LiteralString:
    """The column from which the graph is made."""
    return "sketch" if generation.graph_of_sketches else "embedding"


def _held(generation: Generation, value: sql.Composable) -> sql.Composable:
    """The expression for what the graph holds of a value of its column."""
    if _of_column(generation):
        return value
    return sql.SQL("(binary_quantize({})::bit({}))").format(value, sql.Literal(generation.dimensions))


def _of_column(generation: Generation) -> bool:
    return generation.quantisation == "halfvec" or generation.sketched


def distance(generation: Generation, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    """The expression for the distance by which the graph orders rows: of two values of its column (``column``). Only a
    statement that orders by exactly this expression uses it."""
    operator = sql.SQL("<=>" if generation.quantisation == "halfvec" else "<~>")
    return sql.SQL("{} {} {}").format(_held(generation, one), operator, _held(generation, other))


def inside(generation: Generation, row: LiteralString = "") -> sql.SQL:
    """The condition for the rows that the graph has. row: what precedes a column's name, such as ``c.``.

    A graph leaves out what is NULL: the sketch of a row that a worker of an older version wrote, in_graph or not."""
    return sql.SQL(f"{row}in_graph" + (f" AND {row}sketch IS NOT NULL" if generation.graph_of_sketches else ""))


def outside(generation: Generation, row: LiteralString = "") -> sql.SQL:
    """The condition for the rows that wait outside of the graph: all those that are not ``inside``."""
    waits: LiteralString = f"NOT {row}in_graph"
    return sql.SQL(f"({waits} OR {row}sketch IS NULL)" if generation.graph_of_sketches else waits)


def valid(generation: Generation) -> sql.SQL:
    """The condition for an HNSW index (pg_index i) that this version can use: a finished one, over the column of the
    graph. An older version makes one over an expression instead where this one has sketches."""
    return sql.SQL(f"(i.indisvalid AND i.indkey[0] {'<>' if _of_column(generation) else '='} 0)")


def _operators(generation: Generation) -> LiteralString:
    return "bit_hamming_ops" if generation.quantisation == "binary" else f"{generation.vector_type}_cosine_ops"


async def graphs(connection: Connection, generation: Generation) -> dict[str, Graph]:
    """The HNSW indexes of the chunk table, by name, including those that are being built."""
    cursor = await connection.execute(
        sql.SQL(
            "SELECT c.relname, {valid}, i.indpred IS NOT NULL FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
            " JOIN pg_am a ON a.oid = c.relam WHERE i.indrelid = to_regclass(%s) AND a.amname = 'hnsw'"
        ).format(valid=valid(generation)),
        [f'"{generation.chunk_table}"'],
    )
    return {name: Graph(name, is_valid, partial) for name, is_valid, partial in await cursor.fetchall()}


async def has_waiting_index(connection: Connection, generation: Generation) -> bool:
    """Whether rows that wait can be found. Without that index none waits: it is made before the graph is."""
    return await _holds(
        connection,
        "SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass(%s) AND indisvalid)",
        [f'"{generation.chunk_table}_waiting"'],
    )


async def waiting(connection: Connection, generation: Generation, *, most: int) -> int:
    """Rows outside of the graph, counted no further than ``most``."""
    return await _count(connection, generation, sql.SQL("WHERE {}").format(outside(generation)), most)


async def rows(connection: Connection, generation: Generation, *, most: int) -> int:
    return await _count(connection, generation, sql.SQL(""), most)


async def _count(connection: Connection, generation: Generation, condition: sql.Composable, most: int) -> int:
    # Ordered, so that the index is read: by the statistics of a moment ago it may be half of the table.
    cursor = await connection.execute(
        sql.SQL("SELECT count(*) FROM (SELECT id FROM {} {} ORDER BY id LIMIT %s) counted").format(
            sql.Identifier(generation.chunk_table), condition
        ),
        [most],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def writes_outside(connection: Connection, generation: Generation, lanes: Collection[Lane]) -> set[Lane]:
    """The lanes whose new rows wait outside of the graph; rows of the other lanes enter it at once.

    A backfill of a large table writes into the graph, slowly, once FRONT_ROWS wait. While a graph is being built,
    READ_WHOLE_ROWS may wait, because the build would have to add each new row at its end. Without a partial graph no
    row waits: the next graph that is built takes all rows, and an older version's graph has every row."""
    if not lanes:
        return set()
    partial = [graph for graph in (await graphs(connection, generation)).values() if graph.partial]
    if not partial:
        return set()
    most = FRONT_ROWS if any(graph.valid for graph in partial) else READ_WHOLE_ROWS
    full = (
        "backfill" in lanes
        and await waiting(connection, generation, most=most) == most
        # A small table's graph is dropped instead and built anew afterwards, by a worker that may.
        and (await is_above(connection, generation, READ_WHOLE_ROWS) or not await may_build(connection, generation))
    )
    return {lane for lane in lanes if lane == "live" or not full}


async def is_above(connection: Connection, generation: Generation, rows: int) -> bool:
    """Whether the table has more than ``rows`` rows, by Postgres's own estimate."""
    return await estimated_rows(connection, generation) > rows


async def is_missed(connection: Connection, generation: Generation) -> bool:
    """Whether the table has no graph yet although it is large enough for one. One search reads such a table whole in a
    moment, but hundreds of questions in a row would take a processor from the build, and from documents."""
    return (
        generation.vectors == "pgvector"
        and not any(graph.valid for graph in (await graphs(connection, generation)).values())
        and await rows(connection, generation, most=GRAPH_FROM_ROWS) >= GRAPH_FROM_ROWS
    )


async def estimated_rows(connection: Connection, generation: Generation) -> int:
    """The number of the table's rows, by Postgres's own estimate, which is a second old while rows are being written.
    0: it was never counted, or there is no table."""
    cursor = await connection.execute(
        "SELECT greatest(pg_stat_get_live_tuples(oid), reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass(%s)",
        [f'"{generation.chunk_table}"'],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def move(connection: Connection, generation: Generation, *, limit: int) -> int:
    """Add up to ``limit`` waiting rows to the graph; returns how many were added. Rows that a sink has locked are
    skipped, so this waits for no lock; a sink that writes one of the added rows waits for the end of the
    transaction.

    Where the graph holds sketches, a row without one gets it."""
    cursor = await connection.execute(
        sql.SQL(
            "UPDATE {table} SET in_graph = true WHERE id = ANY(ARRAY("
            " SELECT id FROM {table} WHERE {outside} ORDER BY id LIMIT %s FOR NO KEY UPDATE SKIP LOCKED)) {lacking}"
        ).format(
            table=sql.Identifier(generation.chunk_table),
            outside=outside(generation),
            lacking=sql.SQL("RETURNING CASE WHEN sketch IS NULL THEN id END" if generation.graph_of_sketches else ""),
        ),
        [limit],
    )
    if generation.graph_of_sketches and (lacking := [id_ for (id_,) in await cursor.fetchall() if id_ is not None]):
        from pipeline.stores.vectors import add_sketches  # here: not every process needs numpy

        await add_sketches(connection, generation, lacking)
    return cursor.rowcount


async def is_building(connection: Connection, generation: Generation) -> bool:
    """Whether an index on the table is being built, as far as this role may see."""
    return await _holds(
        connection,
        "SELECT EXISTS (SELECT FROM pg_stat_progress_create_index WHERE relid = to_regclass(%s))",
        [f'"{generation.chunk_table}"'],
    )


async def is_vacuumed(connection: Connection, generation: Generation) -> bool:
    """Whether the generation's graph is being vacuumed. The locks show it to every role; the view of its progress does
    not."""
    return await _holds(
        connection,
        "SELECT EXISTS (SELECT FROM pg_locks t JOIN pg_locks g USING (database, pid)"
        " JOIN pg_database d ON d.oid = database AND d.datname = current_database()"
        " WHERE t.relation = to_regclass(%s) AND t.mode = 'ShareUpdateExclusiveLock' AND t.granted"
        " AND g.relation = to_regclass(%s) AND g.mode = 'RowExclusiveLock')",
        [f'"{generation.chunk_table}"', f'"{own_name(generation)}"'],
    )


async def may_build(connection: Connection, generation: Generation) -> bool:
    """Whether this role may create and drop the table's indexes (deploy/roles: a worker may not)."""
    return await _holds(
        connection,
        "SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE')"
        " FROM pg_class c WHERE c.oid = to_regclass(%s)",
        [f'"{generation.chunk_table}"'],
    )


async def _holds(connection: Connection, statement: LiteralString, values: Sequence[str]) -> bool:
    """Whether what a statement selects is true; without a row it is not."""
    cursor = await connection.execute(statement, values)
    row = await cursor.fetchone()
    return bool(row and row[0])


async def drop_graph(connection: Connection, name: str) -> None:
    """Drop an index. Not in a transaction; writers and queries continue meanwhile."""
    await connection.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(sql.Identifier(name)))


async def rename_graph(connection: Connection, name: str, new: str) -> None:
    await connection.execute(sql.SQL("ALTER INDEX {} RENAME TO {}").format(sql.Identifier(name), sql.Identifier(new)))


async def create_graph(
    connection: Connection, generation: Generation, *, name: str | None = None, concurrently: bool = False
) -> None:
    """Create the HNSW index over the generation's rows with in_graph, and before it the index of the other rows.
    Repeats are harmless. ``concurrently`` (not in a transaction): writers are not blocked, and the remains of an
    interrupted attempt are removed first."""
    table, name = generation.chunk_table, name or own_name(generation)
    await _create(
        connection,
        f"{table}_waiting",
        sql.SQL("{} (id) WHERE {}").format(sql.Identifier(table), outside(generation)),
        concurrently=concurrently,
    )
    parameters = build_parameters(generation.dimensions, generation.quantisation, sketched=generation.sketched)
    await _create(
        connection,
        name,
        sql.SQL(
            f"{{}} USING hnsw ({{}} {_operators(generation)}) WITH (m = {{}}, ef_construction = {{}}) WHERE in_graph"
        ).format(
            sql.Identifier(table),
            _held(generation, sql.SQL(column(generation))),
            sql.Literal(parameters.neighbours),
            sql.Literal(parameters.candidates),
        ),
        concurrently=concurrently,
    )
    if parameters != USUAL_PARAMETERS:
        await _add_faster(connection, name, concurrently=concurrently)


async def _add_faster(connection: Connection, name: str, *, concurrently: bool) -> None:
    """Let rows that are added to a graph from now on choose among the usual number of candidates, which takes a
    fifth less time. A graph that somebody reads all the time keeps its options: then each added row costs more."""
    alter = sql.SQL("ALTER INDEX {} SET (ef_construction = {})").format(
        sql.Identifier(name), sql.Literal(USUAL_PARAMETERS.candidates)
    )
    cursor = await connection.execute(
        "SELECT %s = ANY(reloptions) FROM pg_class WHERE oid = to_regclass(%s)",
        [f"ef_construction={USUAL_PARAMETERS.candidates}", f'"{name}"'],
    )
    if (row := await cursor.fetchone()) is None or row[0]:
        return
    if not concurrently:
        await connection.execute(alter)
        return
    for attempt in range(_LOCK_ATTEMPTS):
        await asyncio.sleep(_LOCK_PAUSE_SECONDS if attempt else 0.0)
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'")
                await connection.execute(alter)
            return
        except LockNotAvailable:
            continue
    log.warning("graph_adds_slowly", graph=name, reason="the index was in use all the time")


async def _create(connection: Connection, name: str, what: sql.Composed, *, concurrently: bool) -> None:
    if concurrently:
        cursor = await connection.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", [f'"{name}"']
        )
        row = await cursor.fetchone()
        if row is not None and not row[0]:
            await drop_graph(connection, name)
    await connection.execute(
        sql.SQL("CREATE INDEX {concurrently} IF NOT EXISTS {name} ON {what}").format(
            concurrently=sql.SQL("CONCURRENTLY" if concurrently else ""), name=sql.Identifier(name), what=what
        )
    )
