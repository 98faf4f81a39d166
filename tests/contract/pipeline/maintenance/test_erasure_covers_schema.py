"""`penstock forget` covers every table of the real schema that has a tenant or holds personal data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, LiteralString, NamedTuple
from uuid import uuid4

import pytest
import pytest_asyncio
from psycopg import AsyncConnection, sql

from deploy.local.stack import Stack
from pipeline.ledger.personal import CHUNKS, PLACES, Place, Scope, erase
from tests.support.query.library import Library, WordEmbedder

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

NOT_ERASED_WITH_TENANT = {
    "documents": "erased document by document; the emptied row remains, so that the deletion holds",
    "access_sets": "erased by erase_access_sets, when no document uses the set",
    "connectors": "emptied with each source; the row of a removed connector remains",
    "trail.records": "erased by age only; receipts of `forget` name its records",
}
"""Tables with a tenant and personal columns whose rows remain after the tenant's statements, and the reason."""
CASCADES = "a foreign key deletes its rows"
WITHOUT_TENANT_COLUMN = {
    "document_bodies": "document",
    "superseded": "document",
    "manifests": "document",
    "audit_differences": "document",
    "dead_letter_trail": "tenant",
    "eval_judgements": CASCADES,
}
"""Tables with personal columns and no tenant of their own, and the subject whose erasure covers them."""
NOT_ABOUT_ONE_PERSON = {
    "manifests": "headings of documents",
    "audit_differences": "external ids of documents",
    "connectors": "cursors and problems of a source",
    "connector_asks": "external ids of documents",
    "connector_memory": "what a source remembers",
    "eval_judgements": "external ids of documents",
    "webhook_deliveries": "external ids of documents",
}
"""Tables with personal columns that `forget person` and `export` do not read, and what they hold instead."""
KEPT_ALTHOUGH_EXPORTED = {
    "access_sets": "erased by erase_access_sets",
    "connector_items": "erased with the document",
    "uploads": "erased with the document",
    "trail.records": "erased by age only",
}
"""Tables that `export` reads for a person and whose rows `forget person` leaves to something else."""
ERASED_ALTHOUGH_NOT_EXPORTED = {"dead_letter_trail": "who dismissed a dead letter, an operator"}
PERSON_COLUMNS = ("author", "principal", "principals", "member", "members", "giver", "caller", "actor", "dismissed_by")
"""Names that columns with a person have in this schema."""


