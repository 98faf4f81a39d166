"""Leader election with Postgres's advisory locks: one process at a time does what every replica could do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg.sql import SQL

from pipeline.stores.postgres import CANARY_LOCK, EVAL_LOCK, WEBHOOKS_LOCK, Connection


async def lead_transaction(connection: Connection, lock: int) -> bool:
    """Become the leader until the transaction ends; False: another process is the leader."""
    cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [lock])
    row = await cursor.fetchone()
    return bool(row and row[0])


_LEAD = {
    EVAL_LOCK: SQL("SELECT lead_query_service({})").format(EVAL_LOCK),
    CANARY_LOCK: SQL("SELECT lead_query_service({})").format(CANARY_LOCK),
    WEBHOOKS_LOCK: SQL("SELECT lead_webhooks()").format(),
}
"""By lock: the statements of processes whose logins may take no other (migration 0054)."""


async def lead_session(connection: Connection, lock: int) -> bool:
    """Become the leader until the connection is closed; False: another process is the leader."""
    cursor = await connection.execute(_LEAD.get(lock) or SQL("SELECT pg_try_advisory_lock({})").format(lock))
    row = await cursor.fetchone()
    return bool(row and row[0])


@asynccontextmanager
async def leading(connection: Connection, lock: int) -> AsyncIterator[bool]:
    """Yield whether this process is the leader, and resign at the end. No transaction may be open at the start; one
    that is open at the end is rolled back."""
    async with connection.transaction():
        is_leader = await lead_session(connection, lock)
    if not is_leader:
        yield False
        return
    try:
        yield True
    finally:
        if not connection.closed and not connection.broken:
            await connection.rollback()
            await connection.execute("SELECT pg_advisory_unlock(%s)", [lock])
            await connection.commit()
