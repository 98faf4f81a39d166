"""The status of instances, commands to running ones (pause, sweep and others), and ``penstock connector check``."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from psycopg.rows import class_row

from connectors.faults import foreign
from connectors.protocol import Problem
from connectors.runner.activity import explained
from connectors.runner.plan import Plan
from connectors.runner.state import PostgresMemory
from connectors.source import CREDENTIAL, Context
from connectors.uploads.options import UploadsQuota
from connectors.uploads.store import usage_of
from pipeline.core import publication
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.publication import MAX_PUBLICATIONS, Publication, PublicationKind
from pipeline.diagnosis.connector_status import State as Condition
from pipeline.diagnosis.connector_status import connector_state
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import Connection, Pool, open_pool, translated

Action = Literal["load", "full", "sweep", "changes", "groups", "document", "allow_mass_delete"]
MAX_NAMED_DOCUMENTS = 20
"""Documents with a problem that a summary names."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instance's row in ``connectors``."""

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
    """Since the last heartbeat."""
    reconciliation: Mapping[str, Any] | None = None
    """The last comparison with the ledger: at, documents, principals, found (differences by kind), standing (those that
    a repair has not removed)."""
    removed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The status of an instance. ``reason`` explains the state in one line, where that is needed."""

    name: str
    tenant: str
    kind: str
    state: Condition
    reason: str | None
    row: Row | None
    documents: int = 0
    """Published and not deleted."""
    unpublishable: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    """(external id, code, message) of at most MAX_NAMED_DOCUMENTS documents."""
    unpublishable_by_code: Mapping[str, int] = field(default_factory=dict)
    uploads: Mapping[str, Mapping[str, int]] | None = None
    """For the kind uploads: the use of the tenant and of all tenants, and their quotas."""

    @property
    def is_well(self) -> bool:
        return self.state in ("following", "first load", "paused", "removed") and not (self.row and self.row.guard)

    def json(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": self.name,
            "tenant": self.tenant,
            "kind": self.kind,
            "state": self.state,
            "reason": self.reason,
            "documents": self.documents,
            "loaded": bool(row and row.loaded_at),
            "guard": row and row.guard,
            "activities": dict(row.activities) if row else {},
            "published": dict(row.counts) if row else {},
            "problems": list(row.problems) if row else [],
            "worker": row and row.worker,
            "reconciliation": row and row.reconciliation,
            "address": row.address if row and self.state not in ("not running",) else None,
            "uploads": self.uploads,
            "unpublishable": dict(self.unpublishable_by_code),
            "unpublishable_documents": [
                {"external_id": id_, "code": code, "message": message} for id_, code, message in self.unpublishable
            ],
        }


def condition(row: Row | None) -> tuple[Condition, str | None]:
    """The state of an instance and the reason for it, as `status`, the page and `why` show it."""
    if row is None:
        return "not running", "no worker has started it yet"
    return connector_state(
        paused=row.paused,
        loaded=row.loaded_at is not None,
        guard=row.guard,
        activities=row.activities,
        silent_seconds=row.silent_seconds,
        removed=row.removed_at is not None,
    )


async def summarize(pool: Pool, plan: Plan, *, with_documents: bool = False) -> Summary:
    """Read the status of an instance. with_documents: count its documents, and name those with a problem."""
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
            if not with_documents:
                return Summary(plan.name, plan.tenant, plan.kind, state, reason, row)
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
                    [*me, MAX_NAMED_DOCUMENTS],
                )
            ).fetchall()
            return Summary(
                plan.name,
                plan.tenant,
                plan.kind,
                state,
                reason,
                row,
                counted[0] if counted else 0,
                [(id_, code, message or "") for id_, code, message in named],
                dict(codes),
                await _uploads(connection, plan) if plan.kind == "uploads" else None,
            )


async def _uploads(connection: Connection, plan: Plan) -> dict[str, dict[str, int]]:
    used, quota = await usage_of(connection, plan.tenant), UploadsQuota.load()
    return {"used": asdict(used), "quota": quota.model_dump()}


async def pause(pool: Pool, plan: Plan, *, paused: bool) -> None:
    """Pause or resume an instance. A runner notices within about a second, one that starts later at once. Resuming a
    removed instance makes runners take it up again."""
    with translated("connectors"):
        async with pool.connection() as connection:
            await connection.execute(
                "INSERT INTO connectors (tenant, source, kind, paused) VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (tenant, source) DO UPDATE SET paused = EXCLUDED.paused,"
                " removed_at = CASE WHEN EXCLUDED.paused THEN connectors.removed_at END",
                [plan.tenant, plan.name, plan.kind, paused],
            )


async def send_command(pool: Pool, plan: Plan, action: Action, argument: str | None = None) -> int:
    """Send a command to an instance, whose row must exist. Returns the command's id."""
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


