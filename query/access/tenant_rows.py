"""Connections that show the rows of one tenant, and no others: the server's own condition, behind ours.

Where the login is one that is held to a tenant (a member of ``penstock_query``), a transaction that names none sees no
row of any. Whoever forgets the tenant in a statement, or here, finds nothing: docs/adr/0053-rows-by-tenant.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import sql
from psycopg.pq import TransactionStatus

from pipeline.stores.postgres import Connection, Pool
from query.access.callers import sayable

NO_TENANT = ""
"""For what is nobody's: generations, the state of an index."""

_OPEN = frozenset({TransactionStatus.INTRANS, TransactionStatus.INERROR})


@asynccontextmanager
async def rows_of(pool: Pool, tenant: str) -> AsyncIterator[Connection]:
    """A connection in one transaction, within which it shows this tenant's rows. What is written is there at the end.
    Raises PoolTimeout, psycopg.Error."""
    async with pool.connection() as connection:
        await connection.set_autocommit(True)  # else BEGIN would be a question of its own, to be waited for
        try:
            # As text: one message, which no prepared statement could be.
            await connection.execute(
                sql.SQL("BEGIN; SELECT set_config('penstock.tenant', {}, true)").format(_literal(tenant)), prepare=False
            )
            yield connection
            await connection.commit()
        finally:
            try:
                if connection.pgconn.transaction_status in _OPEN:
                    await connection.rollback()
            finally:  # also when this task is cancelled meanwhile
                if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                    await connection.set_autocommit(False)


async def see(connection: Connection, tenant: str) -> None:
    """To the end of the transaction that the connection is in, it shows this tenant's rows."""
    await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [_named(tenant)])


def _named(tenant: str) -> str:
    """A name that no message can carry is nobody's."""
    return tenant if sayable([tenant]) else ""


def _literal(tenant: str) -> sql.Literal:
    return sql.Literal(_named(tenant))