class Column(NamedTuple):
    table: str
    name: str
    type: str
    required: bool
    """Whether an insert has to give a value."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


async def columns(library: Library) -> dict[str, list[Column]]:
    """The columns of each table of the product; partitions belong to their table."""
    rows = await library.execute(
        "SELECT CASE table_schema WHEN 'public' THEN '' ELSE table_schema || '.' END || table_name, column_name,"
        " CASE data_type WHEN 'ARRAY' THEN udt_name WHEN 'USER-DEFINED' THEN udt_name ELSE data_type END,"
        " is_nullable = 'NO' AND column_default IS NULL AND is_identity = 'NO' AND is_generated = 'NEVER'"
        " FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)"
        " JOIN pg_class c ON c.oid = (quote_ident(table_schema) || '.' || quote_ident(table_name))::regclass"
        " WHERE table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'"
        " AND NOT c.relispartition ORDER BY 1, ordinal_position"
    )
    results: dict[str, list[Column]] = {}
    for row in rows:
        results.setdefault(row[0], []).append(Column(*row))
    assert len(results) >= 40
    return results


def place_of(table: str) -> Place:
    if table.startswith("chunks_"):
        return CHUNKS
    return next(place for place in PLACES if place.table == table)


async def test_every_table_with_personal_data_is_erased_with_its_tenant(library: Library) -> None:
    for table, of in (await columns(library)).items():
        place = place_of(table)
        if not place.personal or place is CHUNKS:  # chunk tables are erased by name in erase()
            continue
        has_tenant = "tenant" in {column.name for column in of}
        if table in NOT_ERASED_WITH_TENANT:
            assert has_tenant, table
            assert "tenant" not in place.erase, f"{table} is erased: take it out of NOT_ERASED_WITH_TENANT"
        elif has_tenant:
            assert "tenant" in place.erase, f"`forget tenant` leaves the rows of {table}"
        else:
            by = WITHOUT_TENANT_COLUMN.get(table)
            assert by is not None, f"nobody has decided how the rows of {table} are erased with their tenant"
            if by != CASCADES:
                assert by in place.erase, f"{table} has no statement for {by}"
                continue
            [(cascades,)] = await library.execute(
                "SELECT count(*) FROM pg_constraint"
                " WHERE conrelid = %s::regclass AND contype = 'f' AND confdeltype = 'c'",
                table,
            )
            assert cascades, f"the rows of {table} do not go with those that they refer to"


async def test_every_table_with_personal_data_is_read_and_erased_for_a_person_or_says_why_not(library: Library) -> None:
    for table, of in (await columns(library)).items():
        place = place_of(table)
        named = {column.name for column in of}.intersection(PERSON_COLUMNS)
        assert named <= set(place.personal.split()), f"{table} lists a person's column as free of personal data"
        if not place.personal or place is CHUNKS:
            continue
        if table in NOT_ABOUT_ONE_PERSON:
            assert not named, f"{table} has a column of persons: {named}"
            assert "person" not in place.erase, table
            assert place.of_person is None, table
            continue
        if table not in ERASED_ALTHOUGH_NOT_EXPORTED:
            assert place.of_person is not None, f"`export` does not read {table}"
        if table not in KEPT_ALTHOUGH_EXPORTED:
            assert "person" in place.erase, f"`forget person` leaves the rows of {table}"


async def test_a_row_planted_in_every_table_with_a_tenant_is_gone_after_its_erasure(library: Library) -> None:
    """Rows are made from the types of the real columns, so that a new table takes part without being named here."""
    tenant, other = f"t{uuid4().hex[:8]}", f"t{uuid4().hex[:8]}"
    tables = {
        table: of
        for table, of in (await columns(library)).items()
        if any(column.name == "tenant" for column in of)
        and not table.startswith("trail.")
        and place_of(table) is not CHUNKS  # their rows are erased with their documents
    }
    async with library.pool.connection() as connection, connection.transaction(force_rollback=True):
        await connection.execute("SET LOCAL session_replication_role = replica")  # rows without those they refer to
        for table, of in tables.items():
            for owner in (tenant, other):
                await plant(connection, table, of, owner)
                assert await rows(connection, table, owner) == 1, table
        erased = await erase(connection, "tenant", Scope(tenant=tenant))
        left = {table for table in tables if await rows(connection, table, tenant)}
        assert left.isdisjoint(erased)
        for table in left:
            place = place_of(table)
            assert not place.personal or table in NOT_ERASED_WITH_TENANT, f"`forget tenant` leaves rows of {table}"
        assert tables.keys() - left >= {"memberships", "uploads", "conversation_pairs", "answer_reviews", "query_use"}
        for table in tables:
            assert await rows(connection, table, other) == 1, f"another tenant's row of {table} was erased"


CHOSEN: dict[tuple[str, str], str] = {
    ("answer_feedback", "verdict"): "up",
    ("answer_feedback", "answer_id"): "00000000-0000-0000-0000-000000000001",
    ("connector_differences", "subject"): "document",
    ("metadata_keys", "type"): "keyword",
    ("conflicts", "kind"): "number",
    ("conflicts", "older"): "a",
    ("conflict_decisions", "state"): "dismissed",
    ("query_use", "span"): "day",
}
"""Values that a constraint of the table demands."""
VALUES: dict[str, Any] = {
    "_text": ["x"],
    "bytea": b"x",
    "boolean": False,
    "date": "2026-01-01",
    "jsonb": "{}",
    "_uuid": ["00000000-0000-0000-0000-000000000001"],
    "timestamp with time zone": "2026-01-01T00:00:00Z",
}
"""A value of each type; others are numbers, and texts and ids are drawn."""


async def plant(connection: AsyncConnection[Any], table: str, of: list[Column], tenant: str) -> None:
    row: dict[str, Any] = {"tenant": tenant}
    for _, name, type_, required in of:
        if (table, name) in CHOSEN:
            row[name] = CHOSEN[table, name]
        elif required and name != "tenant":
            unique = {"uuid": str(uuid4()), "text": f"x{uuid4().hex[:8]}", "name": f"x{uuid4().hex[:8]}"}
            row[name] = unique.get(type_, VALUES.get(type_, 1))
    await connection.execute(
        sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, row)),
            sql.SQL(", ").join(sql.Placeholder() for _ in row),
        ),
        list(row.values()),
    )


async def rows(connection: AsyncConnection[Any], table: str, tenant: str) -> int:
    statement: LiteralString = "SELECT count(*) FROM {} WHERE tenant = %s"
    cursor = await connection.execute(sql.SQL(statement).format(sql.Identifier(table)), [tenant])
    [[count]] = await cursor.fetchall()
    return int(count)
