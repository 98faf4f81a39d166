"""What the connectors' own tables say of a document and of the source that it comes from. Their rows are read, never
written: each is one runner's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from psycopg.errors import InsufficientPrivilege

from pipeline.ledger.story_origin import INGESTED, Published, Source
from pipeline.stores.postgres import Connection

SHOWN = 10
"""Connectors that do not follow their source, of a document that nobody knows."""

_SOURCES = (
    "SELECT tenant, source, kind, paused OR removed_at IS NOT NULL, loaded_at IS NOT NULL, guard, activities,"
    " extract(epoch FROM clock_timestamp() - seen_at)::float8 FROM connectors WHERE tenant = %s"
)


async def source(connection: Connection, tenant: str, name: str, external_ids: Sequence[str]) -> Source | None:
    """The connector of this name, with the row of the first of these documents that it has one of; of what `penstock
    ingest` speaks for, its row alone. None: none runs under this name (a publisher of one's own), and none is known."""
    cursor = await connection.execute(f"{_SOURCES} AND source = %s".encode(), [tenant, name])
    row = await cursor.fetchone()
    if row is None:
        item = await _item(connection, tenant, name, external_ids) if name == INGESTED else None
        return Source(tenant, name, "ingest", False, True, None, {}, None, item=item) if item is not None else None
    return replace(
        Source(*row),
        cursor=await _cursor(connection, tenant, name),
        item=await _item(connection, tenant, name, external_ids),
    )


async def of_external_id(connection: Connection, tenant: str, external_ids: Sequence[str]) -> list[tuple[str, str]]:
    """(source, external id) of the connectors' documents with one of these ids, whether they were published or not."""
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT source, external_id FROM connector_items WHERE tenant = %(tenant)s AND (external_id ="
                " ANY(%(ids)s) OR source || '/' || external_id = ANY(%(ids)s)) ORDER BY 1, 2 LIMIT 20",
                {"tenant": tenant, "ids": list(external_ids)},
            )
            return [(name, external_id) for name, external_id in await cursor.fetchall()]
    except InsufficientPrivilege:  # a role of one's own: its story is told without the connectors' rows
        return []


async def not_following(connection: Connection, tenant: str) -> tuple[Source, ...]:
    """The tenant's connectors that do not follow their source at present."""
    cursor = await connection.execute(f"{_SOURCES} ORDER BY source LIMIT 500".encode(), [tenant])
    found = [Source(*row) for row in await cursor.fetchall()]
    return tuple(one for one in found if one.state != "following")[:SHOWN]


async def superseded(connection: Connection, document: UUID) -> tuple[int, ...]:
    """Versions that are kept although they lost, the oldest observation first."""
    cursor = await connection.execute(
        "SELECT version FROM superseded WHERE document_id = %s ORDER BY observed_at", [document]
    )
    return tuple(version for (version,) in await cursor.fetchall())


async def memberships(
    connection: Connection, tenant: str, principals: Sequence[str]
) -> tuple[tuple[str, str, Any], ...]:
    """(source, principal, observed_at) of what is known of these people's groups."""
    cursor = await connection.execute(
        "SELECT source, principal, observed_at FROM memberships WHERE tenant = %s AND principal = ANY(%s)"
        " ORDER BY 1, 2",
        [tenant, list(principals)],
    )
    return tuple((name, principal, at) for name, principal, at in await cursor.fetchall())


async def _cursor(connection: Connection, tenant: str, name: str) -> object | None:
    """Only the connectors' own role, and the owner, may see it."""
    try:
        async with connection.transaction():
            found = await connection.execute(
                "SELECT coalesce(full_cursor, changes_cursor) FROM connectors WHERE tenant = %s AND source = %s",
                [tenant, name],
            )
            row = await found.fetchone()
            return row[0] if row else None
    except InsufficientPrivilege:
        return None


async def _item(connection: Connection, tenant: str, name: str, external_ids: Sequence[str]) -> Published | None:
    try:
        async with connection.transaction():
            cursor = await connection.execute(
                "SELECT external_id, version, gone, problem_code, problem_message, content_at, access_at,"
                " greatest(swept_at, 'epoch'), difference, difference_at, in_doubt_since, unlisted_since"
                " FROM connector_items WHERE tenant = %s AND source = %s AND external_id = ANY(%s)"
                " ORDER BY array_position(%s::text[], external_id::text) LIMIT 1",
                [tenant, name, list(external_ids), list(external_ids)],
            )
            row = await cursor.fetchone()
            return Published(*row) if row else None
    except InsufficientPrivilege:
        return None
