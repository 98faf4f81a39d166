"""The pool of connections to Postgres after a cut connection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from connectors.runner.state import lease
from deploy.local.stack import Stack
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import Connection, Pool, connect_alone, open_pool
from query.access.tenant_rows import read_rows_of
from tests.support.space import PROJECT, Space

CONNECTIONS = 6
HALF_A_MINUTE = {"tcp_keepalives_count": 4, "tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5}


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
    assert options == HALF_A_MINUTE


async def test_the_lease_of_a_connector_whose_machine_vanished_is_free_after_half_a_minute(
    stack: Stack, tmp_path: Path
) -> None:
    """The process that stands by waited for two hours: the server did not notice that the other one was gone."""
    async with (
        Space.create(stack, tmp_path) as space,
        lease(space.settings.postgres, "acme", "wiki", "notes") as current,
    ):
        assert current is not None
        cursor = await current._connection.execute(
            "SELECT name, setting::int FROM pg_settings WHERE starts_with(name, 'tcp_keepalives') ORDER BY name"
        )
        assert dict(await cursor.fetchall()) == HALF_A_MINUTE
        ours = socket.socket(fileno=os.dup(current._connection.fileno()))
        with ours:
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_a_separate_connection_keeps_the_options_of_its_address(stack: Stack, tmp_path: Path) -> None:
    async with Space.create(stack, tmp_path) as space:
        dsn = make_conninfo(space.settings.postgres.dsn.get_secret_value(), options="-c search_path=other")
        async with await connect_alone(PostgresSettings(dsn=SecretStr(dsn)), "test") as connection:
            [shown] = await (await connection.execute("SHOW search_path")).fetchall()
    assert shown == ("other",)


def test_every_connection_to_postgres_is_the_pools_or_one_that_notices_a_vanished_end() -> None:
    known = {"pipeline/stores/postgres.py", "pipeline/trail.py"}  # the trail's has limits of its own
    opened = {
        str(file.relative_to(PROJECT))
        for package in ("pipeline", "query", "connectors", "canary", "cli")
        for file in (PROJECT / package).rglob("*.py")
        if "AsyncConnection.connect(" in file.read_text()
    }
    assert opened == known
