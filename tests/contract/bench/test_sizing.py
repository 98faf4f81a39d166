"""The measurement of sizes, on a real Postgres: it leaves the database as it was."""

from __future__ import annotations

import psycopg
import pytest
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection

from bench.sizing import tables
from tests.support.query.library import Library

pytestmark = pytest.mark.stack

RELATIONS = """
    SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname NOT LIKE 'pg_%'
"""


async def relations(connection: AsyncConnection[tuple[str]]) -> set[str]:
    return {name for (name,) in await (await connection.execute(RELATIONS)).fetchall()}


async def test_measuring_the_sizes_of_tables_leaves_no_table_view_or_index(library: Library) -> None:
    async with await psycopg.AsyncConnection.connect(
        library.settings.postgres.dsn.get_secret_value(), autocommit=True
    ) as connection:
        await register_vector_async(connection)
        before = await relations(connection)
        measured = await tables(connection, {384: 200})
        assert measured["384"]["row_bytes"] > 0
        assert await relations(connection) - before == set()
