"""Documents as their readers may see them, from the ledger, now.

Whether a caller may read is decided in the same statement that reads: what may not be read and what does not exist take
the same way, and the same answer comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.core.addresses import openable
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, readable

FACET_DOCUMENTS = 20_000
"""Readable documents that facets are gathered from, at most …"""
FACET_DOCUMENTS_A_SET = 200
"""… and of one access set. A set belongs to one source (tags do), and the sources take turns: one with a hundred
thousand sets does not hide another."""
FACET_VALUES = 50


@dataclass(frozen=True, slots=True)
class Document:
    document_id: UUID
    external_id: str
    source: str
    title: str
    source_url: str | None
    author: str | None
    media_type: str | None
    source_modified_at: datetime | None
    text: str
    """Normalised, whole, in reading order."""

    def __post_init__(self) -> None:
        """Rows may be older than the check at intake."""
        object.__setattr__(self, "source_url", openable(self.source_url))


_MAY_READ = """
    FROM documents d JOIN access_sets a ON a.id = d.access_id
    WHERE d.id = %(id)s AND d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
      AND a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
"""


async def read(connection: Connection, caller: Caller, document: UUID) -> Document | None:
    """None: there is none, or none that this caller may read. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, d.author, d.media_type,"  # noqa: S608 — constants of this module
        " d.source_modified_at, coalesce((SELECT text FROM document_bodies b WHERE b.document_id = d.id), '')"
        + _MAY_READ,
        _values(caller, document),
    )
    row = await cursor.fetchone()
    return Document(*row) if row else None


async def may_read(connection: Connection, caller: Caller, document: UUID) -> bool:
    """Raises psycopg.Error."""
    cursor = await connection.execute("SELECT true" + _MAY_READ, _values(caller, document))
    return await cursor.fetchone() is not None


def _values(caller: Caller, document: UUID) -> dict[str, object]:
    return {"id": document, "tenant": caller.tenant, "tags": sorted(caller.tags)}


@dataclass(frozen=True, slots=True)
class Facets:
    """What there is to narrow a search to, of what the caller may read; the most frequent first."""

    sources: list[str]
    authors: list[str]
    media_types: list[str]


_FACETS = """
    WITH sampled AS MATERIALIZED (
        SELECT d.source, d.author, d.media_type
        FROM (
            SELECT id, row_number() OVER (PARTITION BY split_part(acl_tags[1], '/', 1) ORDER BY id) AS turn
            FROM access_sets WHERE id = ANY(%(ids)s::bigint[]) ORDER BY turn OFFSET 0
        ) mine
        CROSS JOIN LATERAL (
            SELECT source, author, media_type FROM documents
            WHERE tenant = %(tenant)s AND access_id = mine.id AND deleted_at IS NULL AND version IS NOT NULL
            LIMIT %(of_a_set)s
        ) d
        ORDER BY mine.turn LIMIT %(documents)s
    ), counted AS (
        SELECT kind, value, count(*) AS times FROM sampled,
            LATERAL (VALUES ('source', source), ('author', author), ('media_type', media_type)) AS v (kind, value)
        WHERE value <> '' GROUP BY kind, value
    )
    SELECT kind, value FROM (
        SELECT kind, value, times, row_number() OVER (PARTITION BY kind ORDER BY times DESC, value) AS place
        FROM counted
    ) ranked WHERE place <= %(values)s ORDER BY place
"""


async def facets(connection: Connection, caller: Caller) -> Facets:
    """Raises psycopg.Error."""
    may = await readable(connection, caller)
    cursor = await connection.execute(
        _FACETS,
        {
            "ids": list(may.access_ids),
            "tenant": caller.tenant,
            "of_a_set": FACET_DOCUMENTS_A_SET,
            "documents": FACET_DOCUMENTS,
            "values": FACET_VALUES,
        },
    )
    by_kind: dict[str, list[str]] = {"source": [], "author": [], "media_type": []}
    for kind, value in await cursor.fetchall():
        by_kind[kind].append(value)
    return Facets(by_kind["source"], by_kind["author"], by_kind["media_type"])
