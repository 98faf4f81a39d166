"""What the ledger tells of the pipeline: how soon changes are found, what waits, what was set aside, what differs, how
connectors are. Each part is one bounded question, whatever the size of the library.

Nothing keeps freshness over time in Postgres (Prometheus does, as ``penstock_freshness_seconds``), but every document
says when its last change was made at the source and when each store came to hold it. So the past is read from there, as
of today: a document that changed twice counts once, where it changed last. Of each short slice of time only so many
documents are looked at, through the index on ``settled_at``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pipeline.audit import runs
from pipeline.core.canary import EXTERNAL_ID, MARK
from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection

OBJECTIVE_SECONDS = 300
"""A change is searchable within five minutes at the latest."""
WINDOW = timedelta(minutes=15)
"""What counts as now."""
BUCKET = timedelta(minutes=30)
BUCKETS = 48
SLICES = 4
"""Of a bucket, each looked at for …"""
OF_A_SLICE = 50
"""… so many settlements: in all at most 9,600 rows by index, each with two look-ups by key."""
MOST_COUNTED = 10_000
"""Rows that wait, or letters, are counted no further."""
MOST_CONNECTORS = 500
SILENT_SECONDS = 15.0
"""A runner gives a sign of life every second. Agrees with connectors.operate (a test compares them)."""
REASON_CHARACTERS = 300

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
        -- A document is searchable when the second of both stores holds it: counted there, once.
        SELECT t.n, d.source,
            greatest(0, extract(epoch FROM t.settled_at - coalesce(d.changed_at, d.received_at))) AS seconds
        FROM taken t
        JOIN overview_documents d ON d.id = t.document_id AND d.lane = 'live'
            AND NOT starts_with(d.source, %(canaries)s)
        JOIN index_state o ON (o.document_id, o.generation) = (t.document_id, %(generation)s) AND o.store <> t.store
        WHERE o.seq >= o.want_seq AND (o.settled_at, o.store) < (t.settled_at, t.store)
          -- What a repair or a rebuild brought about says nothing of how soon the change was found.
          AND t.pending_since < d.received_at + interval '10 seconds'
    )
"""
_FRESHNESS = f"""{_FRESH}
    SELECT s.n / %(slices)s, count(f.n), percentile_disc(0.5) WITHIN GROUP (ORDER BY f.seconds)::float8,
        percentile_disc(0.99) WITHIN GROUP (ORDER BY f.seconds)::float8,
        (SELECT count(*) FROM (SELECT FROM taken GROUP BY n HAVING count(*) >= %(most)s) full_slices)
    FROM slices s LEFT JOIN fresh f ON f.n = s.n GROUP BY 1 ORDER BY 1
"""  # noqa: S608 — constants of this module


async def freshness(connection: Connection, generation: Generation, now: datetime) -> dict[str, Any]:
    """Seconds from the source's change to both stores holding it, of live changes: now and for a day."""
    first = now - BUCKET * (BUCKETS - 1)
    first -= timedelta(seconds=first.timestamp() % BUCKET.total_seconds())  # whole half hours: the line stands still
    past = await _fresh(connection, generation, first, BUCKET / SLICES, BUCKETS * SLICES, SLICES)
    slices = 60
    present = await _fresh(connection, generation, now - WINDOW, WINDOW / slices, slices, slices)
    [(_, documents, p50, p99, full)] = present
    return {
        "objective_seconds": OBJECTIVE_SECONDS,
        "now": {"documents": documents, "p50": p50, "p99": p99, "window_seconds": WINDOW.total_seconds()},
        "over_time": [
            {"at": (first + n * BUCKET).isoformat(), "documents": documents, "p50": p50, "p99": p99}
            for n, documents, p50, p99, _ in past
        ],
        "over_time_seconds": (BUCKET * BUCKETS).total_seconds(),
        "sampled": bool(full or past[0][4]),
    }


