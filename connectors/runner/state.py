"""State of one instance in Postgres, and its lease: an advisory lock, and an epoch that invalidates the predecessor's
writes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import TupleRow, class_row
from psycopg.types.json import Jsonb

from connectors.runner.rows import Holder, LeaseLost, Removed
from connectors.source import Cursor
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import fence
from pipeline.stores.postgres import Pool, connect_alone, translated
from pipeline.stores.stored_json import from_jsonb, to_jsonb

FullState = Literal["due", "running", "done"]


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """How far the source of an instance was read."""

    changes_cursor: Cursor | None
    full_cursor: Cursor | None
    full_state: FullState
    loaded_at: datetime | None
    """When a full read was first completed; None during the first load."""
    activities: Mapping[str, Mapping[str, Any]]
    """The statuses of the activities that the last runner wrote."""


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's command to a runner (``connector_asks``).

    Actions: load (complete the first load), full (read everything again), sweep, changes, groups, document (fetch the
    one whose external id is the argument), allow_mass_delete (a sweep that may delete many documents).
    """

    id: int
    action: str
    argument: str | None


class State:
    """The state of one instance, for the runner that holds its lease. Methods raise Retryable while Postgres cannot be
    reached; those that write raise LeaseLost."""

    def __init__(self, pool: Pool, holder: Holder) -> None:
        self._pool = pool
        self.holder = holder

    async def read_progress(self) -> ReadProgress:
        with translated("connectors"):
            async with (
                self._pool.connection() as connection,
                connection.cursor(row_factory=class_row(ReadProgress)) as cursor,
            ):
                await cursor.execute(
                    "SELECT changes_cursor, full_cursor, full_state, loaded_at, activities FROM connectors"
                    " WHERE tenant = %s AND source = %s",
                    self._me,
                )
                progress = await cursor.fetchone()
                if progress is None:
                    raise LeaseLost(f"connector {self.holder.source} was removed")
                return replace(
                    progress,
                    changes_cursor=from_jsonb(progress.changes_cursor),
                    full_cursor=from_jsonb(progress.full_cursor),
                )

    async def set_changes_cursor(self, cursor: Cursor | None) -> None:
        """Read changes from here on; None: the source has no log of changes."""
        await self._set("changes_cursor = %s", None if cursor is None else to_jsonb(dict(cursor)))

    async def set_full_state(self, state: FullState) -> None:
        """Set the state of the full read: due and running start it from the beginning, done completes it."""
        if state == "done":
            await self._set("full_state = 'done', full_cursor = NULL, loaded_at = coalesce(loaded_at, now())")
        else:
            await self._set("full_state = %s, full_cursor = NULL", state)

    async def set_guard(self, guard: Mapping[str, Any] | None) -> None:
        """Record the mass deletion that waits for an operator's confirmation; None removes it."""
        await self._set("guard = %s", None if guard is None else Jsonb(dict(guard)))

    async def save_reconciliation(self, outcome: Mapping[str, Any]) -> None:
        """Record a completed comparison with the ledger. outcome: small JSON, shown by `penstock status`."""
        await self._set("reconciliation = %s || jsonb_build_object('at', clock_timestamp())", Jsonb(dict(outcome)))

    async def heartbeat(
        self, activities: Mapping[str, Any], counts: Mapping[str, int], problems: Sequence[Mapping[str, str]]
    ) -> tuple[bool, list[Command]]:
        """Write the runner's status. Returns whether the instance is paused, and the commands that wait.

        counts: what was published since the last heartbeat.
        """
        with translated("connectors"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    """
                    UPDATE connectors SET activities = %s, problems = %s, seen_at = clock_timestamp(), counts = (
                        SELECT coalesce(jsonb_object_agg(kind, n), '{}') FROM (
                            SELECT kind, sum(n) AS n FROM (
                                SELECT key AS kind, value::bigint AS n FROM jsonb_each_text(counts)
                                UNION ALL SELECT key, value::bigint FROM jsonb_each_text(%s)
                            ) AS both_of_them GROUP BY kind
                        ) AS summed)
                    WHERE tenant = %s AND source = %s AND epoch = %s RETURNING paused
                    """,
                    [Jsonb(dict(activities)), Jsonb(list(problems)), Jsonb(dict(counts)), *self._me, self.holder.epoch],
                )
                row = await cursor.fetchone()
                if row is None:
                    raise LeaseLost(f"connector {self.holder.source} is run by another process now")
                cursor = await connection.execute(
                    "SELECT id, action, argument FROM connector_asks WHERE tenant = %s AND source = %s"
                    " AND done_at IS NULL ORDER BY id",
                    self._me,
                )
                return bool(row[0]), [Command(*command) for command in await cursor.fetchall()]

    async def mark_stopped(self) -> None:
        """Record that the runner stops in an orderly way, so that the instance shows as not running at once."""
        with translated("connectors"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "UPDATE connectors SET seen_at = NULL, worker = NULL, address = NULL"
                    " WHERE tenant = %s AND source = %s AND epoch = %s",
                    [*self._me, self.holder.epoch],
                )

    async def finish_commands(self, ids: Sequence[int], outcome: Mapping[str, Any]) -> None:
        with translated("connectors"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    "UPDATE connector_asks SET done_at = clock_timestamp(), outcome = %s WHERE id = ANY(%s)",
                    [Jsonb(dict(outcome)), list(ids)],
                )

    async def _set(self, assignments: LiteralString, *parameters: object) -> None:
        with translated("connectors"):
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    f"UPDATE connectors SET {assignments} WHERE tenant = %s AND source = %s AND epoch = %s",  # noqa: S608 — callers pass literals
                    [*parameters, *self._me, self.holder.epoch],
                )
                if not cursor.rowcount:
                    raise LeaseLost(f"connector {self.holder.source} is run by another process now")

    @property
    def _me(self) -> tuple[str, str]:
        return self.holder.tenant, self.holder.source


