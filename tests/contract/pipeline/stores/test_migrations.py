"""Migrations on a real Postgres that is in use, and which databases a version works on."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator

import psycopg
import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import postgres
from pipeline.stores.postgres import Migration, migrate, migration, require_migrated

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="function")]

NEXT = migration("9000_next", "ALTER TABLE documents ADD COLUMN next_tier text")


@pytest_asyncio.fixture
async def database(stack: Stack) -> AsyncIterator[PostgresSettings]:
    """Empty."""
    admin = json.loads((stack.home / "endpoints.json").read_text())["postgres"]["dsn"]
    name = f"m{secrets.token_hex(5)}"
    async with await psycopg.AsyncConnection.connect(admin, autocommit=True) as connection:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        yield PostgresSettings(dsn=SecretStr(make_conninfo(**{**conninfo_to_dict(admin), "dbname": name})))
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def execute(settings: PostgresSettings, statement: str) -> list[tuple[object, ...]]:
    dsn = settings.dsn.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(statement.encode())
        return await cursor.fetchall() if cursor.description else []


def with_next(monkeypatch: pytest.MonkeyPatch, *more: Migration) -> None:
    ours = postgres.migrations()
    monkeypatch.setattr(postgres, "migrations", lambda: [*ours, *more])


async def columns(settings: PostgresSettings) -> set[object]:
    rows = await execute(settings, "SELECT column_name FROM information_schema.columns WHERE table_name = 'documents'")
    return {name for (name,) in rows}


async def test_a_database_in_another_encoding_is_refused_before_anything_is_created(database: PostgresSettings) -> None:
    """As initdb makes one where no locale is set. It took every migration, and then no worker started."""
    given = conninfo_to_dict(database.dsn.get_secret_value())
    ascii_name = f"{given['dbname']}a"
    options = "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C'"
    await execute(database, f"CREATE DATABASE {ascii_name} {options}")
    refused = PostgresSettings(dsn=SecretStr(make_conninfo(**{**given, "dbname": ascii_name})))
    try:
        with pytest.raises(Misconfigured, match=f"the database {ascii_name} has the encoding SQL_ASCII: create one"):
            await migrate(refused)
        assert await columns(refused) == set()
    finally:
        await execute(database, f"DROP DATABASE {ascii_name} WITH (FORCE)")


async def test_a_database_that_lacks_a_migration_is_rejected_until_it_is_migrated(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Misconfigured, match=r"lacks migration 0001_ledger: run `penstock migrate`"):
        await require_migrated(database)
    await migrate(database)
    await require_migrated(database)
    with_next(monkeypatch, NEXT)
    with pytest.raises(Misconfigured, match=r"lacks migration 9000_next: run `penstock migrate`"):
        await require_migrated(database)
    assert await migrate(database) == ["9000_next"]
    await require_migrated(database)
    assert await migrate(database) == []


async def test_a_version_works_with_newer_additive_migrations_and_not_with_destructive_ones(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version is the older one here: only ``newer`` knows of the next migrations."""
    newest = postgres.migrations()[-1].name
    with monkeypatch.context() as newer:
        with_next(newer, NEXT, migration("9001_less", f"-- needs: {newest}\nDROP TABLE superseded"))
        assert await migrate(database) == [
            *(migration.name for migration in postgres.migrations() if migration.name < "9"),
            "9000_next",
            "9001_less",
        ]
    await require_migrated(database)  # it knows the migration from which on nobody uses that table
    assert await migrate(database) == []
    with monkeypatch.context() as newer:
        with_next(newer, NEXT, migration("9002_less", "-- needs: 9000_next\nDROP TABLE audit_differences"))
        assert await migrate(database) == ["9002_less"]
        await require_migrated(database)
    with pytest.raises(Misconfigured, match=r"taken away what this one uses \(migration 9002_less needs 9000_next\)"):
        await require_migrated(database)


async def test_a_database_without_the_needs_column_of_migrations_is_supported(
    database: PostgresSettings,
) -> None:
    await migrate(database)
    await execute(database, "ALTER TABLE schema_migrations DROP COLUMN needs")
    await require_migrated(database)
    assert await migrate(database) == []
    await require_migrated(database)


async def test_a_migration_waiting_for_a_table_lock_does_not_block_other_queries(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database)
    with_next(monkeypatch, NEXT)
    monkeypatch.setattr(postgres, "LOCK_PAUSE_SECONDS", 0.3)
    dsn = database.dsn.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn) as reader:
        await reader.execute("SELECT count(*) FROM documents")  # its transaction stays open
        migrating = asyncio.create_task(migrate(database))
        waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'documents'::regclass)"
        while not (await execute(database, waits))[0][0]:
            await asyncio.sleep(0.01)
        await execute(database, "SELECT count(*) FROM documents")  # comes behind the migration, and through
        assert not migrating.done(), "the reader still has the table"
        await reader.commit()
    assert await migrating == ["9000_next"]
    assert "next_tier" in await columns(database)


async def test_a_backup_does_not_block_a_migrate_with_nothing_to_do(database: PostgresSettings) -> None:
    await migrate(database)
    async with await psycopg.AsyncConnection.connect(database.dsn.get_secret_value()) as backup:
        await backup.execute("LOCK TABLE schema_migrations IN ACCESS SHARE MODE")  # as pg_dump does, to its very end
        async with asyncio.timeout(30):
            assert await migrate(database) == []


async def test_a_migrate_blocked_by_a_backup_gives_up_and_succeeds_later(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database)
    await execute(database, "ALTER TABLE schema_migrations DROP COLUMN needs")
    monkeypatch.setattr(postgres, "LOCK_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(postgres, "LOCK_ATTEMPTS", 3)
    async with await psycopg.AsyncConnection.connect(database.dsn.get_secret_value()) as backup:
        await backup.execute("LOCK TABLE schema_migrations IN ACCESS SHARE MODE")
        with pytest.raises(Retryable, match="migration schema_migrations cannot have a table for itself"):
            await migrate(database)
    assert await migrate(database) == []
    await require_migrated(database)


async def test_a_migration_that_gets_no_lock_gives_up_without_changes(
    database: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database)
    with_next(monkeypatch, NEXT)
    monkeypatch.setattr(postgres, "LOCK_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(postgres, "LOCK_ATTEMPTS", 3)
    async with await psycopg.AsyncConnection.connect(database.dsn.get_secret_value()) as reader:
        await reader.execute("SELECT count(*) FROM documents")
        with pytest.raises(Retryable, match="migration 9000_next cannot have a table for itself"):
            await migrate(database)
    assert "next_tier" not in await columns(database)
    assert await migrate(database) == ["9000_next"]