async def fresh_by_source(connection: Connection, generation: Generation, now: datetime) -> dict[str, Any]:
    """Seconds from the source's change to both stores holding it, of live changes within WINDOW: all, and by source
    (at most MOST_CONNECTORS, those with most changes first)."""
    slices = 60
    values = {
        "start": now - WINDOW, "slice": WINDOW / slices, "count": slices, "slices": slices, "most": OF_A_SLICE,
        "generation": generation.name, "sources": MOST_CONNECTORS, "canaries": MARK,
    }  # fmt: skip
    cursor = await connection.execute(
        f"""{_FRESH}
        SELECT source, count(*), percentile_disc(0.5) WITHIN GROUP (ORDER BY seconds)::float8,
            percentile_disc(0.99) WITHIN GROUP (ORDER BY seconds)::float8
        FROM fresh GROUP BY GROUPING SETS ((), (source))
        ORDER BY grouping(source) DESC, 2 DESC, 1 LIMIT %(sources)s + 1""".encode(),  # noqa: S608 — constants of this module
        values,
    )
    told = [
        {"source": source, "documents": documents, "p50": p50, "p99": p99}
        for source, documents, p50, p99 in await cursor.fetchall()
    ]
    whole = {name: value for name, value in told[0].items() if name != "source"}
    return {
        "objective_seconds": OBJECTIVE_SECONDS, "window_seconds": WINDOW.total_seconds(), **whole,
        "by_source": told[1:],
    }  # fmt: skip


async def _fresh(
    connection: Connection, generation: Generation, start: datetime, slice_: timedelta, count: int, slices: int
) -> list[tuple[int, int, float | None, float | None, int]]:
    """(bucket, documents, p50, p99, slices that were not looked at to their end), a row for each bucket."""
    values = {
        "start": start, "slice": slice_, "count": count, "slices": slices, "most": OF_A_SLICE,
        "generation": generation.name, "canaries": MARK,
    }  # fmt: skip
    cursor = await connection.execute(_FRESHNESS, values)
    return [(int(n), documents, p50, p99, full) for n, documents, p50, p99, full in await cursor.fetchall()]


