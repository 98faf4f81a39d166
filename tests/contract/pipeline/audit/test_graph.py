"""A vector index that rots while its rows are right, and the continuous audit in the workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import AsyncCursor

from deploy.local.stack import Stack
from pipeline.audit import runs
from pipeline.audit import sample as sampling
from pipeline.audit.background import LIMITS, BackgroundAudit
from pipeline.audit.reading import Limits
from pipeline.audit.sample import Sample, reach, sample
from pipeline.core.identity import document_id
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import AuditSettings
from pipeline.stores import graph
from tests.support.pipeline.audit_kit import SMALL, Audited, named
from tests.support.query.library import document
from topics.messages import DocumentUpserted

pytestmark = pytest.mark.stack


@pytest.fixture
async def audited(stack: Stack) -> AsyncIterator[Audited]:
    async with Audited.create(stack) as audited:
        yield audited


def id_of(name: str) -> UUID:
    return document_id("acme", "wiki", name)


async def put_unreachable_in_graph(audited: Audited, *names: str) -> None:
    """Write documents while Postgres believes that the HNSW index takes no rows: they are in the table, and not in the
    graph, as after a bug of the index or a crash of its storage."""
    ready = f"UPDATE pg_index SET indisready = %s WHERE indexrelid = '{audited.table}_hnsw'::regclass"
    await audited.library.execute(ready, False)
    await put(audited, *named(*names))
    await audited.library.execute(ready, True)


async def put(audited: Audited, *documents: DocumentUpserted, batch: int = 64) -> None:
    """Into both stores, and into the graph."""
    await audited.library.put(*documents, batch=batch)
    async with audited.library.pool.connection() as connection:
        await graph.move(connection, audited.library.generation, limit=1_000)


async def test_rows_unreachable_in_the_vector_graph_are_reported_and_repaired_without_embedding(
    audited: Audited,
) -> None:
    await put(audited, *named(*(f"d{n}" for n in range(20))))
    assert (await audited.audit(sampled=200))[1] == set()
    await put_unreachable_in_graph(audited, "rotten-1", "rotten-2")
    await audited.library.put(*named("outside"))
    lost = {("rotten-1", "vectors", "unreachable"), ("rotten-2", "vectors", "unreachable")}
    run, findings = await audited.audit(sampled=400)
    assert findings == lost, "every row is there, has the right text and access: only the search does not find it"
    before = len(audited.embedder.texts)
    whole = f"SELECT to_jsonb(c) - 'in_graph' FROM {audited.table} c ORDER BY id"
    rows = await audited.library.execute(whole)
    await audited.repair(run)
    assert await audited.differences(run, left=True) == set()
    assert (await audited.audit(sampled=400))[1] == set()
    assert len(audited.embedder.texts) == before
    again = await audited.library.execute(whole)
    assert again == rows, "every column, with the sketch of a row"
    waiting = f"SELECT d.external_id FROM {audited.table} c JOIN documents d ON d.id = document_id WHERE NOT in_graph"
    assert {name for (name,) in await audited.library.execute(waiting)} == {"rotten-1", "rotten-2", "outside"}


async def test_rows_with_equal_vectors_are_all_reachable(audited: Audited) -> None:
    boilerplate = "The same words stand in each of these documents, at the same place, for the same reason."
    await put(audited, *(document(f"d{n}", boilerplate) for n in range(130)), batch=130)
    ids = [i for (i,) in await audited.library.execute(f"SELECT id FROM {audited.table} WHERE in_graph")]
    assert len(ids) == 130
    assert (await reach(audited.library.pool, audited.library.generation, ids)).unreachable == ()


async def test_a_large_chunk_table_without_a_usable_graph_is_reported_as_a_problem(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(audited, *named("a", "b"))
    await audited.library.execute(f"DROP INDEX {audited.table}_hnsw")
    sampled = await sample(audited.library.pool, audited.library.generation, 5)
    assert sampled == Sample(0), "a small one needs none"
    monkeypatch.setattr(sampling, "READ_WHOLE_ROWS", 1)
    sampled = await sample(audited.library.pool, audited.library.generation, 5)
    assert sampled.problem is not None
    assert "no usable HNSW index" in sampled.problem


async def test_rows_waiting_outside_the_graph_are_reachable(audited: Audited) -> None:
    await audited.library.put(*named("a", "b", "c"))
    assert await sample(audited.library.pool, audited.library.generation, 50) == Sample(0)
    outside = [i for (i,) in await audited.library.execute(f"SELECT id FROM {audited.table} WHERE NOT in_graph")]
    assert outside
    assert (await reach(audited.library.pool, audited.library.generation, outside)).unreachable == ()


def background(
    audited: Audited, metrics: Metrics, *, limits: Limits = SMALL, pace: float = 1e6, **settings: Any
) -> BackgroundAudit:
    producer: Any = audited.waking
    return BackgroundAudit(
        audited.library.pool,
        audited.library.es,
        producer,
        metrics,
        AuditSettings(documents_per_second=pace, **settings),
        limits=limits,
        second_look_seconds=0.05,
    )


def divergent(metrics: Metrics) -> dict[tuple[str, str], float]:
    [family] = metrics.divergent.collect()
    return {(s.labels["store"], s.labels["kind"]): s.value for s in family.samples if s.value}


async def rounds(audited: Audited) -> list[tuple[int, bool]]:
    """Background rounds, the oldest first: documents, whether it is finished."""
    return await audited.library.execute(
        "SELECT documents, finished_at IS NOT NULL FROM audit_runs WHERE scope = 'background' ORDER BY id"
    )


async def finish_round(audited: Audited, audit: BackgroundAudit) -> None:
    finished = sum(done for _, done in await rounds(audited))
    for _ in range(30):
        await audited.library.execute(
            "UPDATE audit_runs SET next_at = now(), started_at = started_at - interval '2 min'"
        )
        await audit.turn()
        if sum(done for _, done in await rounds(audited)) > finished:
            return
    raise AssertionError("the round did not end")


async def test_the_background_audit_covers_every_document_and_exports_the_differences(audited: Audited) -> None:
    await audited.library.put(*named(*(f"d{n}" for n in range(20))))
    metrics = Metrics()
    audit = background(audited, metrics, repair="none")
    await finish_round(audited, audit)
    assert divergent(metrics) == {}
    assert metrics.registry.get_sample_value("penstock_audited_documents_total") == 20
    await audited.library.execute(f"DELETE FROM {audited.table} WHERE document_id = %s", id_of("d4"))
    other = background(audited, metrics, repair="none")  # a restarted worker, or another one
    await finish_round(audited, other)
    assert divergent(metrics) == {("vectors", "missing"): 1}
    assert audited.waking.hinted == [], "it was told to report, and no more"
    await finish_round(audited, audit)
    assert divergent(metrics) == {("vectors", "missing"): 1}, "not counted once a round"
    assert [n for n, _ in await rounds(audited)] == [20, 20, 20]
    age = metrics.registry.get_sample_value("penstock_audit_age_seconds")
    assert age is not None
    assert 0 <= age < 60


async def test_the_background_audit_repairs_when_configured_and_the_metric_falls(audited: Audited) -> None:
    await audited.library.put(*named(*(f"d{n}" for n in range(10))))
    await audited.drop_entries(await audited.rows(id_of("d4")))
    before = len(audited.embedder.texts)
    metrics = Metrics()
    audit = background(audited, metrics, repair="all")
    await finish_round(audited, audit)
    await audited.waking.rest()
    assert audited.waking.hinted == [id_of("d4")]
    assert (await audited.audit())[1] == set()
    assert len(audited.embedder.texts) == before
    await finish_round(audited, audit)
    assert divergent(metrics) == {}


async def test_the_background_audit_repairs_what_needs_no_embedding_by_default(audited: Audited) -> None:
    names = ["k-missing", "k-access", "k-text", "v-orphan", "v-access", "v-missing", "v-both", "both", "sound"]
    await audited.library.put(*named(*names))
    first = {name: (await audited.rows(id_of(name)))[0] for name in names}
    [(nobody,)] = await audited.library.execute(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES ('acme', 'x', '{wiki/x}', '{}')"
        " RETURNING id"
    )
    copy = f"INSERT INTO {audited.table} (id, document_id, access_id, text, embedding)" + (
        f" SELECT %s, %s, access_id, text, embedding FROM {audited.table} WHERE id = %s"
    )
    await audited.drop_entries([first["k-missing"], first["both"]])
    for name, fields in {"k-access": {"acl_tags": ["wiki/everybody"]}, "k-text": {"text": "Other words."}}.items():
        version, body = await audited.entry(first[name])
        await audited.write_entry(first[name], version, {**body, **fields})
    for name in ("v-missing", "v-both", "both"):
        await audited.library.execute(f"DELETE FROM {audited.table} WHERE id = %s", first[name])
    for name in ("v-access", "v-both"):
        await audited.library.execute(
            f"UPDATE {audited.table} SET access_id = %s WHERE document_id = %s", nobody, id_of(name)
        )
    await audited.library.execute(copy, uuid4(), id_of("v-orphan"), first["sound"])
    unheard = uuid4()
    await audited.library.execute(copy, uuid4(), unheard, first["sound"])
    version, body = await audited.entry(first["sound"])
    await audited.write_entry(uuid4(), version, {**body, "document_id": str(unheard)})
    before = len(audited.embedder.texts)

    metrics = Metrics()
    audit = background(audited, metrics)
    await finish_round(audited, audit)
    await audited.waking.rest()
    needing = {("v-missing", "missing"), ("v-both", "missing"), ("v-both", "wrong_access"), ("both", "missing")}
    assert (await audited.audit())[1] == {(name, "vectors", kind) for name, kind in needing}
    assert len(audited.embedder.texts) == before
    await finish_round(audited, audit)
    assert divergent(metrics) == {("vectors", "missing"): 3, ("vectors", "wrong_access"): 1}


async def test_an_audit_page_queries_each_store_once_however_many_documents_it_has(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Counter[str] = Counter()
    transport, execute = audited.library.es.transport, AsyncCursor.execute
    perform = transport.perform_request

    async def counted_request(method: str, target: str, *arguments: Any, **more: Any) -> Any:
        requests[f"{method} {target.partition('?')[0]}"] += 1
        return await perform(method, target, *arguments, **more)

    async def counted_statement(cursor: AsyncCursor[Any], query: Any, *arguments: Any, **more: Any) -> AsyncCursor[Any]:
        requests["statements"] += "pg_control_system" not in str(
            query
        )  # the fence's look depends on a connection's age
        return await execute(cursor, query, *arguments, **more)

    async def page() -> dict[str, int]:
        """Return the numbers of queries of the first page of a new round."""
        await audited.library.execute("DELETE FROM audit_runs")
        audit = background(audited, Metrics(), limits=LIMITS)
        with monkeypatch.context() as patched:
            patched.setattr(transport, "perform_request", counted_request)
            patched.setattr(AsyncCursor, "execute", counted_statement)
            requests.clear()
            await audit.turn()
        return dict(requests)

    await audited.library.put(*named("d0"))
    one = await page()
    await audited.library.put(*(document(f"d{n}", f"All that there is to say about {n}.") for n in range(150)))
    many = await page()
    assert many.pop("statements") <= one.pop("statements") + 3, "a connection that is new to the pool asks more"
    assert many == one
    [(documents, chunks)] = await audited.library.execute("SELECT documents, chunks FROM audit_runs")
    assert (documents, chunks) == (150, 150)
    assert one == {f"POST /{audited.index}/_search": 1}


async def test_workers_share_the_position_and_pace_of_the_background_audit(audited: Audited) -> None:
    await audited.library.put(*named(*(f"d{n}" for n in range(20))))
    metrics = Metrics()
    first, second = background(audited, metrics, pace=2.0), background(audited, metrics, pace=2.0)
    waits = await asyncio.gather(first.turn(), second.turn(), first.turn())
    assert max(waits) > 2, "seven documents at two a second"
    [(documents, _)] = await rounds(audited)
    assert 0 < documents <= SMALL.documents, "one page was due, whoever asked"
    async with audited.library.pool.connection() as connection:
        run, due = await runs.background(connection)
    assert run is not None
    assert run.position is not None
    assert due > 1


async def test_the_background_audit_waits_out_an_outage(audited: Audited) -> None:
    await audited.library.put(*named("a"))
    audit = background(audited, Metrics())
    running = asyncio.create_task(audit.run())
    await audited.library.es.indices.delete(index=audited.index)
    await asyncio.sleep(1)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
