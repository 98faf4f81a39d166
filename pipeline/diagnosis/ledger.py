"""The ledger's part of `status` and of the page: generations, pending work, dead letters, differences.

Each part is one bounded query, whatever the size of the library. For `status` each runs in a transaction of its own, so
that one that fails or takes too long is absent and the others are reported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from pipeline.audit import runs
from pipeline.core.errors import Fenced, Misconfigured, PenstockError
from pipeline.core.model import Generation
from pipeline.core.producers import CODES
from pipeline.diagnosis.connector_status import Schedule, connectors
from pipeline.diagnosis.freshness import freshness_by_source
from pipeline.ledger import generations, skipped
from pipeline.runtime.settings import PostgresSettings, Producers
from pipeline.stores import fence, index_fence
from pipeline.stores.postgres import Connection, connect_alone, require_migrated, translated

CONNECT_SECONDS = 3
STATEMENT_SECONDS = 3.0
MAX_COUNTED = 10_000
"""Pending rows and dead letters are counted up to this number."""
MAX_COUNTED_DOCUMENTS = 100_000
"""Documents are counted up to this number; beyond it the planner's estimate is shown."""
UNDIVIDED = (
    "rows are not divided by tenant: run `penstock migrate` when no query service of an older version is connected"
)


async def ledger_report(
    settings: PostgresSettings, schedules: Mapping[str, Schedule], away: list[str], *, mode: Producers = "off"
) -> dict[str, Any]:
    """The parts by name; one that is not available is absent and named in ``away``. mode: this process's setting for
    unsigned records. Raises Retryable, Misconfigured when Postgres itself does not answer."""
    report: dict[str, Any] = {}
    with translated(f"Postgres at {address(settings)}"):
        connection = await connect_alone(settings, "status", within_seconds=CONNECT_SECONDS)
        async with connection:
            refused = await _refused(settings)
            if refused:
                away.append(refused)
            try:
                await _bounded(connection, "fence", lambda: fence.require(connection, "queries"))
                changed = await _bounded(connection, "keyword index", lambda: index_fence.fenced(connection))
                away += [f"the keyword index {known}: it is not searched until then" for known in changed]
                if not refused and await _bounded(connection, "rows by tenant", lambda: undivided(connection)):
                    away.append(UNDIVIDED)
            except Fenced as error:
                away.append(str(error))
            except PenstockError:  # the ledger of an older version: the other parts name the reason
                if not refused:
                    raise
            for name, query in _parts(connection, schedules, mode).items():
                try:
                    part = await _bounded(connection, name, query)
                except PenstockError as error:
                    if connection.closed:
                        raise
                    if not refused:  # otherwise that is the reason
                        away.append(str(error))
                    continue
                if part is not None:
                    report[name] = part
    return report


def address(settings: PostgresSettings) -> str:
    """The database's address without a password, for people."""
    parts = conninfo_to_dict(settings.dsn.get_secret_value())
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


async def _refused(settings: PostgresSettings) -> str | None:
    """The reason why this version cannot use the database's schema, if there is one."""
    try:
        await require_migrated(settings)
    except Misconfigured as error:
        return str(error)
    return None


async def undivided(connection: Connection) -> bool:
    """True: this login should see one tenant's rows only, and sees all (docs/upgrade.md)."""
    cursor = await connection.execute(
        "SELECT is_held_to_a_tenant() AND NOT relrowsecurity FROM pg_class WHERE oid = 'documents'::regclass"
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


async def _bounded(connection: Connection, name: str, query: Callable[[], Awaitable[Any]]) -> Any:
    """Run a query in a transaction of its own with a time limit in the server."""
    with translated(name.replace("_", " ")):
        async with connection.transaction():
            limit = f"{round(STATEMENT_SECONDS * 1000)}ms"
            await connection.execute("SELECT set_config('statement_timeout', %s, true)", [limit])
            return await query()


def _parts(
    connection: Connection, schedules: Mapping[str, Schedule], mode: Producers
) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "generations": lambda: _generations(connection),
        "pending": lambda: _pending(connection),
        "dead_letters": lambda: dead_letters(connection),
        "skipped": lambda: skipped.by_source(connection),
        "connectors": lambda: connectors(connection, schedules, with_next=True),
        "audit": lambda: _audit(connection),
        "embedding": lambda: _embedding(connection),
        "freshness": lambda: _freshness(connection),
        "producers": lambda: _producers(connection, mode),
        "webhooks": lambda: _webhooks(connection),
    }