async def canaries(connection: Connection) -> list[UUID]:
    """Documents of ours, which no total of the company's holds. By index: they share one external id."""
    cursor = await connection.execute(
        "SELECT id FROM overview_documents WHERE external_id = %s AND starts_with(source, %s)", [EXTERNAL_ID, MARK]
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def pending(connection: Connection, generation: Generation) -> dict[str, Any]:
    """What the stores have yet to follow, of the generation that is asked, but for canaries. ``more``: there may be
    more than counted, and older ones among them."""
    ours = await canaries(connection)
    found: dict[str, Any] = {
        store: {"documents": 0, "failing": 0, "more": False, "oldest_seconds": None}
        for store in ("vectors", "keywords")
    }
    for store, told in found.items():
        cursor = await connection.execute(
            "SELECT count(*), count(*) FILTER (WHERE attempts > 0),"
            " extract(epoch FROM clock_timestamp() - min(pending_since))::float8"
            " FROM (SELECT attempts, pending_since FROM index_state WHERE seq < want_seq AND generation = %s"
            " AND store = %s AND document_id <> ALL(%s) ORDER BY next_at LIMIT %s) waiting",
            [generation.name, store, ours, MOST_COUNTED + 1],
        )
        [documents, failing, oldest] = await cursor.fetchone() or (0, 0, None)
        told |= {
            "documents": min(documents, MOST_COUNTED), "failing": failing, "more": documents > MOST_COUNTED,
            "oldest_seconds": oldest,
        }  # fmt: skip
    return found | {"oldest_seconds": max((s["oldest_seconds"] or 0.0 for s in found.values()), default=0.0)}


async def dead_letters(connection: Connection) -> dict[str, Any]:
    """Letters that wait for somebody, by where they failed and why; of more than MOST_COUNTED, the newest."""
    cursor = await connection.execute(
        "SELECT stage, code, count(*), max(at) FROM"
        " (SELECT stage, code, at FROM overview_letters WHERE replayed_at IS NULL AND dismissed_at IS NULL"
        " ORDER BY at DESC LIMIT %s) waiting"
        " GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
        [MOST_COUNTED + 1],
    )
    by_code = [
        {"stage": stage, "code": code, "letters": letters, "newest_at": newest.isoformat()}
        for stage, code, letters, newest in await cursor.fetchall()
    ]
    waiting = sum(one["letters"] for one in by_code)
    return {"waiting": min(waiting, MOST_COUNTED), "more": waiting > MOST_COUNTED, "by_code": by_code}


async def divergence(connection: Connection) -> dict[str, Any]:
    """What the background audit found and was not mended since. ``audited``: it has been through everything once."""
    by = [
        {"store": store, "kind": kind, "documents": documents}
        for (store, kind), documents in sorted((await runs.divergent(connection)).items())
    ]
    cursor = await connection.execute(
        "SELECT EXISTS (SELECT FROM audit_runs WHERE scope = 'background' AND finished_at IS NOT NULL"
        " AND generation = (SELECT name FROM generations WHERE state = 'active'))"
    )
    row = await cursor.fetchone()
    under_way, _ = await runs.background(connection)
    return {
        "audited": bool(row and row[0]),
        "documents": sum(one["documents"] for one in by),
        "by": by,
        "age_seconds": await runs.age_seconds(connection),
        "round": None if under_way is None else {"documents": under_way.documents},
    }


async def connectors(connection: Connection) -> list[dict[str, Any]]:
    """How each instance is, those that need somebody first. Reads the runner's own table: what a runner says of itself
    is all there is to know here."""
    cursor = await connection.execute(
        "SELECT tenant, source, kind, paused, loaded_at, guard, activities, counts,"
        " extract(epoch FROM clock_timestamp() - seen_at)::float8 FROM connectors WHERE removed_at IS NULL"
        " ORDER BY tenant, source LIMIT %s",
        [MOST_CONNECTORS],
    )
    found = []
    for tenant, source, kind, paused, loaded_at, guard, activities, counts, silent in await cursor.fetchall():
        state, reason = condition(
            paused=paused, loaded=loaded_at is not None, guard=guard, activities=activities, silent_seconds=silent
        )
        successes = {name: one["succeeded_at"] for name, one in activities.items() if one.get("succeeded_at")}
        found.append({
            "tenant": tenant, "source": source, "kind": kind, "state": state,
            "reason": reason[:REASON_CHARACTERS] if reason else None,
            "last_success_at": max(successes.values(), default=None), "last_sweep_at": successes.get("sweep"),
            "published": sum(n for n in counts.values() if isinstance(n, int)),
        })  # fmt: skip
    worst = ("needs attention", "not running", "waiting")
    return sorted(found, key=lambda one: worst.index(one["state"]) if one["state"] in worst else len(worst))


def condition(
    *,
    paused: bool,
    loaded: bool,
    guard: Mapping[str, Any] | None,
    activities: Mapping[str, Mapping[str, Any]],
    silent_seconds: float | None,
) -> tuple[str, str | None]:
    """The one word for how an instance is, and why: connectors.operate.condition, which this package cannot import."""
    if silent_seconds is None or silent_seconds > SILENT_SECONDS:
        return "not running", "no sign of life: is `penstock worker connectors` running?"
    if paused:
        return "paused", None
    for wanted in ("needs attention", "waiting"):
        for name, one in activities.items():
            if one.get("state") == wanted:
                return wanted, f"{name}: {one.get('reason')}"
    if guard:
        return "following", f"{guard.get('missing')} of {guard.get('published')} documents look deleted"
    return ("following" if loaded else "first load"), None


async def holdings(connection: Connection, generation: Generation) -> str:
    """Documents and chunks: counted while they are few, else as the planner estimates them. Canaries apart."""
    told = []
    ours = await canaries(connection)
    counting = {
        "documents": "SELECT (SELECT count(*) FROM overview_documents WHERE id = ANY(%(ours)s)),"
        " (SELECT count(*) FROM (SELECT FROM overview_documents LIMIT %(most)s) few)",
        "chunks": "SELECT of_ours, counted FROM overview_chunks(%(table)s, %(ours)s, %(most)s)",
    }
    for (what, statement), table in zip(counting.items(), ("documents", generation.chunk_table), strict=True):
        values = {"most": MOST_COUNTED + 1 + len(ours), "table": table, "ours": ours}
        cursor = await connection.execute(statement.encode(), values)
        mine, counted = await cursor.fetchone() or (0, 0)
        cursor = await connection.execute(
            "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass(%s)", [table]
        )
        [estimated] = await cursor.fetchone() or (0,)
        theirs = counted - mine
        told.append(f"{theirs:,} {what}" if theirs <= MOST_COUNTED else f"about {max(0, estimated - mine):,} {what}")
    return ", ".join(told) + (f"; beside them {len(ours):,} canaries" if ours else "")
