"""Removing what only retired generations name: their rows, tables and indexes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, LiteralString
from uuid import UUID

from psycopg import sql

from pipeline.core.model import STORES, Generation
from pipeline.ledger import generations
from pipeline.ledger.builds import LOCK_WAIT
from pipeline.stores.postgres import Connection

CLEAR_ROWS = 1_000


async def uncleared(connection: Connection) -> list[Generation]:
    """Retired generations that still have rows, a table or an index."""
    cursor = await connection.execute("SELECT name FROM generations WHERE state = 'retired' AND cleared_at IS NULL")
    names = {name for (name,) in await cursor.fetchall()}
    return [g for g in await generations.every(connection) if g.name in names]


async def clear_rows(connection: Connection, retired: Generation) -> None:
    """Remove a retired generation's manifests and states, CLEAR_ROWS at a time. What it counted as written goes over
    to the active one, so that a document's count never falls. Repeats are harmless."""
    active = (await generations.active(connection)).name
    for store in STORES:
        names: dict[str, Any] = {"retired": retired.name, "active": active, "store": store, "limit": CLEAR_ROWS}
        after = UUID(int=0)
        while batch := await _batch(connection, "index_state", names | {"after": after}, "AND store = %(store)s"):
            async with connection.transaction():
                await connection.execute(_LOCK_HEIRS, names | {"ids": batch})
                await connection.execute(_BEQUEATH, names | {"ids": batch})
            after = batch[-1]
    after = UUID(int=0)
    names = {"retired": retired.name, "limit": CLEAR_ROWS}
    while batch := await _batch(connection, "manifests", names | {"after": after}):
        await connection.execute(
            "DELETE FROM manifests WHERE generation = %(retired)s AND document_id = ANY(%(ids)s)",
            names | {"ids": batch},
        )
        after = batch[-1]


async def _batch(
    connection: Connection,
    table: Literal["index_state", "manifests"],
    names: dict[str, Any],
    condition: LiteralString = "",
) -> list[UUID]:
    cursor = await connection.execute(
        f"SELECT document_id FROM {table} WHERE generation = %(retired)s AND document_id > %(after)s {condition}"  # noqa: S608 — callers hand literals
        " ORDER BY document_id LIMIT %(limit)s",
        names,
    )
    return [id_ for (id_,) in await cursor.fetchall()]


_LOCK_HEIRS = """
    SELECT FROM index_state WHERE generation = %(active)s AND store = %(store)s AND document_id = ANY(%(ids)s)
    ORDER BY document_id FOR UPDATE
"""
_BEQUEATH = """
    WITH gone AS (
        DELETE FROM index_state
        WHERE generation = %(retired)s AND store = %(store)s AND document_id = ANY(%(ids)s)
        RETURNING document_id, written
    )
    UPDATE index_state s SET written = s.written + gone.written FROM gone
    WHERE s.document_id = gone.document_id AND s.generation = %(active)s AND s.store = %(store)s AND gone.written > 0
"""


async def orphaned(connection: Connection, of: Collection[Generation]) -> tuple[set[str], set[str]]:
    """(tables, indexes) of these retired generations that no living one uses."""
    living = await generations.writable(connection)
    tables = {g.chunk_table for g in of} - {g.chunk_table for g in living}
    indexes = {g.keyword_index for g in of} - {g.keyword_index for g in living}
    return tables, indexes


async def drop_table(connection: Connection, table: str) -> None:
    """Remove a chunk table that nobody uses any more; a missing one is fine."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        await connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table)))


async def cleared(connection: Connection, retired: Generation) -> None:
    await connection.execute("UPDATE generations SET cleared_at = clock_timestamp() WHERE name = %s", [retired.name])
