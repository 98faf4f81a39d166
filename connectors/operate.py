"""What people do with connectors: ask a runner for something, pause it, see how it is. All through Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from psycopg.rows import class_row

from connectors.runner.plan import Plan
from connectors.uploads.options import UploadsQuota
from connectors.uploads.table import used_by
from pipeline.stores.postgres import Connection, Pool, translated

Action = Literal["load", "full", "sweep", "changes", "groups", "document", "allow_mass_delete"]
SILENT_SECONDS = 15.0
"""A runner gives a sign of life every second."""
SHOWN = 20
"""Documents with a problem that are named."""

Condition = Literal["removed", "not running", "paused", "needs attention", "waiting", "first load", "following"]


@dataclass(frozen=True, slots=True)
class Row:
    """One instance's row in ``connectors``; seconds since its last sign of life."""

    kind: str
    paused: bool
    full_state: str
    loaded_at: datetime | None
    guard: Mapping[str, Any] | None
    activities: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]
    problems: Sequence[Mapping[str, str]]
    worker: str | None
    address: str | None
    silent_seconds: float | None
    reconciliation: Mapping[str, Any] | None = None
    """The last comparison with the ledger: at, documents, principals, found (by kind), standing (not mended)."""
    removed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Condensed:
    """How an instance is. ``reason``: one line, where there is something to say."""

    name: str
    tenant: str
    kind: str
    state: Condition
    reason: str | None
    row: Row | None
    documents: int = 0
    """Published and not deleted."""
    unpublishable: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    """(external id, code, message) of at most SHOWN documents."""
    unpublishable_by_code: Mapping[str, int] = field(default_factory=dict)
    uploads: Mapping[str, Mapping[str, int]] | None = None
    """Of the kind uploads: what is in use, and the most that may be, of its tenant and of all."""

    @property
    def is_well(self) -> bool:
        return self.state in ("following", "first load", "paused", "removed") and not (self.row and self.row.guard)

    def json(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": self.name, "tenant": self.tenant, "kind": self.kind, "state": self.state, "reason": self.reason,
            "documents": self.documents, "loaded": bool(row and row.loaded_at), "guard": row and row.guard,
            "activities": dict(row.activities) if row else {}, "published": dict(row.counts) if row else {},
            "problems": list(row.problems) if row else [], "worker": row and row.worker,
            "reconciliation": row and row.reconciliation,
            "address": row.address if row and self.state not in ("not running",) else None,
            "uploads": self.uploads, "unpublishable": dict(self.unpublishable_by_code),
            "unpublishable_documents": [
                {"external_id": id_, "code": code, "message": message} for id_, code, message in self.unpublishable
            ],
        }  # fmt: skip


def condition(row: Row | None) -> tuple[Condition, str | None]:
    """The one word for how an instance is, worst first, and why. Pure."""
    if row is None:
        return "not running", "no runner has taken it up yet"
    if row.removed_at is not None:
        return "removed", None
    if row.silent_seconds is None or row.silent_seconds > SILENT_SECONDS:
        return "not running", "no sign of life: is `penstock worker connectors` running?"
    if row.paused:
        return "paused", None
    for wanted in ("needs attention", "waiting"):
        for name, one in row.activities.items():
            if one.get("state") == wanted:
                return wanted, f"{name}: {one.get('reason')}"
    if row.guard:
        return "following", f"{row.guard.get('missing')} of {row.guard.get('published')} documents look deleted"
    return ("following" if row.loaded_at else "first load"), None


async def look(pool: Pool, plan: Plan, *, closely: bool = False) -> Condensed:
    """closely: with documents counted and problems named."""
    me = (plan.tenant, plan.name)
    with translated("connectors"):
        async with pool.connection() as connection:
            async with connection.cursor(row_factory=class_row(Row)) as cursor:
                await cursor.execute(
                    "SELECT kind, paused, full_state, loaded_at, guard, activities, counts, problems,"
                    " reconciliation, worker, address, removed_at,"
                    " extract(epoch FROM clock_timestamp() - seen_at)::float AS silent_seconds"
                    " FROM connectors WHERE tenant = %s AND source = %s",
                    me,
                )
                row = await cursor.fetchone()
            state, reason = condition(row)
            found = Condensed(plan.name, plan.tenant, plan.kind, state, reason, row)
            if not closely:
                return found
            counted = await (
                await connection.execute(
                    "SELECT count(*) FROM connector_items WHERE tenant = %s AND source = %s AND version IS NOT NULL"
                    " AND NOT gone",
                    me,
                )
            ).fetchone()
            codes = await (
                await connection.execute(
                    "SELECT problem_code, count(*) FROM connector_items WHERE tenant = %s AND source = %s"
                    " AND problem_code IS NOT NULL GROUP BY 1 ORDER BY 1",
                    me,
                )
            ).fetchall()
            named = await (
                await connection.execute(
                    "SELECT external_id, problem_code, problem_message FROM connector_items WHERE tenant = %s"
                    " AND source = %s AND problem_code IS NOT NULL ORDER BY external_id LIMIT %s",
                    [*me, SHOWN],
                )
            ).fetchall()
            return Condensed(
                plan.name, plan.tenant, plan.kind, state, reason, row, counted[0] if counted else 0,
                [(id_, code, message or "") for id_, code, message in named], dict(codes),
                await _uploads(connection, plan) if plan.kind == "uploads" else None,
            )  # fmt: skip


async def _uploads(connection: Connection, plan: Plan) -> dict[str, dict[str, int]]:
    used, quota = await used_by(connection, plan.tenant), UploadsQuota.load()
    return {"used": asdict(used), "quota": quota.model_dump()}


async def pause(pool: Pool, plan: Plan, *, paused: bool) -> None:
    """A runner notices within about a second; one that starts later, at once. A removed one that goes on is taken up
    again."""
    with translated("connectors"):
        async with pool.connection() as connection:
            await connection.execute(
                "INSERT INTO connectors (tenant, source, kind, paused) VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (tenant, source) DO UPDATE SET paused = EXCLUDED.paused,"
                " removed_at = CASE WHEN EXCLUDED.paused THEN connectors.removed_at END",
                [plan.tenant, plan.name, plan.kind, paused],
            )


async def ask(pool: Pool, plan: Plan, action: Action, argument: str | None = None) -> int:
    """Returns the number under which the outcome will stand. The instance's row must exist."""
    with translated("connector_asks"):
        async with pool.connection() as connection:
            row = await (
                await connection.execute(
                    "INSERT INTO connector_asks (tenant, source, action, argument) VALUES (%s, %s, %s, %s)"
                    " RETURNING id",
                    [plan.tenant, plan.name, action, argument],
                )
            ).fetchone()
            assert row is not None
            return int(row[0])


async def outcome(pool: Pool, number: int) -> Mapping[str, Any] | None:
    """What came of it; None: it is not done yet."""
    with translated("connector_asks"):
        async with pool.connection() as connection:
            row = await (
                await connection.execute("SELECT outcome FROM connector_asks WHERE id = %s", [number])
            ).fetchone()
            return row[0] if row else {"error": "the connector was removed"}


async def withdraw(pool: Pool, number: int) -> None:
    """Whoever asked has gone: nobody needs an outcome. What has begun ends by itself."""
    with translated("connector_asks"):
        async with pool.connection() as connection:
            await connection.execute("DELETE FROM connector_asks WHERE id = %s AND done_at IS NULL", [number])
