"""Every stored field is compared: the oracle's list is complete, and a wrong value in any field is found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from deploy.local.stack import Stack
from tests.faults.bench import Bench
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
    "jsonb": "CASE jsonb_typeof({0}) WHEN 'array' THEN {0} || '[[]]' ELSE {0} || '{{\"x\": 1}}' END",
}
"""Type of a column → an expression of another value than it has."""


@pytest.fixture
async def bench(stack: Stack) -> AsyncIterator[Bench]:
    async with Bench.create(stack) as bench:
        bench.tenant = TENANT
        await bench.library.put(WRITTEN)
        yield bench


async def check(bench: Bench) -> None:
    count = bench.embeddings.count_tokens
    await assert_equal(bench, [WRITTEN], vector=bench.embeddings.vector, count_tokens=count)


async def columns(bench: Bench, table: str) -> dict[str, str]:
    """Column → its type."""
    name = bench.library.generation.chunk_table if table == "chunks" else table
    rows = await bench.query(
        "SELECT column_name, CASE data_type WHEN 'ARRAY' THEN udt_name ELSE data_type END"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s",
        name,
    )
    return dict(rows)


async def mapped_fields(bench: Bench) -> set[str]:
    index = bench.library.generation.keyword_index
    answer = await bench.library.es.indices.get_mapping(index=index)
    return set(answer[index]["mappings"]["properties"])


async def test_every_column_and_mapped_field_is_listed_as_compared_or_not_compared(bench: Bench) -> None:
    stored = {table: set(await columns(bench, table)) for table in COMPARED if table != "keywords"}
    stored["keywords"] = await mapped_fields(bench)
    decided = {table: {*COMPARED[table], *NOT_COMPARED[table]} for table in COMPARED}
    assert stored == decided, "say in tests/support/pipeline/oracle.py how the new field is compared, or why it is not"
    assert all(not {*COMPARED[table]} & {*NOT_COMPARED[table]} for table in COMPARED)


async def test_the_oracle_detects_a_wrong_value_in_any_compared_column(bench: Bench) -> None:
    await check(bench)
    missed = []
    for table in COMPARED:
        for column, type_ in (await columns(bench, table)).items():
            if column in NOT_COMPARED[table] and column != "embedding":
                continue
            if not await _detects_change(bench, table, column, type_):
                missed.append(f"{table}.{column}")
    assert not missed
    await check(bench)


async def _detects_change(bench: Bench, table: str, column: str, type_: str) -> bool:
    """Whether a changed value is noticed. Afterwards everything is as before."""
    name = bench.library.generation.chunk_table if table == "chunks" else table
    value = (
        "subvector(embedding, 2, 63) || subvector(embedding, 1, 1)"
        if column == "embedding"
        else ANOTHER[type_].format(column)
    )
    dsn = bench.settings.postgres.dsn.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("SET session_replication_role = replica")  # references may dangle
        await connection.execute(f"CREATE TEMPORARY TABLE before AS TABLE {name}".encode())
        await connection.execute(f"UPDATE {name} SET {column} = {value}".encode())
        try:
            await check(bench)
        except AssertionError:
            return True
        finally:
            await connection.execute(f"DELETE FROM {name}".encode())
            await connection.execute(f"INSERT INTO {name} OVERRIDING SYSTEM VALUE TABLE before".encode())
    return False


async def test_the_oracle_detects_a_wrong_value_in_any_field_of_a_keyword_entry(bench: Bench) -> None:
    es, index = bench.library.es, bench.library.generation.keyword_index
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
    for field in sorted(await mapped_fields(bench)):
        for body in (
            entry["_source"] | {field: _changed_value(field, entry["_source"][field])},
            _without_field(entry, field),
        ):
            await write(body)
            try:
                await check(bench)
            except AssertionError:
                continue
            missed.append(field)
    await write(entry["_source"])
    await check(bench)
    assert not missed


def _changed_value(field: str, value: Any) -> Any:
    if field == "source_modified_at":
        return "2026-03-04T06:00:00+00:00"
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
