"""Read your writes: waiting until a caller can see in both stores what was published.

What is reported depends only on what the caller may read. A document that it may not read is like one that was never
published: its content and its access stay pending, and it counts as deleted. So a token reveals nothing about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from time import perf_counter
from typing import Any
from uuid import UUID

from pipeline.core.publication import Publication, is_reached
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, identify
from query.model import AtLeast

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 0.5
"""Between two looks at the ledger: each pause is half as long again as the one before."""
PART = 500
"""The most changes that are looked at again while one of them is pending: looking at the 10,000 of the largest token
takes a processor for 60 ms. The first look and the last are about all."""


_VISIBLE = """
    SELECT d.id, d.version, d.access_observed_at, d.deleted_floor, NOT EXISTS (
        SELECT FROM index_state s JOIN generations g ON g.name = s.generation AND g.state = 'active'
        WHERE s.document_id = d.id AND s.seq < s.want_seq
    )
    FROM unnest(%(documents)s::uuid[]) AS p (id)
    CROSS JOIN LATERAL (
        SELECT id, tenant, access_id, version, access_observed_at, deleted_floor FROM documents d
        WHERE d.id = p.id AND d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL OFFSET 0
    ) d
    CROSS JOIN LATERAL (
        SELECT tenant, acl_tags, required_tags FROM access_sets WHERE id = d.access_id OFFSET 0
    ) a
    WHERE a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
"""


async def pending(
    connection: Connection, caller: Caller, publications: Collection[Publication]
) -> tuple[Publication, ...]:
    """The changes that this caller cannot see in both stores of the active generation."""
    # By their bytes: the hash of a UUID has no key, and 10,000 with the same one keep the event loop for seconds.
    documents = {publication.document_id.bytes: publication.document_id for publication in publications}
    cursor = await connection.execute(
        _VISIBLE,
        {
            "documents": list(documents.values()),
            "tenant": caller.tenant,
            "tags": sorted(caller.tags),
        },
    )
    visible: dict[UUID, tuple[Any, ...]] = {row[0]: row[1:] for row in await cursor.fetchall()}
    return tuple(p for p in publications if not _is_seen(p, visible.get(p.document_id)))


def _is_seen(publication: Publication, row: tuple[Any, ...] | None) -> bool:
    """row: of a document that the caller may read."""
    if row is None:
        return publication.kind == "deletion"
    version, access_observed_at, deleted_floor, is_settled = row
    return is_settled and is_reached(
        publication, version=version, access_observed_at=access_observed_at, deleted_floor=deleted_floor
    )


async def wait_for(
    connect: Callable[[], AbstractAsyncContextManager[Connection]],
    publications: Sequence[Publication],
    tenant: str,
    *,
    principals: Sequence[str],
    tags: Sequence[str],
    seconds: float,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AtLeast:
    """Wait until the caller can see the changes, at most ``seconds``. Its access is read anew at each look.

    connect: opens a connection that sees the tenant's rows, for one look; what it raises is raised. pause: returns
    after so many seconds; what it raises is raised.
    """
    began = perf_counter()

    async def look(changes: Collection[Publication]) -> tuple[Publication, ...]:
        async with connect() as connection:
            caller = await identify(connection, tenant, principals=principals, tags=tags)
            return await pending(connection, caller, changes)

    remaining = await look(publications)
    length = FIRST_PAUSE_SECONDS
    while remaining and (left := began + seconds - perf_counter()) > 0:
        await pause(min(length, left))
        part, rest = await look(remaining[:PART]), remaining[PART:]
        if rest and (not part or left <= length):
            rest = await look(rest)
        remaining = (*part, *rest)
        length = min(1.5 * length, LAST_PAUSE_SECONDS)
    return AtLeast(len(publications), len(remaining), 1000 * (perf_counter() - began))
