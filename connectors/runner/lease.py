"""One runner an instance, over all processes: a session's advisory lock, and an epoch that outdates its predecessor."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from connectors.runner.rows import Holder, LeaseLost
from pipeline.settings import PostgresSettings
from pipeline.stores import fence
from pipeline.stores.postgres import translated

CLASS = 7_300_008
"""First half of the lock's two-part number: no other lock of ours has two parts."""


class Lease:
    def __init__(self, connection: AsyncConnection[TupleRow], holder: Holder) -> None:
        self._connection = connection
        self.holder = holder

    async def check(self) -> None:
        """Raises Retryable when the session is gone, and the lock with it."""
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
    """None: another process holds it. address: where its events come in. access_every_seconds: between two whole
    readings of access rights. Raises LeaseLost where an operator has removed the instance; Retryable while Postgres is
    away or the ledger is fenced."""
    with translated("the connector's lease"):
        connection = await AsyncConnection.connect(
            settings.dsn.get_secret_value(), autocommit=True, connect_timeout=10, application_name="penstock connector"
        )
    try:
        with translated("the connector's lease"):
            await fence.require(connection, "intake")
            epoch = await _taken(connection, tenant, source, kind, address, access_every_seconds)
        yield None if epoch is None else Lease(connection, Holder(tenant, source, epoch))
    finally:
        await connection.close()


async def _taken(
    connection: AsyncConnection[TupleRow],
    tenant: str,
    source: str,
    kind: str,
    address: str | None,
    access_every_seconds: float | None,
) -> int | None:
    cursor = await connection.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", [CLASS, f"{tenant}/{source}"])
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
        raise LeaseLost(f"connector {source} was removed: `penstock connector resume {source}` takes it up again")
    return int(row[0])
