"""A graph that holds one bit for each dimension, of sketches or (of a table that has none) of the vectors as they are:
whatever searches a graph uses it, and compares whole vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import numpy as np
import pytest
from pgvector import HalfVector

from deploy.local.stack import Stack
from pipeline.analysis import conflicts
from pipeline.audit.sample import sample
from pipeline.core.identity import document_id
from pipeline.core.sketch import sketches
from pipeline.embedding.port import Vectors
from pipeline.generations import calibration
from pipeline.ledger import generations
from pipeline.stores import graph
from pipeline.stores.postgres import Connection, connect_alone, create_chunk_table
from pipeline.stores.vectors import Row, add_sketches, insert
from query.access.callers import readable
from query.retrieval.vectors import NeighbourQuery, Scan, Tuning, choose_scan, nearest
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
    FROM chunks_g1 c, generate_series(1, 7) n RETURNING id
"""
"""So many rows that nobody reads all of them."""


class Topics(WordEmbedder):
    """Vectors around the middle of each topic; a text ends with its topic and its number there."""

    dimensions = DIMENSIONS

    def _vector(self, text: str) -> Vectors:
        numbers = [int(word) for word in text.split() if word.isdigit()]
        vector = VECTORS[numbers[-2], numbers[-1]] if len(numbers) > 1 else np.ones(self.dimensions)
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


@pytest.fixture(params=["sketches", "signs"])
async def library(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Library]:
    async with Library.create(stack, Topics(), quantisation="binary") as library:
        # A row that enters a graph while it is vacuumed may be reached only afterwards.
        await library.execute("ALTER TABLE chunks_g1 SET (autovacuum_enabled = off)")
        if request.param == "signs":
            library = await of_an_older_version(library)
        texts = [f"{topic} {number}" for topic in range(TOPICS) for number in range(PER_TOPIC)]
        await library.put(*(document(text, text) for text in texts))
        async with library.pool.connection() as connection:
            await graph.move(connection, library.generation, limit=len(texts))
        ids = await library.execute(MORE_ROWS)
        if request.param == "sketches":
            async with library.pool.connection() as connection:
                await add_sketches(connection, library.generation, [id_ for (id_,) in ids])
        await library.execute("ANALYZE")
        yield library


async def of_an_older_version(library: Library) -> Library:
    """The library with the table and the graph that an older version has made."""
    await library.execute("ALTER TABLE chunks_g1 DROP COLUMN sketch")  # and both indexes of the graph
    await library.execute("UPDATE generations SET centred = false, centre = NULL")
    async with library.pool.connection() as connection:
        older = replace(library, generation=await generations.active(connection))
        await graph.create_graph(connection, older.generation)
    return older


async def walks(connection: Connection) -> int:
    """How often this connection has searched the graph since it last reported to the server."""
    cursor = await connection.execute("SELECT pg_stat_get_xact_numscans('chunks_g1_hnsw'::regclass)")
    [(count,)] = await cursor.fetchall()
    return int(count)


async def definition(library: Library) -> str:
    [(text,)] = await library.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'chunks_g1_hnsw'")
    return str(text)


async def test_a_graph_of_bits_finds_what_an_exact_scan_finds(library: Library) -> None:
    kind = "(sketch bit_hamming_ops)" if library.generation.sketched else "binary_quantize(embedding)"
    assert kind in await definition(library)
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


async def test_readers_contradictions_calibration_and_the_audit_search_a_graph_of_bits(library: Library) -> None:
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

        before = await walks(connection)
        near = calibration._Nearest(connection, generation, None, share=1.0)
        [(text, cosine)] = await near(calibration._Question("", Topics()._vector("3 4")), 1)
        assert (text, round(cosine, 3)) == ("3 4", 1.0)
        assert await walks(connection) == before + 1
    sampled = await sample(library.pool, generation, 20)
    assert (sampled.problem, sampled.unreachable) == (None, ())


