"""Sketches of vectors: an exact scan by them finds what a scan of all vectors finds, and reads few of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import UUID, uuid4

import numpy as np
import pytest
import pytest_asyncio
from pgvector import Vector
from psycopg.errors import UndefinedColumn

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TENANT, fill
from bench.load_runs import tag
from deploy.local.stack import Stack
from pipeline.core.centre import CENTRE_TEXTS, centre_of
from pipeline.core.model import ChunkParams
from pipeline.ledger import generations
from pipeline.stores.graph import move
from pipeline.stores.postgres import Connection
from pipeline.stores.vectors import Row, add_sketches, insert, sketches_of
from query.access.callers import readable
from query.model import Candidate
from query.retrieval import vectors
from query.retrieval.recall import recall
from query.retrieval.vectors import NeighbourQuery, Scan, Tuning, build, choose_scan, configure, nearest
from tests.support.deploy.roles_kit import define_roles
from tests.support.query.library import Library

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

CHUNKS, DIMENSIONS, LIMIT, QUESTIONS = 2_000, 384, 50, 20
CORPUS = Corpus()
VECTORS = WordVectors(DIMENSIONS, CORPUS)
"""Few of their dimensions matter: the signs of vectors that are not rotated say little about these."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, VECTORS, params=ChunkParams(100, 40, 128)) as library:
        await fill(library, CORPUS, VECTORS, CHUNKS, [TENANT], keywords=False)
        yield library


async def query_of(library: Library, connection: Connection, share: str = "100 %") -> NeighbourQuery:
    caller = await library.caller(TENANT, tag(share))
    return NeighbourQuery(library.generation, caller, await readable(connection, caller))


async def scanned(
    connection: Connection, query: NeighbourQuery, scan: Scan, question: str, limit: int = LIMIT
) -> list[Candidate]:
    rows, used = await nearest(
        connection, query, VECTORS.vector(question), scan, limit=limit, timeout_seconds=30, tuning=Tuning()
    )
    assert used == scan
    return rows


@pytest.mark.parametrize("share", ["100 %", "10 %"])
async def test_a_sketched_scan_finds_what_an_exact_scan_finds(library: Library, share: str) -> None:
    async with library.pool.connection() as connection:
        query = await query_of(library, connection, share)
        assert await choose_scan(connection, query, limit=LIMIT, tuning=Tuning()) == "sketched"
        recalls, first = [], []
        for question, _ in zip(CORPUS.questions(3), range(QUESTIONS), strict=False):
            exact = await scanned(connection, query, "exact", question)
            sketched = await scanned(connection, query, "sketched", question)
            assert len(sketched) == len(exact) == LIMIT
            assert [c.score for c in sketched] == sorted((c.score for c in sketched), reverse=True)
            recalls.append(recall(sketched, exact))
            first.append(recall(sketched[:10], exact[:10]))
    assert np.mean(first) > 0.99
    assert np.mean(recalls) > 0.97


async def test_a_sketched_scan_reads_few_vectors(library: Library) -> None:
    async with library.pool.connection() as connection:
        query = await query_of(library, connection)
        assert LIMIT < await read_whole(connection, query, limit=LIMIT) < CHUNKS / 3


async def test_below_the_policies_by_tenant_a_sketched_scan_reads_the_index_alone(library: Library) -> None:
    define_roles(library.settings.postgres.dsn.get_secret_value())
    async with library.pool.connection() as connection:
        await connection.set_autocommit(True)
        await connection.execute("VACUUM chunks_g1")  # another test may have changed its rows
        await connection.set_autocommit(False)
        query = await query_of(library, connection, "10 %")
        statement, values = build(query, VECTORS.vector("heron"), "sketched", limit=LIMIT, walked=LIMIT)
        async with connection.transaction():
            await connection.execute("SET LOCAL ROLE penstock_query; SET LOCAL penstock.tenant = 'acme'")
            await configure(connection, query.generation, "sketched", limit=LIMIT, timeout_seconds=5, tuning=Tuning())
            cursor = await connection.execute(
                "EXPLAIN (ANALYZE, FORMAT JSON) " + statement.as_string(connection), values
            )
            [([explained],)] = await cursor.fetchall()
        [seen] = [node for node in nodes(explained["Plan"]) if node["Node Type"] == "Index Only Scan"]
        assert seen["Index Name"] == "chunks_g1_document"
        assert seen["Heap Fetches"] == 0, "the table is vacuumed"
        looked_up = [node for node in nodes(seen) if node.get("Relation Name") == "documents"]
        assert [node["Actual Loops"] for node in looked_up] == [0], "no document is looked up for a row"
        assert len(await scanned(connection, query, "sketched", "heron")) == LIMIT


