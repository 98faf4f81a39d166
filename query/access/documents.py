"""Documents as a caller may read them, from the ledger.

The statement that reads also decides whether the caller may read. A document that it may not read and one that does not
exist take the same path and have the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.core.addresses import openable
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, readable
from query.access.facets import FACET_DOCUMENTS, FACET_VALUES

FACET_DOCUMENTS_A_SET = 200
"""The most documents of one access set that facets are gathered from. A set belongs to one source, as its tags do, and
the sources take turns, so that one with a hundred thousand sets does not hide another."""


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
    """The whole normalised text, in reading order."""

    def __post_init__(self) -> None:
        """Drop an address that cannot be opened: rows may be older than the check at ingestion."""
        object.__setattr__(self, "source_url", openable(self.source_url))


_MAY_READ = """
    FROM documents d JOIN access_sets a ON a.id = d.access_id
    WHERE d.id = %(id)s AND d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
      AND a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
"""


async def read(connection: Connection, caller: Caller, document: UUID) -> Document | None:
    """The document, or None if it does not exist or this caller may not read it. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, d.author, d.media_type,"  # noqa: S608 — constants of this module
        " d.source_modified_at, coalesce((SELECT text FROM document_bodies b WHERE b.document_id = d.id), '')"
        + _MAY_READ,
        _values(caller, document),
    )
    row = await cursor.fetchone()
    return Document(*row) if row else None


async def may_read(connection: Connection, caller: Caller, document: UUID) -> bool:
    """Whether the document exists and this caller may read it. Raises psycopg.Error."""
    cursor = await connection.execute("SELECT true" + _MAY_READ, _values(caller, document))
    return await cursor.fetchone() is not None


def _values(caller: Caller, document: UUID) -> dict[str, object]:
    return {"id": document, "tenant": caller.tenant, "tags": sorted(caller.tags)}


@dataclass(frozen=True, slots=True)
class Facets:
    """Values to filter a search by, from the documents that the caller may read, the most frequent first."""

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
    """The facets of the documents that the caller may read. Raises psycopg.Error."""
    access = await readable(connection, caller)
    cursor = await connection.execute(
        _FACETS,
        {
            "ids": list(access.access_ids),
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
