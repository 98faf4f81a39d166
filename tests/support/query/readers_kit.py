"""Another team, as Postgres knows it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import psycopg
from pgvector.psycopg import register_vector_async
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pipeline.stores.postgres import Connection
from tests.support.query.library import Library
from tests.support.space import PROJECT


def example() -> ModuleType:
    """Return examples/reader.py as a module."""
    spec = spec_from_file_location("reader", PROJECT / "examples" / "reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def another_team(library: Library) -> AsyncIterator[Connection]:
    """Logged in as a member of penstock_reader, over the wire, by password."""
    name, password = f"team_{secrets.token_hex(4)}", secrets.token_hex(8)
    await library.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' IN ROLE penstock_reader")
    dsn = make_conninfo(
        **{**conninfo_to_dict(library.settings.postgres.dsn.get_secret_value()), "user": name, "password": password}
    )
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await register_vector_async(connection)
            yield connection
    finally:
        await library.execute(f"DROP ROLE {name}")