async def test_a_row_of_another_tenant_is_not_seen_whatever_its_document_says(library: Library) -> None:
    """And a row of an older version, which names no tenant, is seen where its document is."""
    define_roles(library.settings.postgres.dsn.get_secret_value())
    [[rows]] = await library.execute("SELECT count(*) FROM chunks_g1")
    async with library.pool.connection() as connection:
        await connection.execute(
            "UPDATE chunks_g1 SET tenant = NULL WHERE id IN (SELECT id FROM chunks_g1 ORDER BY id LIMIT 10)"
        )
        await connection.execute(
            "UPDATE chunks_g1 SET tenant = 'other' WHERE id IN (SELECT id FROM chunks_g1 ORDER BY id LIMIT 4)"
        )
        for tenant, expected in (("acme", rows - 4), ("other", 4), ("third", 0)):
            async with connection.transaction():
                await connection.execute("SET LOCAL ROLE penstock_query")
                await connection.execute("SELECT set_config('penstock.tenant', %s, true)", [tenant])
                cursor = await connection.execute("SELECT count(*) FROM chunks_g1")
                assert await cursor.fetchone() == (expected,), tenant
                await connection.execute("RESET ROLE")
        await connection.rollback()


async def read_whole(connection: Connection, query: NeighbourQuery, limit: int) -> int:
    """The number of rows whose vectors a sketched scan reads."""
    statement, values = build(query, VECTORS.vector("heron"), "sketched", limit=limit, walked=limit)
    cursor = await connection.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + statement.as_string(connection), values)
    [([explained],)] = await cursor.fetchall()
    [compared] = [
        node for node in nodes(explained["Plan"]) if node["Node Type"] == "CTE Scan" and node["CTE Name"] == "compared"
    ]
    return int(compared["Actual Rows"])


def nodes(plan: dict) -> list[dict]:  # type: ignore[type-arg]
    return [plan, *(node for below in plan.get("Plans", []) for node in nodes(below))]


async def test_rows_without_a_sketch_are_read_whole(library: Library) -> None:
    """A worker of the version before writes such rows during an upgrade."""
    async with library.pool.connection() as connection:
        query = await query_of(library, connection)
        exact = await scanned(connection, query, "exact", "heron")
        await connection.execute(
            "UPDATE chunks_g1 SET sketch = NULL WHERE id = ANY(%s)", [[c.chunk_id for c in exact[::2]]]
        )
        assert await scanned(connection, query, "sketched", "heron") == exact
        await connection.execute("UPDATE chunks_g1 SET sketch = NULL")
        assert await scanned(connection, query, "sketched", "heron", limit=CHUNKS) == await scanned(
            connection, query, "exact", "heron", limit=CHUNKS
        )
        await connection.rollback()


async def test_a_limit_above_the_number_of_rows_returns_all_of_them(library: Library) -> None:
    async with library.pool.connection() as connection:
        query = await query_of(library, connection, "1 %")
        exact = await scanned(connection, query, "exact", "heron", limit=CHUNKS)
        assert 0 < len(exact) < CHUNKS / 50
        assert await scanned(connection, query, "sketched", "heron", limit=CHUNKS) == exact


async def test_rows_outside_of_the_graph_are_chosen_by_their_sketches(library: Library) -> None:
    async with library.pool.connection() as connection:
        query = await query_of(library, connection)
        exact = await scanned(connection, query, "exact", "heron")
        await connection.execute("UPDATE chunks_g1 SET in_graph = id <> ALL(%s)", [[c.chunk_id for c in exact[::2]]])
        statement, _ = build(query, VECTORS.vector("heron"), "graph", limit=LIMIT, walked=LIMIT)
        assert "sketch" in statement.as_string(connection)
        walked = await scanned(connection, query, "graph", "heron")
        assert {c.chunk_id for c in exact[::2]} <= {c.chunk_id for c in walked}
        await connection.rollback()