class PostgresMemory:
    """``connectors.source.Memory`` of one instance."""

    def __init__(self, pool: Pool, tenant: str, source: str) -> None:
        self._pool = pool
        self._me = (tenant, source)

    async def get(self, name: str) -> Any | None:
        with translated("connector_memory"):
            async with self._pool.connection() as connection:
                row = await (
                    await connection.execute(
                        "SELECT value FROM connector_memory WHERE tenant = %s AND source = %s AND name = %s",
                        [*self._me, name],
                    )
                ).fetchone()
                return None if row is None else from_jsonb(row[0])

    async def put(self, name: str, value: Any | None) -> None:
        with translated("connector_memory"):
            async with self._pool.connection() as connection:
                if value is None:
                    await connection.execute(
                        "DELETE FROM connector_memory WHERE tenant = %s AND source = %s AND name = %s",
                        [*self._me, name],
                    )
                else:
                    await connection.execute(
                        "INSERT INTO connector_memory VALUES (%s, %s, %s, %s) ON CONFLICT (tenant, source, name)"
                        " DO UPDATE SET value = EXCLUDED.value",
                        [*self._me, name, to_jsonb(value)],
                    )


class Lease:
    """The right to run an instance, held as long as its connection lives."""

    def __init__(self, connection: AsyncConnection[TupleRow], holder: Holder) -> None:
        self._connection = connection
        self.holder = holder

    async def check(self) -> None:
        """Raise Retryable when the session has ended, and the lock with it."""
        with translated("the connector's lease"):
            await self._connection.execute("SELECT 1")


@asynccontextmanager
async def lease(
    settings: PostgresSettings,
    tenant: str,
    source: str,
    kind: str,
    *,
    address: str | None = None,
    access_every_seconds: float | None = None,
) -> AsyncIterator[Lease | None]:
    """Take an instance over for as long as the context lasts; yields None if another process holds it.

    address: where its events arrive. access_every_seconds: the time between two complete reads of access rights. Raises
    Removed when an operator has removed the instance, and Retryable while Postgres cannot be reached or the ledger is
    fenced.
    """
    with translated("the connector's lease"):
        connection = await connect_alone(settings, "connector")
    try:
        with translated("the connector's lease"):
            await fence.require(connection, "intake")
            epoch = await _acquire(connection, tenant, source, kind, address, access_every_seconds)
        yield None if epoch is None else Lease(connection, Holder(tenant, source, epoch))
    finally:
        await connection.close()


async def _acquire(
    connection: AsyncConnection[TupleRow],
    tenant: str,
    source: str,
    kind: str,
    address: str | None,
    access_every_seconds: float | None,
) -> int | None:
    """Return the new epoch, or None if another process holds the lock."""
    cursor = await connection.execute("SELECT lead_connector(%s, %s)", [tenant, source])
    row = await cursor.fetchone()
    if row is None or not row[0]:
        return None
    cursor = await connection.execute(
        "INSERT INTO connectors AS mine (tenant, source, kind, epoch, worker, address, seen_at, access_every_seconds)"
        " VALUES (%s, %s, %s, 1, %s, %s, now(), %s) ON CONFLICT (tenant, source) DO UPDATE SET"
        " kind = EXCLUDED.kind, epoch = mine.epoch + 1, worker = EXCLUDED.worker, seen_at = now(),"
        " address = EXCLUDED.address, access_every_seconds = EXCLUDED.access_every_seconds"
        " WHERE mine.removed_at IS NULL RETURNING epoch",
        [tenant, source, kind, f"{socket.gethostname()}:{os.getpid()}", address, access_every_seconds],
    )
    row = await cursor.fetchone()
    if row is None:
        raise Removed(f"connector {source} was removed: `penstock connector resume {source}` starts it again")
    return int(row[0])
