"""The pool of connections to Postgres after a cut connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest

from deploy.local.stack import Stack
from pipeline.stores.postgres import Connection, Pool, open_pool
from query.access.tenant_rows import read_rows_of
from tests.support.space import Space

CONNECTIONS = 6


@pytest.mark.parametrize("of", [Pool.connection, partial(read_rows_of, tenant="acme")])
async def test_after_one_dead_connection_the_pool_gives_out_no_other_dead_one(
    stack: Stack, tmp_path: Path, of: Callable[[Pool], AbstractAsyncContextManager[Connection]]
) -> None:
    """Found by the fault suite: each dead connection of a pool cost a breaker's trial, and and
    work stood still for two minutes after a cut of half a second."""
    async with Space.create(stack, tmp_path) as space, open_pool(space.settings.postgres) as pool:
        async with AsyncExitStack() as together:
            for _ in range(CONNECTIONS):
                await together.enter_async_context(pool.connection())
        assert pool.get_stats()["pool_available"] == CONNECTIONS
        await space.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.2)
        with pytest.raises(psycopg.OperationalError):
            async with of(pool) as connection:
                await connection.execute("SELECT 1")
        for _ in range(CONNECTIONS):
            async with of(pool) as connection:
                await connection.execute("SELECT 1")


async def test_tcp_keepalives_end_a_vanished_client_after_half_a_minute(stack: Stack, tmp_path: Path) -> None:
    """Found in review: a machine that vanished held the canaries' lock, and the sweeper's, for two hours."""
    async with (
        Space.create(stack, tmp_path) as space,
        open_pool(space.settings.postgres) as pool,
        pool.connection() as connection,
    ):
        cursor = await connection.execute(
            "SELECT name, setting::int FROM pg_settings WHERE starts_with(name, 'tcp_keepalives') ORDER BY name"
        )
        options = dict(await cursor.fetchall())
    assert options == {"tcp_keepalives_count": 4, "tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5}
