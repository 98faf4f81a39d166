"""Why docs/readers.md says "nearest neighbours first": plans over seven thousand chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from pgvector import HalfVector

from deploy.local.stack import Stack
from pipeline.stores.graph import create_graph
from tests.support.query.library import Library, WordEmbedder

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

GROUPS = [f"wiki/{n}" for n in range(20)]
BY_ACCESS = {"documents_access", "documents_by_access"}

_LIBRARY = """
    SELECT setseed(0.5);
    DROP INDEX chunks_g1_hnsw;  -- filled first, it is built thirty times as fast
    INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)
        SELECT 'acme', sha256(n::text::bytea), ARRAY['wiki/' || n], '{}' FROM generate_series(0, 19) n;
    INSERT INTO documents (id, tenant, source, external_id, seq, version, access_id, title)
        SELECT md5(n::text)::uuid, 'acme', 'wiki', n || '.md', n, 1,
            (SELECT min(id) FROM access_sets) + n % 20, 'Title' FROM generate_series(1, 3500) n;
    INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding)
        SELECT md5(d.id || n::text)::uuid, d.id, d.access_id, 'text', (
            SELECT array_agg(random() - 0.5 + 0 * k * d.seq * n) FROM generate_series(1, 8) k)::halfvec
        FROM documents d, generate_series(1, 2) n;
    INSERT INTO manifests
        SELECT document_id, 'g1', '', array_agg(id), array_agg(1), '[]', '[]' FROM chunks_g1 GROUP BY 1;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq)
        SELECT id, 'g1', store, 1, 1 FROM documents, unnest(ARRAY['vectors', 'keywords']) store;
"""
_OLDER = "CREATE INDEX chunks_g1_hnsw ON chunks_g1 USING hnsw (embedding halfvec_cosine_ops)"
_OUTSIDE = "UPDATE chunks_g1 SET in_graph = false WHERE id < '10000000-0000-0000-0000-000000000000'"


class EightNumbers(WordEmbedder):
    dimensions = 8


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["with rows outside", "an older version's graph"])
async def library(stack: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Library]:
    async with Library.create(stack, EightNumbers()) as library:
        async with library.pool.connection() as connection:
            await connection.execute(_LIBRARY.encode())
            if request.param == "with rows outside":
                await create_graph(connection, library.generation)
                cursor = await connection.execute(_OUTSIDE)
                assert cursor.rowcount > 300
            else:
                await connection.execute(_OLDER)
            await connection.execute("ANALYZE")
        yield library


def random_vector(seed: int) -> HalfVector:
    return HalfVector(np.random.default_rng(seed).standard_normal(8))


async def scans(library: Library, statement: str, *values: object) -> list[tuple[str, str]]:
    """How each table is read, and by which index."""
    [[[plan]]] = await library.execute(f"EXPLAIN (FORMAT JSON) {statement}", *values)
    results = []
    waiting: list[dict[str, Any]] = [plan["Plan"]]
    for node in waiting:
        waiting += node.get("Plans", [])
        if "Relation Name" in node or "Index Name" in node:
            results.append((node["Node Type"], node.get("Index Name") or node["Relation Name"]))
    return results


async def test_ordering_the_chunks_view_by_distance_scans_the_whole_table(library: Library) -> None:
    naive = (
        "SELECT id, text FROM readers.chunks c WHERE tenant = 'acme' AND acl_tags && %s"
        " ORDER BY embedding <=> %s LIMIT 10"
    )
    for groups in (GROUPS[:10], GROUPS):
        used = await scans(library, naive, groups, random_vector(1))
        assert ("Seq Scan", "chunks_g1") in used
        assert "chunks_g1_hnsw" not in {name for _, name in used}


CHECKED = """
    WITH found AS MATERIALIZED (SELECT * FROM readers.chunks WHERE id = ANY (%s))
    SELECT * FROM found WHERE tenant = 'acme' AND acl_tags && %s AND required_tags <@ %s
"""


async def test_the_documented_access_check_looks_chunks_up_by_primary_key(library: Library) -> None:
    """In one step it would be driven from the access sets: how many hold a tag is guessed far too low."""
    ids = [id_ for (id_,) in await library.execute("SELECT id FROM chunks_g1 LIMIT 50")]
    used = {name for _, name in await scans(library, CHECKED, ids, GROUPS, GROUPS)}
    assert "chunks_g1_pkey" in used
    assert not {"chunks_g1_document", *BY_ACCESS} & used
    assert len(await library.execute(CHECKED, ids, GROUPS, GROUPS)) == 50
    one_step = (
        "SELECT * FROM readers.chunks WHERE id = ANY (%s) AND tenant = 'acme' AND acl_tags && %s"
        " AND required_tags <@ %s"
    )
    assert BY_ACCESS & {name for _, name in await scans(library, one_step, ids, GROUPS, GROUPS)}


async def nearest(library: Library, query: HalfVector, tags: Sequence[str]) -> tuple[list[object], bool]:
    """The nearest ten, and whether the graph was walked."""
    async with library.pool.connection() as connection:
        walks = []
        for _ in range(2):  # of this connection, since it last told the server
            cursor = await connection.execute("SELECT pg_stat_get_xact_numscans('chunks_g1_hnsw'::regclass)")
            walks += [count for (count,) in await cursor.fetchall()]
            cursor = await connection.execute("SELECT id FROM readers.nearest(%s, 'acme', %s, 10)", [query, list(tags)])
            results = [id_ for (id_,) in await cursor.fetchall()]
    return results, walks[1] > walks[0]


@pytest.mark.parametrize(("groups", "walked"), [(GROUPS, True), (GROUPS[:16], True), (GROUPS[:3], False)])
async def test_nearest_uses_the_graph_for_many_readable_chunks_and_is_exact_for_few(
    library: Library, groups: list[str], walked: bool
) -> None:
    hits = 0
    for seed in range(10):
        ids, through_graph = await nearest(library, random_vector(seed), groups)
        exact = await library.execute(
            "SELECT id FROM readers.chunks WHERE acl_tags && %s ORDER BY (embedding <=> %s) + 0, id LIMIT 10",
            groups,
            random_vector(seed),
        )
        assert through_graph == walked
        assert len(ids) == 10
        hits += len(set(ids) & {id_ for (id_,) in exact})
    assert hits == 100 if not walked else hits >= 95
