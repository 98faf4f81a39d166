"""Nearest neighbours from the chunk table: by its HNSW graph if the caller may read much, by an exact scan if little.

The graph filters while it is walked: to find n rows if r of t rows pass, it visits about n · t / r rows. An exact scan
reads the r rows once each, and a visit costs about as much as VISIT_COST rows. So the scan is cheaper up to
r = √(VISIT_COST · n · t), which is where we switch. (It is also more accurate: the narrower the filter, the more of the
nearest rows a walk misses.) The rows that pass are those that access and the query's filters leave.

Rows that are not in the graph yet (docs/adr/0030) are read exactly, in the same statement as the walk: every row is in
exactly one of both parts. Without a graph, all rows are read exactly, or, if the caller may read too many for that
(the graph of a large table is still being built), those that keyword search returns.

The graph of a generation can also be in its keyword index (``pipeline.stores.dense``); few rows are read exactly here
all the same.

Without filters, a walk trusts the rows' own access_id and looks nothing up. With filters, or when too many candidates
were withheld, it checks every visited row against the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from time import monotonic
from typing import Any, Literal
from uuid import UUID

from elasticsearch import AsyncElasticsearch
from psycopg import sql

from pipeline.core.graph import CAREFUL_PARAMETERS, READ_WHOLE_ROWS
from pipeline.core.model import Generation
from pipeline.core.sketch import DEVIATIONS
from pipeline.embedding.port import Vectors
from pipeline.stores import dense
from pipeline.stores.graph import RESCORED, column, distance, inside, outside, own_name, valid
from pipeline.stores.postgres import Connection, document_index
from pipeline.stores.vectors import sketches_of, value
from query.access.callers import Caller, Readable
from query.access.filters import NONE, Filters, clauses, conditions, values
from query.model import Candidate
from query.retrieval.keywords import may_read

Scan = Literal["graph", "whole graph", "exact", "sketched", "index", "words"]
"""exact: all rows are compared. sketched: all rows' sketches are compared, and then the vectors of those that can be
among the nearest (docs/adr/0121). whole graph: a graph over all rows, as an older version created it; no row is outside
of it. index: the graph in the keyword index. words: only passages that keyword search returns are compared, because
there is no graph yet."""

VISIT_COST = 8
"""The cost of visiting a row in the graph, in rows of an exact scan. Measured: 22 µs for a visit and 4 µs for a row
(60,000 rows of 384 dimensions, in memory); on 100,000 rows of 1,536 dimensions, a tenth of them readable, the walk took
41 ms and reading the 9,968 rows took 34 ms."""

SKETCH_GAIN = 3
"""So many rows are compared by their sketches in the time of one row by its vector. Measured with 1,536 dimensions: of
100,000 rows 3.1 µs a row by vectors, and .33 µs by sketches and 3.3 µs for each that is read whole; of a million, where
each row is an access to memory, 2 to 2.4 times as fast."""
INDEXED_SKETCH_GAIN = 6
"""The same where the index of documents holds the sketches (docs/adr/0127) and a walk is the other choice: in a graph
of sketches of 299,000 rows, both take as long with some 95,000 readable rows; in one of halfvecs of 384 dimensions,
where the limit is 43,000, with some 36,000."""
FEW_DOCUMENTS = 1_000
"""The documents whose rows are counted to learn how many all have. To count 100,000 rows took 68 ms."""
FEWEST_COMPARED, MOST_COMPARED = 64, 10_000
"""Limits on the rows of a sketched scan that are read whole: as many as come before a last one of at least that rank,
with a margin for the error of sketches; at most so many (33 ms), where a model's vectors are all alike."""

OVERFETCH = 2
"""A walk through bits fetches this many times the limit, times ``RESCORED``, and through sketches in a larger table as
many times more as its candidate list grows. A walk through halfvecs fetches the limit in tables of up to EF_SEARCH_ROWS
rows (docs/adr/0113), and up to this many times the limit in larger ones. The length of such a walk also decides up to
how many rows are read exactly instead of it."""


