"""What a generation will hold and cost, before it is begun: some documents are really cut, and the rest reckoned."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pipeline.core.model import CountTokens, Generation
from pipeline.generations.tables import wanted
from pipeline.ledger import generations
from pipeline.stages.manifests import build_manifest
from pipeline.stores.postgres import Connection

SAMPLE = 200
"""Documents that are cut. Their ids are hashes, so the first of them are a fair sample; where there are no more, the
numbers are exact but for texts that occur twice."""


@dataclass(frozen=True, slots=True)
class Estimate:
    documents: int
    chunks: int
    copied: int
    """Chunks whose vectors the active generation has already: of the same model and text."""
    embedded: int
    tokens: int
    """Of the chunks to embed."""
    money: float
    exact: bool
    ratio: float
    """Tokens to embed for one of the active generation's."""


async def estimate(
    connection: Connection, origin: Generation, new: Generation, count_tokens: CountTokens, *, price: float
) -> Estimate:
    """price: of a million tokens."""
    documents, chunks, tokens = await wanted(connection, origin)
    cursor = await connection.execute(
        "SELECT d.id, b.text, coalesce(d.media_type, 'text/plain'), d.content_hash, m.chunk_ids,"
        " (SELECT sum(t) FROM unnest(m.token_counts) t)"
        " FROM documents d JOIN access_sets a ON a.id = d.access_id AND cardinality(a.acl_tags) > 0"
        " JOIN document_bodies b ON b.document_id = d.id"
        " JOIN manifests m ON m.document_id = d.id AND m.generation = %s AND m.content_hash = d.content_hash"
        " WHERE d.deleted_at IS NULL AND d.version IS NOT NULL ORDER BY d.id LIMIT %s",
        [origin.name, SAMPLE],
    )
    sample = await cursor.fetchall()
    lends = generations.same_model(origin, new)
    before_chunks = before_tokens = after_chunks = kept_chunks = embedded_tokens = 0
    for id_, text, media_type, digest, old, old_tokens in sample:
        manifest = await asyncio.to_thread(build_manifest, id_, text, media_type, digest, new, count_tokens)
        held = set(old) if lends else set()
        before_chunks += len(old)
        before_tokens += int(old_tokens or 0)
        after_chunks += len(manifest.chunk_ids)
        kept_chunks += len(held.intersection(manifest.chunk_ids))
        embedded_tokens += sum(
            n for i, n in zip(manifest.chunk_ids, manifest.token_counts, strict=True) if i not in held
        )
    all_chunks = round(chunks * after_chunks / before_chunks) if before_chunks else 0
    copied = round(chunks * kept_chunks / before_chunks) if before_chunks else 0
    ratio = embedded_tokens / before_tokens if before_tokens else 1.0
    needed = round(tokens * ratio)
    return Estimate(
        documents, all_chunks, copied, all_chunks - copied, needed, round(needed * price / 1e6, 4),
        exact=len(sample) == documents, ratio=ratio,
    )  # fmt: skip
