"""Connections on which Postgres shows only the rows of one tenant: row-level security, in addition to our conditions.

With a login that is a member of ``penstock_query``, a transaction that names no tenant sees no rows. A statement that
forgets the tenant therefore returns nothing: docs/adr/0053-rows-by-tenant.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from pipeline.stores.postgres import Connection, Pool
from query.access.callers import storable

NO_TENANT = ""
"""The tenant of rows that belong to none, such as generations and the state of an index."""

_IN_TRANSACTION = frozenset({TransactionStatus.INTRANS, TransactionStatus.INERROR})


@asynccontextmanager
async def rows_of(pool: Pool, tenant: str) -> AsyncIterator[Connection]:
    """A connection in one transaction that sees this tenant's rows; the transaction is committed at the end. Raises
    PoolTimeout and psycopg.Error."""
    async with pool.connection() as connection:
        await connection.set_autocommit(True)  # else BEGIN would be a round trip of its own
        try:
            # Two statements in one message, which a prepared statement cannot be.
            await connection.execute(
                sql.SQL("BEGIN; SELECT set_config('penstock.tenant', {}, true)").format(_literal(tenant)), prepare=False
            )
            yield connection
            await connection.commit()
        finally:
            try:
                if connection.pgconn.transaction_status in _IN_TRANSACTION:
                    await connection.rollback()
            finally:  # also when this task is cancelled meanwhile
                if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                    await connection.set_autocommit(False)


@asynccontextmanager
async def read_rows_of(pool: Pool, tenant: str) -> AsyncIterator[Connection]:
    """As ``rows_of``, for statements that only read: BEGIN and COMMIT are no messages of their own. Raises PoolTimeout
    and psycopg.Error.

    The statements are one pipeline, whose end ends their transaction: do not begin another pipeline, or a transaction,
    on the connection. Like any other transaction, each statement sees what is committed when it begins. A caller that
    gives up in the middle, or an error, costs the pool its connection, which is replaced.
    """
    async with pool.connection() as connection:
        await connection.set_autocommit(True)
        try:
            async with connection.pipeline():
                await set_tenant(connection, tenant)
                yield connection
        except (psycopg.Error, asyncio.CancelledError):
            await connection.close()  # psycopg takes for prepared what it sent after a statement that failed
            raise
        finally:  # also when this task is cancelled meanwhile
            if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                await connection.set_autocommit(False)


async def set_tenant(connection: Connection, tenant: str) -> None:
    """Let the connection see this tenant's rows until its current transaction ends."""
    await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [_named(tenant)])


def _named(tenant: str) -> str:
    """The tenant, or no tenant for a name that no message can contain."""
    return tenant if storable([tenant]) else ""


def _literal(tenant: str) -> sql.Literal:
    return sql.Literal(_named(tenant))
