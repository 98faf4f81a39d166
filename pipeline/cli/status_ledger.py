"""What ``penstock status`` reads from the ledger: bounded questions, each in a transaction of its own, so that one that
fails or takes too long is absent and the others are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from connectors.declared import Declared
from pipeline.core.errors import Fenced, Misconfigured, PenstockError
from pipeline.core.producers import CODES
from pipeline.ledger import generations, skipped
from pipeline.settings import PostgresSettings, Producers
from pipeline.stores import fence, index_fence
from pipeline.stores.postgres import Connection, require_migrated, translated
from query import pipeline_parts as parts

CONNECT_SECONDS = 3
STATEMENT_SECONDS = 3.0
UNDIVIDED = (
    "rows are not divided by tenant: run `penstock migrate` when no query service of an older version is connected"
)
MOST = 100_000
"""Documents are counted no further: beyond, the planner's estimate is shown."""


async def look(
    settings: PostgresSettings, declared: Declared | None, away: list[str], *, mode: Producers = "off"
) -> dict[str, Any]:
    """Parts by name; one that cannot be told is absent and named in ``away``. Raises Retryable, Misconfigured when
    Postgres itself does not answer. mode: what becomes of unsigned records, as this process is told."""
    told: dict[str, Any] = {}
    with translated(f"Postgres at {address(settings)}"):
        connection: Connection = await psycopg.AsyncConnection.connect(
            settings.dsn.get_secret_value(), connect_timeout=CONNECT_SECONDS, application_name="penstock status",
            autocommit=True,
        )  # fmt: skip
        async with connection:
            refused = await _refused(settings)
            if refused:
                away.append(refused)
            try:
                await _asked(connection, "fence", lambda: fence.require(connection, "queries"))
                changed = await _asked(connection, "keyword index", lambda: index_fence.fenced(connection))
                away += [f"the keyword index {known}: it is not searched until then" for known in changed]
                if not refused and await _asked(connection, "rows by tenant", lambda: _undivided(connection)):
                    away.append(UNDIVIDED)
            except Fenced as error:
                away.append(str(error))
            except PenstockError:  # the ledger of a version before: the other parts say what is wrong
                if not refused:
                    raise
            for name, ask in _parts(connection, declared, mode).items():
                try:
                    found = await _asked(connection, name, ask)
                except PenstockError as error:
                    if connection.closed:
                        raise
                    if not refused:  # else that is why
                        away.append(str(error))
                    continue
                if found is not None:
                    told[name] = found
    return told


def address(settings: PostgresSettings) -> str:
    """For people: never with a password."""
    parts = conninfo_to_dict(settings.dsn.get_secret_value())
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


async def _refused(settings: PostgresSettings) -> str | None:
    """Why this version does not understand the database."""
    try:
        await require_migrated(settings)
    except Misconfigured as error:
        return str(error)
    return None


