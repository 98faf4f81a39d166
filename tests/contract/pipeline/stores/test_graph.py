"""Rows outside of the graph: found at once, in one of both halves and never in both, and let in behind the scenes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import numpy as np
import pytest
from psycopg.errors import QueryCanceled, UndefinedColumn
from structlog.testing import capture_logs

from deploy.local.stack import Stack
from pipeline.core import graph as deciding
from pipeline.core.graph import LATE_FOR_SECONDS
from pipeline.core.model import Generation
from pipeline.ledger import generation_tables
from pipeline.ledger.generation_tables import build_graph
from pipeline.observability.metrics import Metrics
from pipeline.stages import graph as keeping
from pipeline.stages.graph import GraphKeeper
from pipeline.stores import graph
from pipeline.stores.postgres import Connection, migrate, unlimited
from query.access.callers import readable
from query.retrieval import vectors
from query.retrieval.vectors import NeighbourQuery, Tuning
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = pytest.mark.stack

OLDER = "CREATE INDEX chunks_g1_hnsw ON chunks_g1 USING hnsw (embedding halfvec_cosine_ops)"


@pytest.fixture
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.execute("ALTER TABLE chunks_g1 SET (autovacuum_enabled = off)")  # rows wait for its end
        yield library


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "SKETCHED_QUIET_SECONDS", 0.0)


def pages(count: int, first: int = 0, text: str = "heron") -> list[object]:
    return [document(f"{n}.md", f"The {text} of page {n} waits by the water.") for n in range(first, first + count)]


class Keeper:
    """A GraphKeeper that works step by step."""

    def __init__(self, library: Library, connection: Connection) -> None:
        self.library = library
        self.connection = connection
        self.metrics = Metrics()
        self.keeper = GraphKeeper(library.settings.postgres, self._generations, self.metrics)

    async def _generations(self) -> dict[str, Generation]:
        return {"g1": self.library.generation}

    async def turn(self) -> bool:
        return await self.keeper.turn(self.connection)

    async def rest(self) -> int:
        """Until there is nothing to do; returns how many turns that took."""
        for turn in range(20):
            if not await self.turn():
                return turn
        raise AssertionError("it does not come to rest")


@pytest.fixture(autouse=True)
def a_few_rows_need_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "GRAPH_FROM_ROWS", 5)


@asynccontextmanager
async def open_keeper(library: Library) -> AsyncIterator[Keeper]:
    async with unlimited(library.settings.postgres, "test") as connection:
        await connection.execute("SET enable_seqscan = off")
        yield Keeper(library, connection)


async def outside(library: Library) -> int:
    [(count,)] = await library.execute("SELECT count(*) FROM chunks_g1 WHERE NOT in_graph")
    return int(count)


async def names(library: Library) -> dict[str, graph.Graph]:  # type: ignore[name-defined]
    async with library.pool.connection() as connection:
        return await graph.graphs(connection, library.generation)


async def nearest(library: Library, scan: vectors.Scan | None = None) -> tuple[list[str], vectors.Scan]:
    """The texts that a wide reader of a large table finds, and how; scan: instead of what there is."""
    caller = await library.caller("acme", "staff")
    vector = np.asarray(WordEmbedder()._vector("heron"))
    async with library.pool.connection() as connection:
        query = NeighbourQuery(library.generation, caller, await readable(connection, caller))
        there, *_ = await vectors._size(connection, library.generation)
        rows, used = await vectors.nearest(
            connection, query, vector, scan or there or "exact", limit=30, timeout_seconds=30, tuning=Tuning()
        )
    return [c.text for c in rows], used


async def test_chunks_are_searchable_at_once_inside_and_outside_the_vector_graph(library: Library) -> None:
    await library.put(*pages(60))
    assert await outside(library) == 60
    exact, _ = await nearest(library, "exact")
    assert len(exact) == 30
    for left in (60, 23, 0):
        async with library.pool.connection() as connection:
            assert await graph.move(connection, library.generation, limit=await outside(library) - left) >= 0
        assert await outside(library) == left
        rows, used = await nearest(library)
        assert used == "graph"
        assert rows == exact


async def test_results_of_a_graph_scan_are_sorted_by_distance_explicitly(library: Library) -> None:
    await library.put(*pages(60))
    async with library.pool.connection() as connection:
        await graph.move(connection, library.generation, limit=60)
        may = await readable(connection, caller := await library.caller("acme", "staff"))
        query = NeighbourQuery(library.generation, caller, may)
        await vectors.configure(connection, library.generation, "graph", limit=30, timeout_seconds=30, tuning=Tuning())
        await connection.execute("SET LOCAL enable_sort = off")  # of few rows no sort is worth avoiding
        vector = np.asarray(WordEmbedder()._vector("heron"))
        statement, values = vectors.build(query, vector, "graph", limit=30, walked=30)
        cursor = await connection.execute(b"EXPLAIN " + statement.as_bytes(connection), values, prepare=False)
        plan = "\n".join(line for (line,) in await cursor.fetchall())
    assert "chunks_g1_hnsw" in plan
    assert "Presorted" not in plan
    assert "Merge Append" not in plan


async def test_a_search_finds_rows_that_move_into_the_graph_exactly_once(library: Library) -> None:
    await library.put(*pages(29))
    exact, _ = await nearest(library, "exact")
    stop = asyncio.Event()

    async def to_and_fro() -> int:
        moves = 0
        while not stop.is_set():
            async with library.pool.connection() as connection:
                moves += await graph.move(connection, library.generation, limit=3)
            if not await outside(library):
                await library.execute("UPDATE chunks_g1 SET in_graph = false")
        return moves

    moving = asyncio.create_task(to_and_fro())
    for _ in range(60):
        rows, _ = await nearest(library, "graph")
        assert sorted(rows) == sorted(exact)
    stop.set()
    assert await moving > 60


async def test_waiting_rows_are_moved_into_the_graph_and_counted(library: Library) -> None:
    await library.put(*pages(40))
    async with open_keeper(library) as keeper:
        assert await keeper.turn()
        waiting = keeper.metrics.registry.get_sample_value("penstock_front_rows", {"generation": "g1"})
        assert waiting == 40
        await keeper.rest()
        assert keeper.metrics.registry.get_sample_value("penstock_front_rows", {"generation": "g1"}) == 0
        assert keeper.metrics.registry.get_sample_value("penstock_graph_rows_total") == 40
    assert await outside(library) == 0


async def test_a_row_locked_by_a_sink_is_skipped(library: Library) -> None:
    await library.put(*pages(5))
    async with library.pool.connection() as sink, sink.transaction():
        await sink.execute("SELECT FROM chunks_g1 WHERE text LIKE '%page 3 %' FOR UPDATE")
        async with open_keeper(library) as keeper:
            await asyncio.wait_for(keeper.rest(), 20)
        assert await outside(library) == 1


async def test_backfill_writes_into_the_graph_once_too_many_rows_wait_outside(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "FRONT_ROWS", 10)
    monkeypatch.setattr(graph, "READ_WHOLE_ROWS", -2)  # it was never analysed: -1 rows
    await library.put(*pages(9))
    backfill = await library.accept(*pages(5, first=100))
    await library.execute("UPDATE documents SET lane = 'backfill' WHERE id = ANY(%s)", backfill)
    await library.converge(*backfill[:1])
    assert await outside(library) == 10
    await library.converge(*backfill[1:])
    assert await outside(library) == 10
    await library.put(*pages(3, first=200))
    assert await outside(library) == 13, "a live change never waits for the graph"


async def test_backfill_writes_outside_the_graph_only_while_it_is_being_built_and_few_rows_wait(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "FRONT_ROWS", 1)
    monkeypatch.setattr(graph, "READ_WHOLE_ROWS", 2)
    await library.put(*pages(3))
    await library.execute("ANALYZE chunks_g1")
    for waiting, built, lanes in ((3, False, set()), (1, False, {"backfill"}), (1, True, set())):
        await library.execute(
            "UPDATE pg_index SET indisvalid = %s WHERE indexrelid = 'chunks_g1_hnsw'::regclass", built
        )
        await library.execute("UPDATE chunks_g1 SET in_graph = id NOT IN (SELECT id FROM chunks_g1 LIMIT %s)", waiting)
        async with library.pool.connection() as connection:
            assert await graph.writes_outside(connection, library.generation, {"backfill"}) == lanes


async def test_a_graph_is_built_by_one_process_during_other_work_and_by_more_otherwise(library: Library) -> None:
    await library.put(*pages(3))
    async with unlimited(library.settings.postgres, "test") as connection:
        for alone, processes in ((True, "0"), (False, "2")):
            await build_graph(connection, library.generation, alone=alone)
            cursor = await connection.execute("SHOW max_parallel_maintenance_workers")
            assert await cursor.fetchone() == (processes,)


async def test_no_rows_move_into_the_graph_while_a_live_change_is_late_and_shortly_after(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    await library.put(*pages(10))
    [late] = await library.accept(*pages(1, first=50))
    async with open_keeper(library) as keeper:
        for seconds, lane, moves in ((4, "live", False), (4, "backfill", True)):
            await library.execute("UPDATE chunks_g1 SET in_graph = false")
            await library.execute("UPDATE documents SET lane = %s WHERE id = %s", lane, late)
            await library.execute(
                "UPDATE index_state SET pending_since = clock_timestamp() - make_interval(secs => %s)"
                " WHERE document_id = %s",
                seconds,
                late,
            )
            keeper.keeper._histories.clear()
            assert await keeper.turn() == moves, (seconds, lane)
        await library.execute("UPDATE chunks_g1 SET in_graph = false")
        await library.execute("UPDATE documents SET lane = 'live'")
        keeper.keeper._histories.clear()  # or the next look is put off by twenty times what the last one took
        assert not await keeper.turn()
        await library.converge(late)
        assert not await keeper.turn(), "it was a moment ago"
        monkeypatch.setattr(keeping, "monotonic", lambda: monotonic() + LATE_FOR_SECONDS)
        assert await keeper.turn()


async def test_rows_wait_outside_a_graph_that_is_vacuumed_where_searches_read_them(library: Library) -> None:
    await library.put(*pages(60))
    async with open_keeper(library) as keeper, unlimited(library.settings.postgres, "test") as connection:
        await keeper.rest()
        await library.put(*pages(5, first=60))
        await library.execute("DELETE FROM chunks_g1 WHERE in_graph AND id IN (SELECT id FROM chunks_g1 LIMIT 20)")
        exact, _ = await nearest(library, "exact")
        assert not await graph.is_vacuumed(keeper.connection, library.generation)
        await connection.execute("SET vacuum_cost_limit = 1")
        await connection.execute("SET vacuum_cost_delay = 100")
        vacuum = asyncio.create_task(connection.execute("VACUUM chunks_g1"))
        while not await graph.is_vacuumed(keeper.connection, library.generation):
            assert not vacuum.done()
            await asyncio.sleep(0.01)
        assert not await keeper.turn()
        assert await outside(library) == 5
        assert await nearest(library) == (exact, "graph")
        assert not vacuum.done()
        await connection.cancel_safe()
        with pytest.raises(QueryCanceled):
            await vacuum
        await keeper.rest()
        assert await outside(library) == 0
        assert await nearest(library) == (exact, "graph")


async def test_a_first_load_is_searched_exactly_until_its_graph_is_built(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (deciding, keeping):
        monkeypatch.setattr(module, "FRONT_ROWS", 4)
    await library.put(*pages(20))
    exact, _ = await nearest(library, "exact")
    async with open_keeper(library) as keeper:
        assert await keeper.turn()
        assert await names(library) == {}, "it is dropped: building it anew is cheaper than letting all of them in"
        assert (await nearest(library)) == (exact, "exact")
        await library.put(*pages(20, first=20))
        assert await outside(library) == 20, "what comes now is in the graph that will be"
        assert await keeper.turn()
        assert await outside(library) == 0
        monkeypatch.setattr(keeping, "BUSY_DOCUMENTS", 0)
        await library.accept(*pages(1, first=40))
        await keeper.rest()
        assert await names(library) == {}, "a document waits for its stores: it goes first"
        await library.execute("UPDATE index_state SET pending_since = pending_since - interval '3 minutes'")
        await keeper.rest()  # it waits too long: its store may be away
        assert [(g.name, g.valid, g.partial) for g in (await names(library)).values()] == [
            ("chunks_g1_hnsw", True, True)
        ]
    exact, _ = await nearest(library, "exact")
    assert (await nearest(library)) == (exact, "graph")


async def test_a_first_graph_waits_until_nothing_has_been_pending_for_a_while(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(keeping, "monotonic", lambda: now)
    monkeypatch.setattr(deciding, "SKETCHED_QUIET_SECONDS", 5.0)
    await library.put(*pages(20))
    await library.execute("DROP INDEX chunks_g1_hnsw")
    async with open_keeper(library) as keeper:
        await keeper.rest()
        assert await names(library) == {}, "the next changes may follow at once"
        now += 4
        await library.accept(*pages(1, first=40))
        await keeper.rest()
        now += 4
        await keeper.rest()
        assert await names(library) == {}, "a document waits for its stores"
        await library.execute("UPDATE index_state SET seq = want_seq")
        await keeper.rest()
        now += 4
        await keeper.rest()
        assert await names(library) == {}
        now += 1
        assert await keeper.turn()
    assert "chunks_g1_hnsw" in await names(library)


async def test_the_graph_of_a_first_load_waits_until_the_table_stops_growing(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (deciding, keeping):
        monkeypatch.setattr(module, "FRONT_ROWS", 4)
        monkeypatch.setattr(module, "READ_WHOLE_ROWS", 30)
    monkeypatch.setattr(deciding, "GRAPH_FROM_ROWS", 20)
    monkeypatch.setattr(deciding, "BUILT_AT_LATEST_SECONDS", 0.0)
    monkeypatch.setattr(keeping, "BUSY_DOCUMENTS", 0)
    monkeypatch.setattr(keeping, "GROWING_SECONDS", 0.0)
    monkeypatch.setattr(keeping, "GROWING_ROWS", 1)
    async with open_keeper(library) as keeper:
        await keeper.rest()
        assert "chunks_g1_hnsw" in await names(library), "a new table has an empty graph"
        await library.put(*pages(20))
        await library.accept(*pages(1, first=90))  # documents wait for their stores throughout the load
        assert await keeper.turn()
        assert await names(library) == {}, "it is dropped"
        monkeypatch.setattr(deciding, "GRAPH_FROM_ROWS", 25)
        await keeper.rest()
        for first in (20, 40):
            await library.put(*pages(20, first=first))
            await library.execute("ANALYZE chunks_g1")
            assert not await keeper.turn()
            assert await names(library) == {}, "the table grows"
        assert not await keeper.turn(), "a pause does not end a load"
        assert await keeper.turn()
    assert "chunks_g1_hnsw" in await names(library)


async def test_an_older_versions_graph_is_used_until_its_successor_is_ready(library: Library) -> None:
    await library.execute("DROP INDEX chunks_g1_hnsw, chunks_g1_waiting")
    await library.execute(OLDER)
    await library.put(*pages(40))
    assert await outside(library) == 0, "every row is in it"
    exact, _ = await nearest(library, "exact")
    steps = []
    async with open_keeper(library) as keeper:
        for _ in range(10):
            rows, used = await nearest(library)
            assert rows == exact
            if not await keeper.turn():
                break
            steps.append((used, sorted(await names(library))))
    assert steps == [
        ("whole graph", ["chunks_g1_hnsw", "chunks_g1_hnsw_new"]),
        ("graph", ["chunks_g1_hnsw_new"]),
        ("graph", ["chunks_g1_hnsw"]),
    ]
    await library.put(*pages(1, first=90))
    assert await outside(library) == 1


@pytest.mark.parametrize("name", ["chunks_g1_hnsw", "chunks_g1_hnsw_new"])
async def test_a_graph_left_invalid_by_a_killed_build_is_dropped_and_rebuilt(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name.endswith("_new"):
        await library.execute("DROP INDEX chunks_g1_hnsw, chunks_g1_waiting")
        await library.execute(OLDER)
    await library.put(*pages(40))
    async with library.pool.connection() as connection:
        await graph.create_graph(connection, library.generation, name=name)
    await library.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass", name)
    exact, _ = await nearest(library, "exact")
    assert (await nearest(library))[0] == exact
    async with open_keeper(library) as keeper:
        await keeper.rest()
        await keeper.rest()
    assert [(g.name, g.valid, g.partial) for g in (await names(library)).values()] == [("chunks_g1_hnsw", True, True)]
    assert await outside(library) == 0
    assert await nearest(library) == (exact, "graph")


async def test_one_worker_at_a_time_maintains_the_graphs(library: Library) -> None:
    async with open_keeper(library) as first, open_keeper(library) as second:
        mine = asyncio.create_task(first.keeper._lead(first.connection))
        await library.put(*pages(10))
        while await outside(library):
            await asyncio.sleep(0.05)
        await asyncio.wait_for(second.keeper._lead(second.connection), 10)
        assert not mine.done()
        mine.cancel()
        await asyncio.gather(mine, return_exceptions=True)


async def test_rows_inside_and_outside_the_graph_are_read_by_index_whatever_the_statistics_say(
    library: Library,
) -> None:
    await library.put(*pages(30))
    await library.execute(
        "INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding, in_graph)"
        " SELECT gen_random_uuid(), document_id, access_id, '', embedding, false"
        " FROM chunks_g1, generate_series(1, 100) n"
    )
    await library.execute("ANALYZE chunks_g1")  # all of them wait: that is what Postgres goes on believing
    async with library.pool.connection() as connection:
        assert await graph.move(connection, library.generation, limit=3_000) == 3_000
        caller = await library.caller("acme", "staff")
        query = NeighbourQuery(library.generation, caller, await readable(connection, caller))
        vector = np.asarray(WordEmbedder()._vector("heron"))
        statement, values = vectors.build(query, vector, "graph", limit=30, walked=30)
        async with connection.transaction():
            await vectors.configure(
                connection, library.generation, "graph", limit=30, timeout_seconds=30, tuning=Tuning()
            )
            cursor = await connection.execute("EXPLAIN " + statement.as_string(connection), values)
            plan = "\n".join(line for (line,) in await cursor.fetchall())
    assert "chunks_g1_hnsw" in plan
    assert "chunks_g1_waiting" in plan
    assert "Seq Scan" not in plan


async def test_migrate_completes_a_chunk_table_made_by_an_older_version(library: Library) -> None:
    await library.execute("ALTER TABLE chunks_g1 DROP COLUMN in_graph")
    with pytest.raises(UndefinedColumn):
        await library.execute("SELECT in_graph FROM chunks_g1")
    assert await migrate(library.settings.postgres) == []
    await library.put(*pages(3))
    assert len((await nearest(library))[0]) == 3


async def test_a_graph_that_does_not_fit_into_memory_is_logged(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was built for hours, and nothing said why."""
    await library.put(*pages(3))
    async with unlimited(library.settings.postgres, "test") as connection:
        with capture_logs() as logged:
            await build_graph(connection, library.generation)
        assert not logged
        monkeypatch.setattr(generation_tables, "GRAPH_BYTES_A_NEIGHBOUR", 10 * 2**40)
        with capture_logs() as logged:
            await build_graph(connection, library.generation)
    [seen] = logged
    assert seen["event"] == "graph_exceeds_memory"
    assert seen["needed_mb"] > seen["allowed_mb"] >= 512