async def test_a_worker_that_read_the_generation_before_its_centre_was_known_makes_sketches(library: Library) -> None:
    async with library.pool.connection() as connection:
        of = replace(library.generation, centre=None)
        [(id_, sketch)] = await library.execute("SELECT id, sketch::text FROM chunks_g1 LIMIT 1")
        await connection.execute("UPDATE chunks_g1 SET sketch = NULL WHERE id = %s", [id_])
        await add_sketches(connection, of, [id_])
        cursor = await connection.execute("SELECT sketch::text FROM chunks_g1 WHERE id = %s", [id_])
        assert (await cursor.fetchone() or ("",))[0] == sketch
        row = Row(uuid4(), UUID(int=1), TENANT, 1, "heron", VECTORS.vector("heron"), in_graph=True)
        await insert(connection, of, [row])
        cursor = await connection.execute("SELECT sketch FROM chunks_g1 WHERE id = %s", [row.id])
        [made] = sketches_of(library.generation, [row.vector])
        assert await cursor.fetchone() == (made and made.to_text(),)
        await connection.rollback()


async def test_without_a_centre_no_sketch_is_made_and_every_row_is_compared(library: Library) -> None:
    """As for a moment between the beginning of a generation and the start of its model."""
    async with library.pool.connection() as connection:
        query = await query_of(library, connection)
        exact = await scanned(connection, query, "exact", "heron")
        await connection.execute("UPDATE generations SET centre = NULL")
        of = replace(library.generation, centre=None)
        row = Row(uuid4(), UUID(int=1), TENANT, 1, "heron", VECTORS.vector("heron"), in_graph=True)
        await insert(connection, of, [row])
        cursor = await connection.execute("SELECT sketch FROM chunks_g1 WHERE id = %s", [row.id])
        assert await cursor.fetchone() == (None,)
        assert await scanned(connection, replace(query, generation=of), "sketched", "heron") == exact
        await connection.rollback()


async def test_the_first_model_records_the_centre_and_no_later_one_changes_it(library: Library) -> None:
    async with library.pool.connection() as connection:
        texts = (await VECTORS.embed_documents(list(CENTRE_TEXTS))).vectors
        assert library.generation.centre == Vector(centre_of(texts)).to_binary()
        await connection.execute(
            "UPDATE generations SET centre = %s::text::vector", [Vector([2.0] * DIMENSIONS).to_text()]
        )
        for known in (library.generation, replace(library.generation, centre=None)):
            await generations.check_model(connection, known, VECTORS)
        [generation] = await generations.writable(connection)
        assert generation.centre == Vector([2.0] * DIMENSIONS).to_binary()
        await connection.rollback()


async def test_at_most_a_bounded_number_of_alike_vectors_is_read(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "MOST_COMPARED", 70)
    async with library.pool.connection() as connection:
        query = await query_of(library, connection)
        await connection.execute("UPDATE chunks_g1 SET sketch = repeat('1', 384)::varbit")
        assert await read_whole(connection, query, limit=10) == 70
        assert await read_whole(connection, query, limit=LIMIT) == 2 * LIMIT
        await connection.rollback()


async def test_a_table_of_an_older_version_is_written_and_searched_without_sketches(stack: Stack) -> None:
    async with Library.create(stack, VECTORS, params=ChunkParams(100, 40, 128)) as library:
        await library.execute("ALTER TABLE chunks_g1 DROP COLUMN sketch")
        await library.execute("UPDATE generations SET centred = false, centre = NULL")
        async with library.pool.connection() as connection:
            [old] = await generations.writable(connection)
            assert not old.sketched
        older = replace(library, generation=old)
        await fill(older, CORPUS, VECTORS, 100, [TENANT], keywords=False)
        async with library.pool.connection() as connection:
            query = await query_of(older, connection)
            assert await choose_scan(connection, query, limit=10, tuning=Tuning()) == "exact"
            assert len(await scanned(connection, query, "exact", "heron", limit=10)) == 10
            assert await move(connection, old, limit=10) >= 0
            assert len(await scanned(connection, query, "graph", "heron", limit=10)) == 10
            with pytest.raises(UndefinedColumn):
                await scanned(connection, replace(query, generation=library.generation), "sketched", "heron")