async def _undivided(connection: Connection) -> bool:
    """Whether this login should see one tenant's rows alone, and sees all (docs/upgrade.md)."""
    cursor = await connection.execute(
        "SELECT is_held_to_a_tenant() AND NOT relrowsecurity FROM pg_class WHERE oid = 'documents'::regclass"
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


async def _asked(connection: Connection, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
    with translated(name.replace("_", " ")):
        async with connection.transaction():
            limit = f"{round(STATEMENT_SECONDS * 1000)}ms"
            await connection.execute("SELECT set_config('statement_timeout', %s, true)", [limit])
            return await ask()


def _parts(
    connection: Connection, declared: Declared | None, mode: Producers
) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "generations": lambda: _generations(connection),
        "pending": lambda: _pending(connection),
        "dead_letters": lambda: parts.dead_letters(connection),
        "skipped": lambda: skipped.by_source(connection),
        "connectors": lambda: _connectors(connection, declared),
        "audit": lambda: _audit(connection),
        "embedding": lambda: _embedding(connection),
        "freshness": lambda: _freshness(connection),
        "producers": lambda: _producers(connection, mode),
    }


async def _pending(connection: Connection) -> dict[str, Any]:
    return await parts.pending(connection, await generations.active(connection))


async def _freshness(connection: Connection) -> dict[str, Any]:
    cursor = await connection.execute("SELECT clock_timestamp()")
    [now] = await cursor.fetchone() or (None,)
    assert isinstance(now, datetime)
    return await parts.fresh_by_source(connection, await generations.active(connection), now)


async def _generations(connection: Connection) -> list[dict[str, Any]]:
    """The active one first. ``filled`` of ``documents``: how far one that is being built has come."""
    cursor = await connection.execute(
        """
        SELECT g.name, g.state, g.model, g.dimensions, b.filled, b.filled_at IS NOT NULL,
            (SELECT count(*) FROM (SELECT FROM index_state s WHERE s.generation = g.name AND s.seq < s.want_seq
                AND s.document_id <> ALL(%(canaries)s) LIMIT %(most)s) waiting),
            CASE WHEN b.generation IS NOT NULL THEN (SELECT CASE WHEN few.n < %(most)s THEN few.n ELSE greatest(few.n,
                (SELECT reltuples FROM pg_class WHERE oid = 'documents'::regclass)::bigint) END
                FROM (SELECT count(*) AS n FROM (SELECT FROM overview_documents LIMIT %(most)s) d) few) END
        FROM generations g LEFT JOIN builds b ON b.generation = g.name AND g.state = 'building'
        WHERE g.state <> 'retired'
        ORDER BY g.state <> 'active', g.created_at DESC
        """,
        {"most": MOST, "canaries": await parts.canaries(connection)},
    )
    return [
        {
            "name": name, "state": state, "model": model, "dimensions": dimensions, "filled": filled,
            "documents": documents, "waiting": waiting,
        }
        for name, state, model, dimensions, filled, _, waiting, documents in await cursor.fetchall()
    ]  # fmt: skip


async def _connectors(connection: Connection, declared: Declared | None) -> list[dict[str, Any]]:
    """Those that need somebody first; and those that are declared and that nobody has run yet."""
    found = await parts.connectors(connection)
    cursor = await connection.execute("SELECT tenant, source, activities FROM connectors")
    activities = {(tenant, source): one for tenant, source, one in await cursor.fetchall()}
    plans = declared.plans if declared is not None else {}
    for one in found:
        plan = plans.get(one["source"])
        every = {"changes": plan.poll_seconds, "sweep": plan.sweep_seconds} if plan else {}
        one["next_at"] = _next(activities.get((one["tenant"], one["source"]), {}), every)
    known = {one["source"] for one in found}
    return found + [
        {
            "tenant": plan.tenant, "source": name, "kind": plan.kind, "state": "not running",
            "reason": "no runner has taken it up yet", "last_success_at": None, "last_sweep_at": None, "published": 0,
            "next_at": None,
        }
        for name, plan in plans.items() if name not in known
    ]  # fmt: skip


def _next(activities: Mapping[str, Mapping[str, Any]], every: Mapping[str, float]) -> str | None:
    """When its changes, or its sweep, are due; None: unknown, as where no file declares the connector here."""
    due = [
        datetime.fromisoformat(str(activities[name]["succeeded_at"])) + timedelta(seconds=seconds)
        for name, seconds in every.items()
        if activities.get(name, {}).get("succeeded_at")
    ]
    return min(due).isoformat() if due else None


async def _audit(connection: Connection) -> dict[str, Any]:
    """The last audit that came to its end, and what the background audit has found and nobody mended."""
    cursor = await connection.execute(
        "SELECT r.generation, r.scope, r.finished_at, r.documents, (SELECT count(DISTINCT document_id)"
        " FROM audit_differences d WHERE d.run_id = r.id AND NOT d.repaired)"
        " FROM audit_runs r WHERE r.finished_at IS NOT NULL ORDER BY r.id DESC LIMIT 1"
    )
    row = await cursor.fetchone()
    divergence = await parts.divergence(connection)
    last = None
    if row is not None:
        generation, scope, finished_at, documents, differing = row
        last = {
            "generation": generation, "scope": scope, "finished_at": finished_at.isoformat(), "documents": documents,
            "differing": differing,
        }  # fmt: skip
    return {"last": last, "divergent_documents": divergence["documents"], "by": divergence["by"]}


async def _producers(connection: Connection, mode: Producers) -> dict[str, Any]:
    """mode: as this process is told; the workers have their own settings."""
    cursor = await connection.execute(
        "SELECT (SELECT count(*) FROM producers WHERE valid_until IS NULL OR valid_until > now()),"
        " (SELECT count(*) FROM overview_letters WHERE code = ANY(%s) AND at > now() - interval '1 day')",
        [list(CODES)],
    )
    [(enrolled, refused)] = await cursor.fetchall()
    return {"mode": mode, "enrolled": enrolled, "refused_in_a_day": refused}


async def _embedding(connection: Connection) -> list[dict[str, Any]]:
    """What embedding has cost today (UTC), by purpose."""
    cursor = await connection.execute(
        "SELECT purpose, tokens, cost FROM embedding_days"
        " WHERE day = (clock_timestamp() AT TIME ZONE 'UTC')::date ORDER BY purpose"
    )
    return [{"purpose": purpose, "tokens": tokens, "cost": cost} for purpose, tokens, cost in await cursor.fetchall()]


def declared_here() -> Declared | None:
    """The connectors that the file here declares; None: there is none, or it cannot be read (`penstock connector list`
    says why)."""
    from connectors.declared import file_of, load

    if not file_of().is_file():
        return None
    try:
        return load()
    except Misconfigured:
        return None