EF_SEARCH, EF_SEARCH_ROWS, MOST_EF_SEARCH = 300, 100_000, 1_000
"""The size of a walk's candidate list in a table of up to so many rows, and the most that pgvector allows. It grows
with the rows: with the same list, a walk misses more of the nearest rows the more there are (docs/adr/0117)."""
GROWTH, CAREFUL_GROWTH = 0.5, 0.25
"""The power of the rows with which the list grows: in the usual graph, and in one that was built with
CAREFUL_PARAMETERS (docs/adr/0118)."""


@dataclass(frozen=True, slots=True)
class Tuning:
    ef_search: int | None = None
    """The size of a walk's candidate list; None: by the size of the table (docs/adr/0117)."""
    max_scan_tuples: int = 200_000
    """The most rows that a walk visits. The switch to exact scans keeps the expected walk below it up to 50 M rows."""
    always_exact_rows: int = 5_000
    """So few rows are always scanned exactly, which takes 15–35 ms; also before the size of the table is known. With
    sketches, SKETCH_GAIN times as many."""
    most_exact_rows: int = READ_WHOLE_ROWS
    """The most rows that are scanned exactly while there is no graph; with sketches, SKETCH_GAIN times as many."""
    random_page_cost: float = 1.0
    """The planner's setting for an index in memory; with the default, a sequential scan looks cheaper."""


@dataclass(frozen=True, slots=True)
class NeighbourQuery:
    """The conditions of a search for nearest neighbours."""

    generation: Generation
    caller: Caller
    readable: Readable
    filters: Filters = NONE
    verified: bool = False
    """Return only rows that the ledger and the manifest confirm: slower, but none of them is withheld later."""


