"""Postgres behind something that holds connections open and passes nothing on: a pooler that hangs, a stopped server.
TCP notices nothing of it, because every packet is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import postgres
from pipeline.stores.postgres import Connection, Pool, open_pool, permit_long
from query.access.tenant_rows import read_rows_of, rows_of
from tests.faults.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.space import Space

pytestmark = pytest.mark.stack


@pytest.fixture
async def behind(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Pool, TcpProxy]]:
    """A pool whose connections are closed after a wait of two seconds, and what they go through."""
    monkeypatch.setattr(postgres, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 2)
    async with Space.create(stack, tmp_path) as space:
        dsn = space.settings.postgres.dsn.get_secret_value()
        parts = conninfo_to_dict(dsn)
        async with tcp_proxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
            settings = PostgresSettings(
                dsn=make_conninfo(**{**parts, "host": "127.0.0.1", "port": proxy.listening}),  # type: ignore[arg-type]
                statement_timeout_seconds=1.0,
                pool_max_size=4,
            )
            async with open_pool(settings) as pool:
                yield pool, proxy


@pytest.mark.parametrize("of", [Pool.connection, partial(rows_of, tenant="acme"), partial(read_rows_of, tenant="acme")])
async def test_a_connection_on_which_nothing_arrives_is_closed_and_replaced(
    behind: tuple[Pool, TcpProxy], of: Callable[[Pool], AbstractAsyncContextManager[Connection]]
) -> None:
    """A worker waited for ever, and its partitions with it."""
    pool, proxy = behind

    async def read(number: int) -> list[tuple[int]]:
        async with of(pool) as connection:
            if number == 1:
                proxy.strand()
            cursor = await connection.execute("SELECT %s::int", [number])
            return await cursor.fetchall()

    async with asyncio.timeout(60):
        with pytest.raises(psycopg.OperationalError):
            await read(1)
        assert await read(2) == [(2,)]


async def test_a_caller_that_gives_up_while_nothing_arrives_ends_with_its_own_timeout(
    behind: tuple[Pool, TcpProxy],
) -> None:
    pool, _ = behind
    async with pool.connection() as connection:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await connection.execute("SELECT pg_sleep(0.9)")
        await connection.rollback()
        assert not connection.closed  # the statement was cancelled in the server
    assert await _one(pool) == 1


async def test_a_copy_that_stands_still_is_ended(behind: tuple[Pool, TcpProxy]) -> None:
    pool, proxy = behind

    async def read() -> None:
        rows = b"COPY (SELECT repeat('x', 1000) FROM generate_series(1, 50000)) TO STDOUT"
        async with pool.connection() as connection, connection.cursor() as cursor, cursor.copy(rows) as copy:
            await copy.read()
            proxy.strand()
            async for _ in copy:
                pass

    async with asyncio.timeout(60):
        with pytest.raises(psycopg.OperationalError):
            await read()
        assert await _one(pool) == 1


async def test_notifications_are_waited_for_without_limit(behind: tuple[Pool, TcpProxy]) -> None:
    pool, _ = behind
    async with pool.connection() as connection, pool.connection() as other:
        await connection.set_autocommit(True)
        await connection.execute("LISTEN news")

        async def next_one() -> str:
            async for notify in connection.notifies():
                return notify.payload
            raise AssertionError

        waiting = asyncio.create_task(next_one())
        await asyncio.sleep(3)
        await other.execute("SELECT pg_notify('news', 'late')")
        await other.commit()
        assert await waiting == "late"
        await connection.execute("UNLISTEN news")
        await connection.set_autocommit(False)


async def test_a_pool_whose_new_connections_fell_silent_makes_others(behind: tuple[Pool, TcpProxy]) -> None:
    """Each of the pool's three makers of connections waited for the first answer on one, and none was made any more."""
    pool, proxy = behind
    await _one(pool)
    before = proxy.returned_bytes
    await pool.drain()
    waiting = [asyncio.create_task(_one(pool)) for _ in range(4)]
    while proxy.returned_bytes == before:  # the first bytes of a new connection
        await asyncio.sleep(0)
    proxy.strand()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting, return_exceptions=True)
        while await _is_failing(pool):
            await asyncio.sleep(0.2)


async def _is_failing(pool: Pool) -> bool:
    try:
        return await _one(pool) != 1
    except psycopg.Error:
        return True


async def _one(pool: Pool) -> int:
    async with pool.connection(timeout=10) as connection:
        row = await (await connection.execute("SELECT 1")).fetchone()
    assert row is not None
    return int(row[0])


async def test_a_slow_answer_that_keeps_arriving_and_a_long_statement_that_is_permitted_are_waited_for(
    behind: tuple[Pool, TcpProxy],
) -> None:
    pool, proxy = behind
    async with pool.connection() as connection:
        await permit_long(connection)
        await connection.execute("SELECT pg_sleep(3)")
    async with pool.connection() as connection:
        cursor = connection.cursor()
        await connection.execute("CREATE TEMPORARY TABLE numbers (n int)")
        proxy.delay_seconds = 0.3
        await cursor.executemany(b"INSERT INTO numbers SELECT %s FROM pg_sleep(0.3)", [[n] for n in range(12)])
        proxy.delay_seconds = 0.0
        row = await (await connection.execute("SELECT count(*) FROM numbers")).fetchone()
    assert row == (12,)
