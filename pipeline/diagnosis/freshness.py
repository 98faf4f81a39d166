"""Freshness: the seconds from a change at the source until both stores return it.

Postgres keeps no history of it (Prometheus does, as ``penstock_freshness_seconds``), but every document has the time of
its last change at the source and each store's time of settlement. The past is computed from these, as of today: a
document that changed twice counts once, where it changed last. Each short slice of time is sampled through the index on
``settled_at``, so that the cost does not depend on the size of the library.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from psycopg.rows import class_row, dict_row

from pipeline.core.canary import MARK
from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection

OBJECTIVE_SECONDS = 300
"""A change is searchable within five minutes at the latest."""
WINDOW = timedelta(minutes=15)
"""The period that counts as the present."""
WINDOW_SLICES = 60
BUCKET = timedelta(minutes=30)
BUCKETS = 48
SLICES_PER_BUCKET = 4
MAX_SETTLEMENTS_PER_SLICE = 50
"""In all at most 9,600 rows are read by index for a day, each with two look-ups by key."""
MAX_SOURCES = 500

_FRESH = """
    WITH slices AS (
        SELECT n, %(start)s + n * %(slice)s::interval AS begins FROM generate_series(0, %(count)s - 1) n
    ), taken AS (
        SELECT slices.n, t.* FROM slices CROSS JOIN LATERAL (
            SELECT document_id, store, settled_at, pending_since FROM index_state
            WHERE settled_at >= slices.begins AND settled_at < slices.begins + %(slice)s::interval
              AND generation = %(generation)s AND seq >= want_seq
            ORDER BY settled_at LIMIT %(most)s
        ) t
    ), fresh AS (
        -- A document is searchable when the second of both stores has settled: it is counted there, once.
        SELECT t.n, d.source,
            greatest(0, extract(epoch FROM t.settled_at - coalesce(d.changed_at, d.received_at))) AS seconds
        FROM taken t
        JOIN overview_documents d ON d.id = t.document_id AND d.lane = 'live'
            AND NOT starts_with(d.source, %(canaries)s)
        JOIN index_state o ON (o.document_id, o.generation) = (t.document_id, %(generation)s) AND o.store <> t.store
        WHERE o.seq >= o.want_seq AND (o.settled_at, o.store) < (t.settled_at, t.store)
          -- A settlement by a repair or a rebuild does not show how fast the change was propagated.
          AND t.pending_since < d.received_at + interval '10 seconds'
    )
"""
_FRESHNESS = f"""{_FRESH}
    SELECT s.n / %(slices)s AS bucket, count(f.n) AS documents,
        percentile_disc(0.5) WITHIN GROUP (ORDER BY f.seconds)::float8 AS p50,
        percentile_disc(0.99) WITHIN GROUP (ORDER BY f.seconds)::float8 AS p99,
        (SELECT count(*) FROM (SELECT FROM taken GROUP BY n HAVING count(*) >= %(most)s) full_slices) AS full_slices
    FROM slices s LEFT JOIN fresh f ON f.n = s.n GROUP BY 1 ORDER BY 1
"""  # noqa: S608 — constants of this module


async def freshness(connection: Connection, generation: Generation, now: datetime) -> dict[str, Any]:
    """Freshness of live changes in seconds, now and over a day; ``sampled``: some slices had more than were read."""
    first = now - BUCKET * (BUCKETS - 1)
    first -= timedelta(seconds=first.timestamp() % BUCKET.total_seconds())  # half hours: the curve does not shift
    count = BUCKETS * SLICES_PER_BUCKET
    past = await _buckets(connection, generation, first, BUCKET / SLICES_PER_BUCKET, count, SLICES_PER_BUCKET)
    slice_ = WINDOW / WINDOW_SLICES
    [present] = await _buckets(connection, generation, now - WINDOW, slice_, WINDOW_SLICES, WINDOW_SLICES)
    return {
        "objective_seconds": OBJECTIVE_SECONDS,
        "now": {
            "documents": present.documents,
            "p50": present.p50,
            "p99": present.p99,
            "window_seconds": WINDOW.total_seconds(),
        },
        "over_time": [
            {
                "at": (first + bucket.bucket * BUCKET).isoformat(),
                "documents": bucket.documents,
                "p50": bucket.p50,
                "p99": bucket.p99,
            }
            for bucket in past
        ],
        "over_time_seconds": (BUCKET * BUCKETS).total_seconds(),
        "sampled": bool(present.full_slices or past[0].full_slices),
    }


async def freshness_by_source(connection: Connection, generation: Generation, now: datetime) -> dict[str, Any]:
    """Freshness in seconds of live changes within WINDOW: of all, and by source (at most MAX_SOURCES, those with most
    changes first)."""
    values = {
        "start": now - WINDOW,
        "slice": WINDOW / WINDOW_SLICES,
        "count": WINDOW_SLICES,
        "slices": WINDOW_SLICES,
        "most": MAX_SETTLEMENTS_PER_SLICE,
        "generation": generation.name,
        "sources": MAX_SOURCES,
        "canaries": MARK,
    }
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            f"""{_FRESH}
            SELECT source, count(*) AS documents, percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds)::float8 AS p50,
                percentile_disc(0.99) WITHIN GROUP (ORDER BY seconds)::float8 AS p99
            FROM fresh GROUP BY GROUPING SETS ((), (source))
            ORDER BY grouping(source) DESC, 2 DESC, 1 LIMIT %(sources)s + 1""".encode(),  # noqa: S608 — constants of this module
            values,
        )
        total, *by_source = await cursor.fetchall()
    del total["source"]
    return {
        "objective_seconds": OBJECTIVE_SECONDS,
        "window_seconds": WINDOW.total_seconds(),
        **total,
        "by_source": by_source,
    }


class _Bucket(NamedTuple):
    bucket: int
    documents: int
    p50: float | None
    p99: float | None
    full_slices: int
    """Slices with more settlements than were read, of the whole period."""


async def _buckets(
    connection: Connection, generation: Generation, start: datetime, slice_: timedelta, count: int, slices: int
) -> list[_Bucket]:
    """One row for each bucket. slices: of a bucket."""
    values = {
        "start": start,
        "slice": slice_,
        "count": count,
        "slices": slices,
        "most": MAX_SETTLEMENTS_PER_SLICE,
        "generation": generation.name,
        "canaries": MARK,
    }
    async with connection.cursor(row_factory=class_row(_Bucket)) as cursor:
        await cursor.execute(_FRESHNESS, values)
        return await cursor.fetchall()