async def test_a_graph_is_built_in_the_memory_that_is_calculated_for_it_and_not_in_less(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calculation was a tenth too low, so that the last rows of a million entered their graph one by one."""
    await library.put(*pages(3))
    await library.execute(
        "INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding)"
        " SELECT gen_random_uuid(), document_id, access_id, '', (SELECT array_agg(random() + 0 * k * n)"
        f" FROM generate_series(1, {library.generation.dimensions}) k)::halfvec"
        " FROM (SELECT document_id, access_id FROM chunks_g1 LIMIT 1) one, generate_series(1, 12000) n"
    )
    calculated = generation_tables.graph_build_bytes(12_003, library.generation.dimensions, "halfvec") // 1024
    async with unlimited(library.settings.postgres, "test") as connection:
        for memory, overflows in ((calculated, False), (calculated // 2, True)):

            async def allow(connection: Connection, _: Generation, memory: int = memory) -> None:
                await connection.execute(f"SET maintenance_work_mem = {memory}".encode())

            monkeypatch.setattr(generation_tables, "_allow_memory", allow)
            await graph.drop_graph(connection, graph.own_name(library.generation))
            with capture_logs() as logged:
                await build_graph(connection, library.generation, alone=True)
            assert [entry["event"] for entry in logged] == ["graph_exceeds_memory"] * overflows


async def test_a_graph_of_long_vectors_is_built_with_care_and_then_added_to_as_others_are(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "LONG_VECTOR_DIMENSIONS", library.generation.dimensions)
    await library.put(*pages(3))
    async with unlimited(library.settings.postgres, "test") as connection:
        await graph.drop_graph(connection, graph.own_name(library.generation))
        with monkeypatch.context() as patched, capture_logs() as logged:
            patched.setattr(graph, "_LOCK_ATTEMPTS", 0)
            await build_graph(connection, library.generation)
        assert [entry["event"] for entry in logged] == ["graph_adds_slowly"]
        assert await graph_options(library) == {"m=24", "ef_construction=128"}

        async with library.pool.connection() as reader, reader.transaction():
            await reader.execute("SELECT FROM chunks_g1")
            with monkeypatch.context() as patched, capture_logs() as logged:
                patched.setattr(graph, "_LOCK_ATTEMPTS", 2)
                patched.setattr(graph, "_LOCK_WAIT", "10ms")
                patched.setattr(graph, "_LOCK_PAUSE_SECONDS", 0.0)
                await build_graph(connection, library.generation)
            assert [entry["event"] for entry in logged] == ["graph_adds_slowly"]
        with capture_logs() as logged:
            await build_graph(connection, library.generation)
        assert not logged
        assert await graph_options(library) == {"m=24", "ef_construction=64"}


async def graph_options(library: Library) -> set[str]:
    [(options,)] = await library.execute("SELECT reloptions FROM pg_class WHERE relname = 'chunks_g1_hnsw'")
    return set(options)
