"""The declared keys of metadata (``pipeline.core.metadata_keys``), and the terms of documents in the ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.core.metadata_keys import KeyType, terms
from pipeline.ledger.generations import keep_unchanged, lock_for_change
from pipeline.stores.postgres import Connection

Declared = Mapping[str, Mapping[str, KeyType]]
"""The declared keys with their types, by tenant."""

GRACE_SECONDS = 300.0
"""How long the sweeper leaves documents whose terms changed to their hints."""


@dataclass(frozen=True, slots=True)
class Key:
    """A declared key of one tenant."""

    tenant: str
    name: str
    type: KeyType
    declared_at: datetime


async def declared(connection: Connection, tenants: Collection[str]) -> dict[str, dict[str, KeyType]]:
    """The declared keys of these tenants, by tenant."""
    cursor = await connection.execute(
        "SELECT tenant, name, type FROM metadata_keys WHERE tenant = ANY(%s)", [sorted(tenants)]
    )
    keys: dict[str, dict[str, KeyType]] = {}
    for tenant, name, kind in await cursor.fetchall():
        keys.setdefault(tenant, {})[name] = kind
    return keys


async def list_keys(connection: Connection, tenant: str | None = None) -> list[Key]:
    """All declared keys, by tenant and name; tenant: of this one only."""
    cursor = await connection.execute(
        "SELECT tenant, name, type, declared_at FROM metadata_keys WHERE tenant = %(tenant)s OR %(tenant)s IS NULL"
        " ORDER BY tenant, name",
        {"tenant": tenant},
    )
    return [Key(*row) for row in await cursor.fetchall()]


async def declare(connection: Connection, tenant: str, name: str, kind: KeyType) -> None:
    """Declare a key, or give it another type. From the commit on every accepted document has its terms; ``refill``
    gives them to those that are there already."""
    async with connection.transaction():
        await _wait_for_detect(connection)
        await connection.execute(
            "INSERT INTO metadata_keys (tenant, name, type) VALUES (%s, %s, %s) ON CONFLICT (tenant, name)"
            " DO UPDATE SET type = excluded.type, declared_at = now()",
            [tenant, name, kind],
        )


async def remove(connection: Connection, tenant: str, name: str) -> bool:
    """Undeclare a key; False: it was not declared. ``refill`` takes its terms from the documents."""
    async with connection.transaction():
        await _wait_for_detect(connection)
        done = await connection.execute("DELETE FROM metadata_keys WHERE (tenant, name) = (%s, %s)", [tenant, name])
    return done.rowcount > 0


async def _wait_for_detect(connection: Connection) -> None:
    """Detect reads the keys under the shared lock: what it accepts later is accepted under the new ones."""
    await lock_for_change(connection)


@dataclass(frozen=True, slots=True)
class Changed:
    """A document whose terms changed, and which is pending in the keyword store therefore."""

    id: UUID
    source: str
    external_id: str
    generation: str
    """One of the generations that have to follow; the document stands in the list once for each."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of ``refill``. last: where to continue; None: there are no more documents."""

    last: UUID | None
    documents: int
    changed: list[Changed]


async def refill(connection: Connection, tenant: str, after: UUID | None, *, most: int = 500) -> Page:
    """Write the terms of the next documents of a tenant, in the order of their ids, where they are not those of the
    declared keys. Such documents become pending in the keyword store of every generation: their entries are written
    again, and nothing is embedded. Repeating it is harmless."""
    async with connection.transaction():
        await keep_unchanged(connection)
        keys = (await declared(connection, [tenant])).get(tenant, {})
        cursor = await connection.execute(
            "SELECT d.id, d.keys, b.metadata FROM documents d JOIN document_bodies b ON b.document_id = d.id"
            " WHERE d.id IN (SELECT id FROM documents WHERE tenant = %(tenant)s"
            "  AND (id > %(after)s OR %(after)s IS NULL) ORDER BY id LIMIT %(most)s)"
            " ORDER BY d.id FOR UPDATE OF d",
            {"tenant": tenant, "after": after, "most": most},
        )
        rows = await cursor.fetchall()
        expected = {id_: terms(metadata, keys) for id_, _, metadata in rows}
        differing = [id_ for id_, stored, _ in rows if stored != expected[id_]]
        if differing:
            await connection.cursor().executemany(
                "UPDATE documents SET keys = %s WHERE id = %s", [(expected[id_], id_) for id_ in differing]
            )
        last = await _last_of_page(connection, tenant, after, most)
        return Page(last, len(rows), await _want_entries_again(connection, differing) if differing else [])


async def _last_of_page(connection: Connection, tenant: str, after: UUID | None, most: int) -> UUID | None:
    cursor = await connection.execute(
        "SELECT id FROM documents WHERE tenant = %(tenant)s AND (id > %(after)s OR %(after)s IS NULL)"
        " ORDER BY id OFFSET %(most)s - 1 LIMIT 1",
        {"tenant": tenant, "after": after, "most": most},
    )
    row = await cursor.fetchone()
    return row[0] if row else None


async def _want_entries_again(connection: Connection, ids: list[UUID]) -> list[Changed]:
    """Make documents pending in the keyword store at new numbers. The caller has locked their rows."""
    parameters: dict[str, Any] = {"ids": ids, "grace": GRACE_SECONDS}
    await connection.execute(
        # The announcement stays: readers see no other text, title or access.
        "UPDATE documents d SET seq = drawn.seq,"
        " announced_seq = CASE WHEN d.announced_seq = d.seq THEN drawn.seq ELSE d.announced_seq END"
        " FROM (SELECT id, greatest(nextval('ledger_seq'), seq + 1) AS seq FROM documents"
        "  WHERE id = ANY(%(ids)s)) drawn WHERE d.id = drawn.id",
        parameters,
    )
    await connection.execute(  # in the order of the sinks
        "SELECT FROM index_state WHERE document_id = ANY(%(ids)s) AND store = 'keywords'"
        " ORDER BY generation, document_id FOR UPDATE",
        parameters,
    )
    cursor = await connection.execute(
        "UPDATE index_state s SET want_seq = d.seq, next_at = clock_timestamp() + make_interval(secs => %(grace)s),"
        " pending_since = CASE WHEN s.seq < s.want_seq THEN s.pending_since ELSE clock_timestamp() END,"
        " attempts = 0, error = NULL FROM documents d, generations g WHERE d.id = s.document_id"
        " AND g.name = s.generation AND g.state <> 'retired' AND s.document_id = ANY(%(ids)s)"
        " AND s.store = 'keywords' RETURNING d.id, d.source, d.external_id, s.generation",
        parameters,
    )
    return [Changed(*row) for row in await cursor.fetchall()]