async def command_outcome(pool: Pool, number: int) -> Mapping[str, Any] | None:
    """Return the outcome of a command, or None while it is not done."""
    with translated("connector_asks"):
        async with pool.connection() as connection:
            row = await (
                await connection.execute("SELECT outcome FROM connector_asks WHERE id = %s", [number])
            ).fetchone()
            return row[0] if row else {"error": "the connector was removed"}


_UNAPPLIED = """
    SELECT p.document_id, p.kind, p.observed_at, p.version FROM connector_publications p
    WHERE p.tenant = %s AND p.source = %s AND NOT EXISTS (
        SELECT FROM connector_publications d WHERE d.tenant = p.tenant AND d.source = p.source
            AND d.document_id = p.document_id AND d.kind = 'deletion' AND p.kind <> d.kind
            AND p.observed_at <= d.observed_at
    ) LIMIT %s
"""
"""A deleted document is waited for by its deletion alone: its text will never be seen."""


async def unapplied_token(pool: Pool, plan: Plan) -> str | None:
    """Name everything that an instance has published and that may not be in both stores yet, for searches that wait
    until they see it. None if that is more than a token names, or was recorded before there were versions."""
    with translated("connector_publications"):
        async with pool.connection() as connection:
            cursor = await connection.execute(_UNAPPLIED, [plan.tenant, plan.name, MAX_PUBLICATIONS + 1])
            rows = await cursor.fetchall()
    if len(rows) > MAX_PUBLICATIONS or any(kind == "content" and version is None for _, kind, _, version in rows):
        return None
    return publication.token(_publication(*row) for row in rows)


def _publication(id_: UUID, kind: PublicationKind, observed_at: datetime, version: int) -> Publication:
    match kind:
        case "content":
            return publication.content(id_, version)
        case "access":
            return publication.access(id_, observed_at)
        case "deletion":
            return publication.deletion(id_, observed_at)


async def cancel_command(pool: Pool, number: int) -> None:
    """Delete a command that is not done, because nobody waits for its outcome. A run that has begun ends by itself."""
    with translated("connector_asks"):
        async with pool.connection() as connection:
            await connection.execute("DELETE FROM connector_asks WHERE id = %s AND done_at IS NULL", [number])


CHECK_SECONDS = 60.0
CODES: Mapping[type[Exception], str] = {Misconfigured: "misconfigured", Retryable: "unavailable"}
"""The code of a problem by the error of a check."""


class TemporaryMemory:
    """A ``Memory`` for the duration of a check."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    async def get(self, name: str) -> Any | None:
        return self._values.get(name)

    async def put(self, name: str, value: Any | None) -> None:
        self._values[name] = value


class CheckMemory(TemporaryMemory):
    """A temporary memory, except for a credential that replaces one of the settings. If a check used the one of the
    settings, or lost the one that it receives, the instance would lose its access."""

    def __init__(self, postgres: PostgresSettings, plan: Plan) -> None:
        super().__init__()
        self._postgres, self._plan = postgres, plan

    async def get(self, name: str) -> Any | None:
        if name != CREDENTIAL:
            return await super().get(name)
        async with open_pool(self._postgres) as pool:
            return await PostgresMemory(pool, self._plan.tenant, self._plan.name).get(name)

    async def put(self, name: str, value: Any | None) -> None:
        if name != CREDENTIAL:
            await super().put(name, value)
            return
        async with open_pool(self._postgres) as pool:
            await PostgresMemory(pool, self._plan.tenant, self._plan.name).put(name, value)


async def check_all(
    plans: Sequence[Plan],
    events_url: str | None,
    postgres: PostgresSettings,
    *,
    on_fault: Callable[[BaseException], None] = lambda _error: None,
) -> dict[str, list[Problem]]:
    """Check all plans concurrently. Returns the problems by name; an error of a source is a problem, too. postgres: is
    connected to only for sources that store a credential. on_fault: receives each error of a source's own code."""
    results = await asyncio.gather(*(_check(plan, events_url, postgres, on_fault) for plan in plans))
    return {plan.name: problems for plan, problems in zip(plans, results, strict=True)}


async def _check(
    plan: Plan, events_url: str | None, postgres: PostgresSettings, on_fault: Callable[[BaseException], None]
) -> list[Problem]:
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        context = Context(
            name=plan.name,
            tenant=plan.tenant,
            memory=CheckMemory(postgres, plan),
            folder=Path(folder),
            events_url=plan.events_url(events_url),
        )
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                source = plan.make(context)
                try:
                    return list(await source.check())
                finally:
                    await source.close()
        except TimeoutError:
            return [Problem(plan.name, "no_answer", f"it did not answer within {CHECK_SECONDS:.0f} s")]
        except Exception as error:  # noqa: BLE001 # a source is foreign code
            if (fault := foreign(error)) is not None:
                on_fault(fault)
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), "fault")
            return [Problem(plan.name, code, explained(error))]