async def test_a_command_that_read_the_generation_before_it_had_a_centre_calibrates_it_as_any_other(
    library: Library,
) -> None:
    """As the command does that builds a generation: it reads it, checks the model, and calibrates it hours later."""
    best = []
    async with library.pool.connection() as connection:
        await connection.execute("SET enable_seqscan = off")  # the table is small
        for read in (library.generation, replace(library.generation, centre=None)):
            calibrated = await calibration.calibrate(connection, read, library.embedder)
            assert calibrated is not None
            best.append(calibrated.unrelated)
    assert best[0] == pytest.approx(best[1])


SEARCHED = "3 4"


async def texts_of(library: Library, scan: Scan) -> list[str]:
    """The texts that are nearest to SEARCHED, as the service finds them."""
    caller = await library.caller("acme", "staff")
    async with library.pool.connection() as connection:
        query = NeighbourQuery(library.generation, caller, await readable(connection, caller))
        rows, used = await nearest(
            connection, query, Topics()._vector(SEARCHED), scan, limit=10, timeout_seconds=30, tuning=Tuning()
        )
    assert used == scan
    return [row.text for row in rows]


async def read(library: Library) -> str:
    """The nearest text, as readers of other teams find it."""
    [(text,)] = await library.execute(
        "SELECT c.text FROM readers.nearest(%s, 'acme', ARRAY['wiki/staff'], 10) n JOIN chunks_g1 c USING (id)"
        " ORDER BY n.distance LIMIT 1",
        HalfVector(Topics()._vector(SEARCHED)),
    )
    return str(text)


@pytest.mark.parametrize("library", ["sketches"], indirect=True)
@pytest.mark.parametrize("in_graph", [True, False])
async def test_a_row_that_an_older_version_wrote_is_returned_and_enters_the_graph(
    library: Library, in_graph: bool
) -> None:
    """Such a row has no sketch, and a graph leaves it out, although the older version says that it is inside."""
    generation = library.generation
    before = await library.execute("SELECT id, sketch::text FROM chunks_g1 ORDER BY id")
    near = await texts_of(library, "exact")
    await library.execute("UPDATE chunks_g1 SET sketch = NULL, in_graph = %s WHERE text LIKE '3 %%'", in_graph)
    assert await texts_of(library, "graph") == near
    assert await read(library) == SEARCHED
    async with library.pool.connection() as connection:
        assert await graph.waiting(connection, generation, most=1_000) == 8 * PER_TOPIC
        assert (await sample(library.pool, generation, 20)).unreachable == ()
        assert await graph.move(connection, generation, limit=100) == 100
        assert await graph.move(connection, generation, limit=100) == 8 * PER_TOPIC - 100
        assert await graph.waiting(connection, generation, most=1_000) == 0
    assert await library.execute("SELECT id, sketch::text FROM chunks_g1 ORDER BY id") == before
    assert len({*await texts_of(library, "graph")} & {*near}) >= 8
    assert await read(library) == SEARCHED


@pytest.mark.parametrize("library", ["sketches"], indirect=True)
async def test_a_graph_that_an_older_version_built_is_not_used_and_built_anew(library: Library) -> None:
    """It leaves the sketches alone, and no search of this version can use it."""
    generation, near = library.generation, await texts_of(library, "exact")
    await library.execute("DROP INDEX chunks_g1_hnsw")
    async with library.pool.connection() as connection:
        await graph.create_graph(connection, replace(generation, sketched=False))
    assert "binary_quantize" in await definition(library)
    async with library.pool.connection() as connection:
        own = (await graph.graphs(connection, generation))["chunks_g1_hnsw"]
        assert not own.valid
        caller = await library.caller("acme", "staff")
        query = NeighbourQuery(generation, caller, await readable(connection, caller))
        assert await choose_scan(connection, query, limit=10, tuning=Tuning(always_exact_rows=1)) == "sketched"
        assert (
            await choose_scan(connection, query, limit=10, tuning=Tuning(always_exact_rows=1, most_exact_rows=1))
            == "words"
        )
    assert await read(library) == SEARCHED
    await library.execute("DROP INDEX chunks_g1_hnsw")
    async with library.pool.connection() as connection:
        await graph.create_graph(connection, generation)
        assert (await graph.graphs(connection, generation))["chunks_g1_hnsw"].valid
    assert len({*await texts_of(library, "graph")} & {*near}) >= 8


