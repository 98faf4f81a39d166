"""The oracle compares every stored field, and detects a wrong value in any of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from deploy.local.stack import Stack
from tests.faults.stores import Stores
from tests.support.pipeline.oracle import COMPARED, NOT_COMPARED, assert_equal
from tests.support.query.library import document

TENANT = "acme"
WRITTEN = document(
    "guide.md",
    "# Guide\n\nThe heron waits.\n\n## Ticket REF-1001\n\nIt is seen in src/heron.py, says ERR_HERON_LATE.",
    title="The guide",
    author="ann",
    source_url="https://wiki.example.com/guide",
    required_tags=["nda"],
    source_modified_at=datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC),
    metadata={"space": "birds", "labels": ["a", "b"]},
)

ANOTHER = {
    "uuid": "'00000000-0000-4000-8000-000000000001'::uuid",
    "text": "{} || 'x'",
    "bigint": "{} + 1",
    "timestamp with time zone": "coalesce({} + interval '1 second', now())",
    "bytea": "sha256({})",
    "_text": "{} || 'x/other'::text",
    "_uuid": "{} || '00000000-0000-4000-8000-000000000001'::uuid",
    "_int4": "{} || 1",
    "bit": "~{}",
    "jsonb": "CASE jsonb_typeof({0}) WHEN 'array' THEN {0} || '[[]]' ELSE {0} || '{{\"x\": 1}}' END",
}
"""By type of a column: an expression for a value that differs from the present one."""


@pytest.fixture
async def stores(stack: Stack) -> AsyncIterator[Stores]:
    async with Stores.create(stack) as stores:
        stores.tenant = TENANT
        await stores.library.put(WRITTEN)
        yield stores


async def check(stores: Stores) -> None:
    count = stores.embeddings.count_tokens
    await assert_equal(stores, [WRITTEN], vector=stores.embeddings.vector, count_tokens=count)


async def columns(stores: Stores, table: str) -> dict[str, str]:
    """Return the types of the columns of a table."""
    name = stores.library.generation.chunk_table if table == "chunks" else table
    rows = await stores.query(
        "SELECT column_name, CASE data_type WHEN 'ARRAY' THEN udt_name ELSE data_type END"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s",
        name,
    )
    return dict(rows)


async def mapped_fields(stores: Stores) -> set[str]:
    index = stores.library.generation.keyword_index
    answer = await stores.library.es.indices.get_mapping(index=index)
    return set(answer[index]["mappings"]["properties"])


async def test_every_column_and_mapped_field_is_listed_as_compared_or_not_compared(stores: Stores) -> None:
    stored = {table: set(await columns(stores, table)) for table in COMPARED if table != "keywords"}
    stored["keywords"] = await mapped_fields(stores)
    decided = {table: {*COMPARED[table], *NOT_COMPARED[table]} for table in COMPARED}
    assert stored == decided, "say in tests/support/pipeline/oracle.py how the new field is compared, or why it is not"
    assert all(not {*COMPARED[table]} & {*NOT_COMPARED[table]} for table in COMPARED)


async def test_the_oracle_detects_a_wrong_value_in_any_compared_column(stores: Stores) -> None:
    await check(stores)
    missed = []
    for table in COMPARED:
        for column, type_ in (await columns(stores, table)).items():
            if column in NOT_COMPARED[table] and column not in ("embedding", "sketch"):
                continue
            if not await _detects_change(stores, table, column, type_):
                missed.append(f"{table}.{column}")
    assert not missed
    await check(stores)


async def _detects_change(stores: Stores, table: str, column: str, type_: str) -> bool:
    """Whether a changed value is detected. The change is reverted afterwards."""
    name = stores.library.generation.chunk_table if table == "chunks" else table
    value = (
        "subvector(embedding, 2, 63) || subvector(embedding, 1, 1)"
        if column == "embedding"
        else ANOTHER[type_].format(column)
    )
    dsn = stores.settings.postgres.dsn.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("SET session_replication_role = replica")  # references may dangle
        await connection.execute(f"CREATE TEMPORARY TABLE before AS TABLE {name}".encode())
        await connection.execute(f"UPDATE {name} SET {column} = {value}".encode())
        try:
            await check(stores)
        except AssertionError:
            return True
        finally:
            await connection.execute(f"DELETE FROM {name}".encode())
            await connection.execute(f"INSERT INTO {name} OVERRIDING SYSTEM VALUE TABLE before".encode())
    return False


async def test_the_oracle_detects_a_wrong_value_in_any_field_of_a_keyword_entry(stores: Stores) -> None:
    es, index = stores.library.es, stores.library.generation.keyword_index
    [entry, *_] = (await es.search(index=index, size=1, version=True))["hits"]["hits"]

    async def write(body: dict[str, Any]) -> None:
        await es.index(
            index=index,
            id=entry["_id"],
            document=body,
            version=entry["_version"],
            version_type="external_gte",
            refresh=True,
        )

    missed = []
    for field in sorted(await mapped_fields(stores)):
        changed = [entry["_source"] | {field: _changed_value(field, entry["_source"].get(field, []))}]
        for body in [*changed, _without_field(entry, field)] if field in entry["_source"] else changed:
            await write(body)
            try:
                await check(stores)
            except AssertionError:
                continue
            missed.append(field)
    await write(entry["_source"])
    await check(stores)
    assert not missed


def _changed_value(field: str, value: Any) -> Any:
    if field == "source_modified_at":
        return "2026-03-04T06:00:00+00:00"
    if field == "analysed":
        return {"german": {"text": "x"}}
    match value:
        case list():
            return [*value, "other"]
        case dict():
            return {**value, "other": "x"}
        case int():
            return value + 1
    return f"{value}x"


def _without_field(entry: Any, field: str) -> dict[str, Any]:
    return {name: value for name, value in entry["_source"].items() if name != field}