async def _pending(connection: Connection) -> dict[str, Any]:
    return await pending(connection, await generations.active(connection))


async def _freshness(connection: Connection) -> dict[str, Any]:
    cursor = await connection.execute("SELECT clock_timestamp()")
    [now] = await cursor.fetchone() or (None,)
    assert isinstance(now, datetime)
    return await freshness_by_source(connection, await generations.active(connection), now)


async def canaries(connection: Connection) -> list[UUID]:
    """Canary documents, which are part of no total. They are read by index: they share one external id."""
    cursor = await connection.execute("SELECT id FROM overview_canaries")
    return [id_ for (id_,) in await cursor.fetchall()]


async def pending(connection: Connection, generation: Generation) -> dict[str, Any]:
    """Each store's pending documents of a generation, without canaries. ``more``: there are more than counted, and
    older ones may be among them."""
    excluded = await canaries(connection)
    backlog: dict[str, dict[str, Any]] = {}
    for store in ("vectors", "keywords"):
        cursor = await connection.execute(
            "SELECT count(*), count(*) FILTER (WHERE attempts > 0),"
            " extract(epoch FROM clock_timestamp() - min(pending_since))::float8"
            " FROM (SELECT attempts, pending_since FROM index_state WHERE seq < want_seq AND generation = %s"
            " AND store = %s AND document_id <> ALL(%s) ORDER BY next_at LIMIT %s) waiting",
            [generation.name, store, excluded, MAX_COUNTED + 1],
        )
        [documents, failing, oldest] = await cursor.fetchone() or (0, 0, None)
        backlog[store] = {
            "documents": min(documents, MAX_COUNTED),
            "failing": failing,
            "more": documents > MAX_COUNTED,
            "oldest_seconds": oldest,
        }
    return {**backlog, "oldest_seconds": max(store["oldest_seconds"] or 0.0 for store in backlog.values())}


