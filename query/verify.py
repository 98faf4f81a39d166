"""The last word on every candidate: the ledger's, on the primary, now. What the stores hold is only a hint."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from pipeline.stores.postgres import Connection
from query.access import Caller
from query.model import Candidate, Passage

_VERIFY = """
    SELECT c.chunk_id, d.id, d.external_id, d.source, coalesce(d.title, ''), d.source_url, p.position - 1,
        d.author, d.media_type, d.source_modified_at
    FROM unnest(%(chunks)s::uuid[], %(documents)s::uuid[]) AS c (chunk_id, document_id)
    JOIN documents d ON d.id = c.document_id
    JOIN access_sets a ON a.id = d.access_id
    JOIN manifests m ON m.document_id = d.id AND m.generation = %(generation)s
    CROSS JOIN LATERAL (SELECT array_position(m.chunk_ids, c.chunk_id) AS position OFFSET 0) p
    WHERE d.tenant = %(tenant)s AND d.deleted_at IS NULL AND d.version IS NOT NULL
      AND a.tenant = d.tenant AND a.acl_tags && %(tags)s::text[] AND a.required_tags <@ %(tags)s::text[]
      AND p.position IS NOT NULL
"""


async def verify(
    connection: Connection, generation: str, caller: Caller, candidates: Iterable[Candidate]
) -> dict[UUID, Passage]:
    """Of these candidates, those that exist, are not deleted, may be read by this caller and stand in the document's
    manifest, each as the ledger has it now. One statement."""
    offered = {c.chunk_id: c.document_id for c in candidates}
    if not offered or not caller.tags:
        return {}
    cursor = await connection.execute(
        _VERIFY,
        {
            "chunks": list(offered), "documents": list(offered.values()), "generation": generation,
            "tenant": caller.tenant, "tags": sorted(caller.tags),
        },
    )  # fmt: skip
    return {row[0]: Passage(*row) for row in await cursor.fetchall()}