async def choose_scan(connection: Connection, query: NeighbourQuery, *, limit: int, tuning: Tuning) -> Scan:
    """The scan for a query. It counts the documents that access and filters leave, up to where the graph is better, and
    the rows of a few of them: their ids are digests, so that the first ones are any."""
    graph, rows, per_document, indexed = await _size(connection, query.generation)
    gain = SKETCH_GAIN if query.generation.sketched else 1
    by_index = INDEXED_SKETCH_GAIN if indexed and query.generation.sketched else gain
    most_rows = gain * tuning.always_exact_rows
    if query.generation.vectors == "elasticsearch":
        graph = "index"  # which compares all entries by itself where few pass the filter
    elif graph is None:  # a load outdates the planner's estimates
        graph, most_rows, per_document = "words", gain * tuning.most_exact_rows, 1
    else:
        most_rows = max(
            most_rows,
            isqrt(by_index * VISIT_COST * OVERFETCH * RESCORED[query.generation.quantisation] * limit * rows),
        )
    cursor = await connection.execute(
        sql.SQL(
            """
            WITH mine AS MATERIALIZED (
                SELECT d.id FROM documents d
                WHERE d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) {filters}
                LIMIT %(documents)s + 1
            ), few AS MATERIALIZED (SELECT id FROM mine ORDER BY id LIMIT %(few)s)
            SELECT (SELECT count(*) FROM mine) <= %(documents)s AND (
                SELECT count(*) FROM (
                    SELECT FROM few JOIN {chunks} c ON c.document_id = few.id LIMIT %(rows)s + 1
                ) counted
            ) * (SELECT greatest(1, count(*) / %(few)s::float8) FROM mine) <= %(rows)s
            """
        ).format(chunks=sql.Identifier(query.generation.chunk_table), filters=conditions(query.filters)),
        {
            **values(query.filters),
            "tenant": query.caller.tenant,
            "ids": list(query.readable.access_ids),
            "rows": most_rows,
            "documents": max(1, most_rows // per_document),
            "few": FEW_DOCUMENTS,
        },
        prepare=False,  # the best plan depends on the filter's values
    )
    row = await cursor.fetchone()
    return complete(query.generation) if row and row[0] else graph


def complete(generation: Generation) -> Scan:
    """The scan of all rows that may be read."""
    return "sketched" if generation.sketched else "exact"


async def _size(connection: Connection, generation: Generation) -> tuple[Scan | None, int, int, bool]:
    """The kind of graph, if there is a valid one, the planner's estimates of the rows of the chunk table and of the
    rows per document, and whether the index of documents holds the sketches."""
    cursor = await connection.execute(
        sql.SQL(
            "SELECT (SELECT bool_or(i.indpred IS NOT NULL) FROM pg_index i JOIN pg_class g ON g.oid = i.indexrelid"
            "  JOIN pg_am a ON a.oid = g.relam WHERE i.indrelid = c.oid AND a.amname = 'hnsw' AND {valid}),"
            " greatest(c.reltuples, 0)::bigint, greatest(d.reltuples, 1)::bigint,"
            " EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'sketch')"
            " FROM pg_class c, pg_class d WHERE c.oid = to_regclass(%s) AND d.oid = to_regclass('documents')"
        ).format(valid=valid(generation)),
        [document_index(generation), generation.chunk_table],
    )
    partial, rows, documents, indexed = await cursor.fetchone() or (None, 0, 1, False)
    graph: Scan | None = None if partial is None else "graph" if partial else "whole graph"
    return graph, rows, max(1, rows // documents), indexed


async def nearest(
    connection: Connection,
    query: NeighbourQuery,
    vector: Vectors,
    scan: Scan,
    *,
    limit: int,
    timeout_seconds: float,
    tuning: Tuning,
) -> tuple[list[Candidate], Scan]:
    """The nearest passages among those that this caller may read, nearest first, and the scan that returned them.

    A walk with too few results is followed by an exact scan: fewer than ``limit`` means that there are no more.
    connection: in a transaction, whose rest has the settings of the scan.
    """
    deadline = monotonic() + timeout_seconds
    configured = partial(configure, connection, query.generation, limit=limit, tuning=tuning)
    walked = await configured(scan, timeout_seconds=timeout_seconds)
    candidates = await _candidates(connection, *build(query, vector, scan, limit=limit, walked=walked))
    if scan not in ("exact", "sketched") and len(candidates) < limit:
        scan = complete(query.generation)
        await configured(scan, timeout_seconds=deadline - monotonic())
        candidates = await _candidates(connection, *build(query, vector, scan, limit=limit, walked=limit))
    return candidates, scan


async def indexed(
    es: AsyncElasticsearch, query: NeighbourQuery, vector: Vectors, *, excluded: Collection[UUID] = (), limit: int
) -> list[UUID]:
    """The chunks whose vectors in the keyword index are nearest, among those that this caller may read according to the
    index, nearest first. Fewer than ``limit``: there are no more. excluded: chunks that an earlier round returned and
    the ledger withheld. Raises Retryable or Misconfigured."""
    near = await dense.nearest(
        es,
        query.generation,
        vector,
        [*may_read(query.caller.tenant, query.readable), *clauses(query.filters)],
        excluded=[{"ids": {"values": [str(id_) for id_ in excluded]}}] if excluded else [],
        limit=limit,
    )
    return [entry.chunk for entry in near]


async def of_entries(
    connection: Connection, generation: Generation, ids: Sequence[UUID], vector: Vectors, *, limit: int
) -> list[Candidate]:
    """Those of these chunks that have a row, compared by their whole vectors: the ``limit`` nearest, nearest first. A
    chunk that was written or deleted a moment ago may have an entry and no row."""
    statement = sql.SQL(_OF_ENTRIES).format(chunks=sql.Identifier(generation.chunk_table))
    values = {"vector": value(generation, vector), "ids": list(ids), "limit": limit}
    return await _candidates(connection, statement, values)


async def _candidates(connection: Connection, statement: sql.Composed, values: dict[str, Any]) -> list[Candidate]:
    # Never prepared: the best plan depends on the values (the caller's access), which a generic plan ignores.
    cursor = await connection.execute(statement, values, prepare=False)
    return [Candidate(*row) for row in await cursor.fetchall()]


_SETTINGS = """
    SELECT set_config('hnsw.ef_search', least(%(most)s, greatest(
            2 * %(limit)s, coalesce(%(ef_search)s, %(least)s * grown)
        ))::integer::text, true),
        set_config('hnsw.iterative_scan', 'relaxed_order', true),
        set_config('hnsw.max_scan_tuples', %(max_scan_tuples)s, true),
        set_config('work_mem', greatest(pg_size_bytes(current_setting('work_mem')) >> 10, %(work_kb)s)::text, true),
        set_config('hnsw.scan_mem_multiplier', '2', true),
        set_config('random_page_cost', %(random_page_cost)s, true),
        set_config('statement_timeout', %(milliseconds)s, true),
        set_config('enable_seqscan', %(sequential)s, true),
        grown
    FROM (
        SELECT coalesce(max(greatest(reltuples, 0)), 0) FROM pg_class WHERE oid = to_regclass(%(table)s)
    ) size (rows) LEFT JOIN (
        SELECT %(careful)s = ANY(reloptions) FROM pg_class WHERE oid = to_regclass(%(graph)s)
    ) graph (careful) ON true CROSS JOIN LATERAL (
        SELECT greatest(
            1, power(rows / %(least_rows)s, CASE WHEN careful THEN %(careful_growth)s ELSE %(growth)s END::float8)
        )
    ) growth (grown)
"""
"""grown: how many times the candidate list of a small table the list has."""
WORK_KB = 16_384
"""Holds the sketches' distances of 250,000 rows, and twice as much the candidates of a walk."""


async def configure(
    connection: Connection, generation: Generation, scan: Scan, *, limit: int, timeout_seconds: float, tuning: Tuning
) -> int:
    """Set what a scan needs for the rest of the transaction, and return how many rows a walk fetches. With "graph",
    sequential scans are off so that the few rows outside of the graph are read through their index, whatever the
    planner's statistics say of their number; with "sketched" because the planner would read a million rows for those of
    a twelfth of the documents."""
    cursor = await connection.execute(
        _SETTINGS,
        {
            "most": MOST_EF_SEARCH,
            "least": EF_SEARCH,
            "least_rows": EF_SEARCH_ROWS,
            "growth": GROWTH,
            "careful_growth": CAREFUL_GROWTH,
            "limit": limit,
            "work_kb": WORK_KB,
            "ef_search": tuning.ef_search,
            "max_scan_tuples": str(tuning.max_scan_tuples),
            "random_page_cost": str(tuning.random_page_cost),
            "milliseconds": str(max(1, round(timeout_seconds * 1000))),  # 0 would mean no limit
            "sequential": "off" if scan in ("graph", "sketched") else "on",
            "table": generation.chunk_table,
            "graph": own_name(generation),
            "careful": f"m={CAREFUL_PARAMETERS.neighbours}",
        },
    )
    [*_, grown] = await cursor.fetchone() or (1.0,)
    if generation.quantisation != "halfvec":
        return round(
            OVERFETCH * RESCORED[generation.quantisation] * limit * (float(grown) if generation.sketched else 1)
        )
    return round(limit * min(OVERFETCH, float(grown)))


_WALK = """
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {chunks} c
        WHERE {inside} AND c.access_id = ANY(%(ids)s::bigint[]) {ledger}
        ORDER BY {order} LIMIT %(walked)s
"""
_WAITING = "{chunks} c WHERE {outside} AND c.access_id = ANY(%(ids)s::bigint[]) {ledger}"
_OUTSIDE = """
        SELECT * FROM (
            SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {waiting} OFFSET 0
        ) waiting ORDER BY distance, id LIMIT %(limit)s
"""
_GRAPH = """
    WITH inside AS MATERIALIZED ({walk}), {seen} outside AS MATERIALIZED ({outside})
    SELECT id, document_id, text, 1 - distance FROM (TABLE inside UNION ALL TABLE outside) nearest
    ORDER BY distance + 0, id LIMIT %(limit)s
"""
"""``+ 0`` forces a sort: the planner assumes that the walk's order is that of the distances, which is not exact."""
_WHOLE_GRAPH = """
    WITH inside AS MATERIALIZED ({walk})
    SELECT id, document_id, text, 1 - distance FROM inside ORDER BY distance + 0, id LIMIT %(limit)s
"""
_READABLE = "documents d JOIN {chunks} c ON c.document_id = d.id WHERE {mine} {filters} {listed}"
_EXACT = """
    SELECT id, document_id, text, 1 - distance FROM (
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {readable} OFFSET 0
    ) nearest ORDER BY distance, id LIMIT %(limit)s
"""
"""OFFSET 0: each distance is computed once, though it is returned and sorted by, and never through the graph."""
_SKETCHED = """
    WITH {seen} compared AS MATERIALIZED ({compared})
    SELECT id, document_id, text, 1 - distance FROM compared ORDER BY distance, id LIMIT %(limit)s
"""
_SEEN = "seen AS MATERIALIZED (SELECT c.id, c.sketch <~> %(sketch)s AS apart FROM {rows}),"
"""apart: the number of different bits; NULL for a row that a worker of an older version wrote. All of it is in the
index of documents (docs/adr/0127)."""
_COMPARED = """
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {chunks} c
        WHERE c.id = ANY(ARRAY(
            SELECT id FROM seen WHERE apart IS NULL
        ) || ARRAY(
            SELECT id FROM seen WHERE apart <= coalesce((
                SELECT apart + %(deviations)s * sqrt(apart * (1 - apart / %(bits)s)) FROM seen WHERE apart IS NOT NULL
                ORDER BY apart OFFSET %(rank)s - 1 LIMIT 1
            ), %(bits)s) ORDER BY apart LIMIT %(compared)s
        )) OFFSET 0
"""
_OF_ENTRIES = """
    SELECT id, document_id, text, 1 - distance FROM (
        SELECT c.id, c.document_id, c.text, c.embedding <=> %(vector)s AS distance FROM {chunks} c
        WHERE c.id = ANY(%(ids)s::uuid[]) OFFSET 0
    ) nearest ORDER BY distance, id LIMIT %(limit)s
"""
_MINE = "d.tenant = %(tenant)s AND d.access_id = ANY(%(ids)s::bigint[]) AND d.deleted_at IS NULL"
_IN_LEDGER = "AND EXISTS (SELECT FROM documents d WHERE d.id = c.document_id AND {mine} {filters} {listed} OFFSET 0)"
"""OFFSET 0: evaluated for each row that the walk visits. A join would first collect all rows that may be read."""
_LISTED = """AND EXISTS (
    SELECT FROM manifests m
    WHERE m.document_id = c.document_id AND m.generation = %(generation)s AND c.id = ANY(m.chunk_ids) OFFSET 0)"""


def build(
    query: NeighbourQuery, vector: Vectors, scan: Scan, *, limit: int, walked: int
) -> tuple[sql.Composed, dict[str, Any]]:
    """The statement and its parameters. walked: how many rows a walk fetches; they are sorted again, because
    relaxed_order returns rows slightly out of order."""
    generation = query.generation
    parts = {
        "mine": sql.SQL(_MINE),
        "filters": conditions(query.filters),
        "listed": sql.SQL(_LISTED if query.verified else ""),
    }
    chunks = sql.Identifier(generation.chunk_table)
    compared = sql.SQL(_COMPARED).format(chunks=chunks)
    if scan in ("exact", "sketched"):
        readable = sql.SQL(_READABLE).format(chunks=chunks, **parts)
        if scan == "exact":
            statement = sql.SQL(_EXACT).format(readable=readable)
        else:
            statement = sql.SQL(_SKETCHED).format(seen=sql.SQL(_SEEN).format(rows=readable), compared=compared)
    else:
        ledger = sql.SQL(_IN_LEDGER).format(**parts) if query.filters or query.verified else sql.SQL("")
        walk = sql.SQL(_WALK).format(
            chunks=chunks,
            ledger=ledger,
            inside=inside(generation, "c.") if scan == "graph" else sql.SQL("true"),
            order=distance(
                generation,
                sql.SQL(f"c.{column(generation)}"),
                sql.SQL("%(sketch)s" if generation.graph_of_sketches else "%(vector)s"),
            ),
        )
        waiting = sql.SQL(_WAITING).format(chunks=chunks, outside=outside(generation, "c."), ledger=ledger)
        if generation.sketched:
            seen, waiting = sql.SQL(_SEEN).format(rows=waiting), compared
        else:
            seen, waiting = sql.Composed([]), sql.SQL(_OUTSIDE).format(waiting=waiting)
        statement = sql.SQL(_GRAPH if scan == "graph" else _WHOLE_GRAPH).format(walk=walk, seen=seen, outside=waiting)
    [sketch] = sketches_of(generation, [vector]) if generation.sketched else [None]
    return statement, {
        **values(query.filters),
        "vector": value(generation, vector),
        "ids": list(query.readable.access_ids),
        "tenant": query.caller.tenant,
        "generation": generation.name,
        "limit": limit,
        "walked": walked,
        "sketch": sketch,
        "bits": float(generation.sketch_bits),
        "deviations": DEVIATIONS,
        "rank": max(limit, FEWEST_COMPARED),
        "compared": max(2 * limit, MOST_COMPARED),
    }