async def _generations(connection: Connection) -> list[dict[str, Any]]:
    """The active generation first. ``filled`` of ``documents``: the progress of one that is being built."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            """
        SELECT g.name, g.state, g.model, g.dimensions, b.filled,
            (SELECT count(*) FROM (SELECT FROM index_state s WHERE s.generation = g.name AND s.seq < s.want_seq
                AND s.document_id <> ALL(%(canaries)s) LIMIT %(most)s) pending) AS waiting,
            CASE WHEN b.generation IS NOT NULL THEN (SELECT CASE WHEN few.n < %(most)s THEN few.n ELSE greatest(few.n,
                (SELECT reltuples FROM pg_class WHERE oid = 'documents'::regclass)::bigint) END
                FROM (SELECT count(*) AS n FROM (SELECT FROM overview_documents LIMIT %(most)s) d) few) END AS documents
        FROM generations g LEFT JOIN builds b ON b.generation = g.name AND g.state = 'building'
        WHERE g.state <> 'retired'
        ORDER BY g.state <> 'active', g.created_at DESC
        """,
            {"most": MAX_COUNTED_DOCUMENTS, "canaries": await canaries(connection)},
        )
        rows = await cursor.fetchall()
    columns = ("name", "state", "model", "dimensions", "filled", "documents", "waiting")
    return [{column: row[column] for column in columns} for row in rows]


async def dead_letters(connection: Connection) -> dict[str, Any]:
    """Open dead letters by stage and code; of more than MAX_COUNTED, the newest are counted."""
    cursor = await connection.execute(
        "SELECT stage, code, count(*), max(at) FROM"
        " (SELECT stage, code, at FROM overview_letters WHERE replayed_at IS NULL AND dismissed_at IS NULL"
        " ORDER BY at DESC LIMIT %s) waiting"
        " GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2",
        [MAX_COUNTED + 1],
    )
    by_code = [
        {"stage": stage, "code": code, "letters": letters, "newest_at": newest.isoformat()}
        for stage, code, letters, newest in await cursor.fetchall()
    ]
    waiting = sum(entry["letters"] for entry in by_code)
    return {"waiting": min(waiting, MAX_COUNTED), "more": waiting > MAX_COUNTED, "by_code": by_code}


async def divergence(connection: Connection) -> dict[str, Any]:
    """Unrepaired differences of the background audit. ``audited``: it has compared everything once."""
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
        "documents": sum(entry["documents"] for entry in by),
        "by": by,
        "age_seconds": await runs.age_seconds(connection),
        "round": None if under_way is None else {"documents": under_way.documents},
    }


async def holdings(connection: Connection, generation: Generation) -> str:
    """Documents and chunks without canaries: counted up to MAX_COUNTED, beyond it as the planner estimates them."""
    totals = []
    excluded = await canaries(connection)
    counting = {
        "documents": "SELECT (SELECT count(*) FROM overview_documents WHERE id = ANY(%(ours)s)),"
        " (SELECT count(*) FROM (SELECT FROM overview_documents LIMIT %(most)s) few)",
        "chunks": "SELECT of_ours, counted FROM overview_chunks(%(table)s, %(ours)s, %(most)s)",
    }
    for (what, statement), table in zip(counting.items(), ("documents", generation.chunk_table), strict=True):
        values = {"most": MAX_COUNTED + 1 + len(excluded), "table": table, "ours": excluded}
        cursor = await connection.execute(statement.encode(), values)
        canary_rows, counted = await cursor.fetchone() or (0, 0)
        cursor = await connection.execute(
            "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = to_regclass(%s)", [table]
        )
        [estimated] = await cursor.fetchone() or (0,)
        others = counted - canary_rows
        estimate = f"about {max(0, estimated - canary_rows):,} {what}"
        totals.append(f"{others:,} {what}" if others <= MAX_COUNTED else estimate)
    return ", ".join(totals) + (f"; and {len(excluded):,} canaries" if excluded else "")


async def _audit(connection: Connection) -> dict[str, Any]:
    """The last finished audit, and the differences of the background audit that nobody repaired."""
    cursor = await connection.execute(
        "SELECT r.generation, r.scope, r.finished_at, r.documents, (SELECT count(DISTINCT document_id)"
        " FROM audit_differences d WHERE d.run_id = r.id AND NOT d.repaired)"
        " FROM audit_runs r WHERE r.finished_at IS NOT NULL ORDER BY r.id DESC LIMIT 1"
    )
    row = await cursor.fetchone()
    differences = await divergence(connection)
    last = None
    if row is not None:
        generation, scope, finished_at, documents, differing = row
        last = {
            "generation": generation,
            "scope": scope,
            "finished_at": finished_at.isoformat(),
            "documents": documents,
            "differing": differing,
        }
    return {"last": last, "divergent_documents": differences["documents"], "by": differences["by"]}


async def _producers(connection: Connection, mode: Producers) -> dict[str, Any]:
    """mode: the setting of this process; the workers have their own."""
    cursor = await connection.execute(
        "SELECT (SELECT count(*) FROM producers WHERE valid_until IS NULL OR valid_until > now()),"
        " (SELECT count(*) FROM overview_letters WHERE code = ANY(%s) AND at > now() - interval '1 day')",
        [list(CODES)],
    )
    [(enrolled, refused)] = await cursor.fetchall()
    return {"mode": mode, "enrolled": enrolled, "refused_in_a_day": refused}


async def _webhooks(connection: Connection) -> list[dict[str, Any]]:
    """The receivers of webhooks, and how much waits for each: counted up to 10,000."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute("SELECT * FROM overview_webhooks ORDER BY webhook")
        return await cursor.fetchall()


async def _embedding(connection: Connection) -> list[dict[str, Any]]:
    """Today's (UTC) tokens and cost of embedding, by purpose."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            "SELECT purpose, tokens, cost FROM embedding_days"
            " WHERE day = (clock_timestamp() AT TIME ZONE 'UTC')::date ORDER BY purpose"
        )
        return await cursor.fetchall()