async def test_a_connection_that_knows_no_vectors_makes_the_table_of_a_binary_generation(stack: Stack) -> None:
    async with Library.create(stack, Topics(), quantisation="binary") as library:
        await library.execute("DELETE FROM sketch_rotations")
        new = replace(library.generation, name="g2", chunk_table="chunks_g2")
        async with await connect_alone(library.settings.postgres, "setup") as connection:
            await create_chunk_table(connection, new)
        assert await library.execute("SELECT bits FROM sketch_rotations") == [(new.sketch_bits,)]


class Alike(Topics):
    """All vectors have an angle of less than 10 degrees to one direction."""

    def _vector(self, text: str) -> Vectors:
        vector = super()._vector(text) + 6 * np.ones(DIMENSIONS) / 8
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


async def test_readers_subtract_the_centre_of_a_model_whose_vectors_are_alike(stack: Stack) -> None:
    """Sketches of one kind differ from those of the other in as many bits as those of any other vectors."""
    others = np.random.default_rng(9).standard_normal((6_000, DIMENSIONS)) + 6
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    async with Library.create(stack, Alike(), quantisation="binary") as library:
        texts = [f"{topic} 0" for topic in range(10)]
        await library.put(*(document(text, text) for text in texts))
        [(of, access)] = await library.execute("SELECT document_id, access_id FROM chunks_g1 LIMIT 1")
        rows = [Row(uuid4(), of, "acme", access, "", vector.astype(np.float32), in_graph=True) for vector in others]
        async with library.pool.connection() as connection:
            await graph.move(connection, library.generation, limit=len(texts))
            await insert(connection, library.generation, rows)
            await connection.execute("ANALYZE")
            before = await walks(connection)
            for text in texts:
                cursor = await connection.execute(
                    "SELECT c.text FROM readers.nearest(%s, 'acme', ARRAY['wiki/staff'], 1) n"
                    " JOIN chunks_g1 c USING (id)",
                    [HalfVector(5 * Alike()._vector(text))],
                )
                assert await cursor.fetchall() == [(text,)]
            assert await walks(connection) - before == len(texts)


@pytest.mark.parametrize(("dimensions", "held"), [(1_023, "halfvec"), (1_024, "binary")])
async def test_the_first_graph_of_long_vectors_holds_sketches(stack: Stack, dimensions: int, held: str) -> None:
    of = Topics()
    of.dimensions = dimensions
    async with Library.create(stack, of) as library:
        assert library.generation.quantisation == held
        assert ("bit_hamming_ops" in await definition(library)) == (held == "binary")


@pytest.mark.parametrize("dimensions", [100, 384, 1_536])
async def test_readers_make_the_sketches_that_workers_make(stack: Stack, dimensions: int) -> None:
    of = Topics()
    of.dimensions = dimensions
    async with Library.create(stack, of, quantisation="binary") as library:
        bits = library.generation.sketch_bits
        vectors = np.random.default_rng(3).standard_normal((20, dimensions)).astype(np.float32)
        made = [
            await library.execute("SELECT sketch_of(%s::real[], %s)::text", vector.tolist(), bits) for vector in vectors
        ]
        assert [[*text] for [(text,)] in made] == [["01"[int(bit)] for bit in row] for row in sketches(vectors, bits)]
        assert await library.execute("SELECT sketch_of('{1}', 640) IS NULL") == [(True,)], "nobody wrote that rotation"
