"""Verification of every candidate against the ledger, on the primary. What the stores hold is only a hint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from psycopg import sql

from pipeline.core.model import Span
from pipeline.stores.postgres import Connection
from query.access.callers import Caller
from query.access.filters import NONE, Filters, conditions, values
from query.model import Passage


@dataclass(frozen=True, slots=True)
class Detail:
    """The manifest's data on one chunk."""

    spans: tuple[Span, ...]
    headings: tuple[str, ...]


class Verifiable(Protocol):
    """A reference to a chunk and its document."""

    @property
    def chunk_id(self) -> UUID: ...

    @property
    def document_id(self) -> UUID: ...


# OFFSET 0 forces one index probe for each candidate and table. With plain joins, a planner reads all documents to look
# up two hundred, or begins at the access sets and reads every readable document.
_VERIFY = """
    SELECT c.chunk_id, d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, p.position - 1,
        d.author, d.media_type, d.source_modified_at
    FROM unnest(%(chunks)b::uuid[], %(documents)b::uuid[]) AS c (chunk_id, document_id)
    CROSS JOIN LATERAL (
        SELECT id, tenant, access_id, external_id, source, title, source_url, author, media_type, source_modified_at
        FROM documents d
        WHERE d.id = c.document_id AND d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
            {filters} OFFSET 0
    ) d
    CROSS JOIN LATERAL (
        SELECT tenant, acl_tags, required_tags FROM access_sets WHERE id = d.access_id OFFSET 0
    ) a
    CROSS JOIN LATERAL (
        SELECT array_position(m.chunk_ids, c.chunk_id) AS position FROM manifests m
        WHERE m.document_id = d.id AND m.generation = %(generation)s OFFSET 0
    ) p
    WHERE a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
      AND p.position IS NOT NULL
"""

# OFFSET 0 forces index probes for each of the documents, as above.
READS_ALL = sql.SQL("""
    NOT EXISTS (
        SELECT FROM unnest({documents}) AS made_of (id)
        WHERE NOT EXISTS (
            SELECT FROM documents d
            WHERE d.id = made_of.id AND d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
              AND EXISTS (
                SELECT FROM access_sets s
                WHERE s.id = d.access_id AND s.tenant = d.tenant AND s.acl_tags && %(tags)s::text[]
                  AND s.required_tags <@ %(tags)s::text[] OFFSET 0
              ) OFFSET 0
        )
    )
""")
"""The condition that a caller (``tenant`` and ``tags``, as in ``verify``) may read every one of ``documents`` now. That
is an expression of type uuid[] that is not NULL. It protects what was made from documents, such as answers."""


async def verify(
    connection: Connection,
    generation: str,
    caller: Caller,
    candidates: Iterable[Verifiable],
    filters: Filters = NONE,
) -> dict[UUID, Passage]:
    """The candidates that exist, are not deleted, may be read by this caller, pass the filters and are in the
    document's manifest, by chunk id, each as the ledger has it now. It is one statement."""
    offered = {c.chunk_id: c.document_id for c in candidates}
    if not offered or not caller.tags:
        return {}
    cursor = await connection.execute(
        sql.SQL(_VERIFY).format(filters=conditions(filters)),
        {
            **values(filters),
            "chunks": list(offered),
            "documents": list(offered.values()),
            "generation": generation,
            "tenant": caller.tenant,
            "tags": sorted(caller.tags),
        },
    )
    return {row[0]: Passage(*row) for row in await cursor.fetchall()}


async def describe(connection: Connection, generation: str, passages: Iterable[Passage]) -> dict[UUID, Detail]:
    """Spans and heading paths of chunks that are still in their documents' manifests. It is separate from ``verify``
    because the spans of a long document are long and only returned passages need them."""
    documents = {p.chunk_id: p.document_id for p in passages}
    if not documents:
        return {}
    cursor = await connection.execute(
        """
        SELECT c.chunk_id, m.spans -> p.position - 1, m.headings -> p.position - 1
        FROM unnest(%(chunks)b::uuid[], %(documents)b::uuid[]) AS c (chunk_id, document_id)
        JOIN manifests m ON m.document_id = c.document_id AND m.generation = %(generation)s
        CROSS JOIN LATERAL (SELECT array_position(m.chunk_ids, c.chunk_id) AS position OFFSET 0) p
        WHERE p.position IS NOT NULL
        """,
        {"chunks": list(documents), "documents": list(documents.values()), "generation": generation},
    )
    return {
        id_: Detail(tuple((start, end) for start, end in spans), tuple(headings))
        for id_, spans, headings in await cursor.fetchall()
    }
