"""A graph that holds only the signs of vectors: whatever searches a graph uses it, and compares whole vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from pgvector import HalfVector

from deploy.local.stack import Stack
from pipeline.analysis import conflicts
from pipeline.audit.sample import sample
from pipeline.core.identity import document_id
from pipeline.embedding.port import Vectors
from pipeline.stores import graph
from pipeline.stores.postgres import Connection
from query.access.callers import readable
from query.retrieval.vectors import NeighbourQuery, Tuning, nearest
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = pytest.mark.stack

DIMENSIONS, TOPICS, PER_TOPIC = 64, 40, 20
VECTORS = np.random.default_rng(7).standard_normal((TOPICS, 1, DIMENSIONS)) + np.random.default_rng(8).standard_normal(
    (TOPICS, PER_TOPIC, DIMENSIONS)
)


MORE_ROWS = """
    INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding) SELECT
        md5(c.id || n::text)::uuid, c.document_id, c.access_id, c.text || ' ' || n,
        c.embedding + (
            SELECT array_agg(0.05 * random() + 0 * k * n * ascii(c.text)) FROM generate_series(1, 64) k)::halfvec
    FROM chunks_g1 c, generate_series(1, 7) n
"""
"""So many rows that nobody reads all of them."""


class Topics(WordEmbedder):
    """Vectors around the middle of each topic; a text ends with its topic and its number there."""

    dimensions = DIMENSIONS

    def _vector(self, text: str) -> Vectors:
        numbers = [int(word) for word in text.split() if word.isdigit()]
        vector = VECTORS[numbers[-2], numbers[-1]] if len(numbers) > 1 else np.ones(DIMENSIONS)
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


@pytest.fixture
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, Topics(), quantisation="binary") as library:
        texts = [f"{topic} {number}" for topic in range(TOPICS) for number in range(PER_TOPIC)]
        await library.put(*(document(text, text) for text in texts))
        async with library.pool.connection() as connection:
            await graph.move(connection, library.generation, limit=len(texts))
        await library.execute(MORE_ROWS)
        await library.execute("ANALYZE")
        yield library


async def walks(connection: Connection) -> int:
    """How often this connection has searched the graph since it last reported to the server."""
    cursor = await connection.execute("SELECT pg_stat_get_xact_numscans('chunks_g1_hnsw'::regclass)")
    [(count,)] = await cursor.fetchall()
    return int(count)


async def test_a_graph_of_signs_finds_what_an_exact_scan_finds(library: Library) -> None:
    [(definition,)] = await library.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'chunks_g1_hnsw'")
    assert "bit_hamming_ops" in definition
    caller = await library.caller("acme", "staff")
    async with library.pool.connection() as connection:
        query = NeighbourQuery(library.generation, caller, await readable(connection, caller))
        before, equal = await walks(connection), 0
        for topic in range(TOPICS):
            exact, walked = [
                (
                    await nearest(
                        connection,
                        query,
                        Topics()._vector(f"{topic} 0"),
                        scan,
                        limit=50,
                        timeout_seconds=30,
                        tuning=Tuning(),
                    )
                )[0]
                for scan in ("exact", "graph")
            ]
            assert walked[0].text == f"{topic} 0"
            assert [c.score for c in walked] == sorted((c.score for c in walked), reverse=True), "by whole vectors"
            equal += len({c.chunk_id for c in exact[:10]} & {c.chunk_id for c in walked[:10]})
        assert await walks(connection) - before == TOPICS
    assert equal >= 0.97 * 10 * TOPICS


async def test_readers_contradictions_and_the_audit_search_a_graph_of_signs(library: Library) -> None:
    generation, vector = library.generation, HalfVector(Topics()._vector("3 4"))
    async with library.pool.connection() as connection:
        before = await walks(connection)
        cursor = await connection.execute(
            "SELECT c.text FROM readers.nearest(%s, 'acme', ARRAY['wiki/staff'], 10) n JOIN chunks_g1 c USING (id)"
            " ORDER BY n.distance LIMIT 1",
            [vector],
        )
        assert await cursor.fetchone() == ("3 4",)
        assert await walks(connection) == before + 1

        await connection.execute("SET enable_seqscan = off")  # the table is small
        cursor = await connection.execute(
            "SELECT id FROM chunks_g1 WHERE document_id = %s AND text = '3 4'", [document_id("acme", "wiki", "3 4")]
        )
        [row] = await conflicts.rows(connection, generation, "acme", [id_ for (id_,) in await cursor.fetchall()])
        before = await walks(connection)
        await conflicts.nearest(connection, generation, "acme", [row])
        assert await walks(connection) == before + 1
    sampled = await sample(library.pool, generation, 20)
    assert (sampled.problem, sampled.unreachable) == (None, ())
