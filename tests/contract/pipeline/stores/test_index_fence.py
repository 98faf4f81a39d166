"""Elasticsearch's index is another one than the ledger filled: it is not searched until all is as it was, by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from deploy.local.stack import Stack
from pipeline.audit.refill import IndexGuard
from pipeline.core.errors import IndexFenced, Misconfigured
from pipeline.core.identity import document_id
from pipeline.diagnosis.ledger import ledger_report
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores import index_fence
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.keywords import Keywords
from query.embedding.embedders import QueryEmbedder
from query.model import SearchResults
from query.retrieval import stores as offers
from query.retrieval.search import Search
from query.settings import RetrievalSettings
from tests.support.pipeline.audit_kit import Audited, text
from tests.support.query.http_kit import World, as_, problem
from tests.support.query.library import WordEmbedder, access, deletion, document

pytestmark = pytest.mark.stack

SNAPSHOTS = "keyword-index-snapshots"


@pytest.fixture
async def audited(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Audited]:
    monkeypatch.setattr(offers, "INDEX_CHECK_SECONDS", 0.0)
    async with Audited.create(stack) as audited:
        yield audited


def guard_of(audited: Audited) -> IndexGuard:
    producer: Any = audited.waking
    return IndexGuard(
        audited.library.pool,
        audited.library.es,
        Keywords(audited.library.es),
        producer,
        audited.library.metrics,
        look_seconds=0.05,
        confirm_seconds=0.0,
    )


async def change_of(audited: Audited) -> str | None:
    [(change,)] = await audited.library.execute("SELECT change FROM keyword_indexes")
    assert change is None or isinstance(change, str)
    return change


async def search(audited: Audited, mode: Any = "hybrid") -> SearchResults:
    library = audited.library
    caller = await library.caller("acme", "wiki/staff", "wiki/board")
    forgetful = RetrievalSettings(cached_queries=0)
    searcher = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), settings=forgetful)
    return await searcher.search("length", caller, mode=mode, top=50)


def result_ids(response: SearchResults) -> set[str]:
    return {result.passage.external_id for result in response.results}


async def entries(audited: Audited, name: str) -> dict[UUID, dict[str, Any]]:
    """Return the entries of a document that a client finds which reads the index directly."""
    await audited.library.es.indices.refresh(index=audited.index)
    query = {"term": {"document_id": str(document_id("acme", "wiki", name))}}
    answer = await audited.library.es.search(index=audited.index, query=query, size=100)
    return {UUID(hit["_id"]): hit["_source"] for hit in answer["hits"]["hits"]}


class Remade:
    """It is deleted, and made anew as `penstock migrate` would."""

    expected = "recreated"

    async def before(self, audited: Audited) -> None:
        pass

    async def happens(self, audited: Audited) -> None:
        await audited.library.es.indices.delete(index=audited.index)
        await create_index(audited.library.es, audited.index)

    async def aclose(self, audited: Audited) -> None:
        pass


class Restored(Remade):
    """A snapshot takes its place."""

    def __init__(self) -> None:
        self.name = f"s{uuid4().hex[:8]}"

    async def before(self, audited: Audited) -> None:
        es = audited.library.es.options(request_timeout=60)
        await es.snapshot.create_repository(
            name=SNAPSHOTS, repository={"type": "fs", "settings": {"location": SNAPSHOTS}}
        )
        await es.snapshot.create(
            repository=SNAPSHOTS,
            snapshot=self.name,
            indices=audited.index,
            include_global_state=False,
            wait_for_completion=True,
        )

    async def happens(self, audited: Audited) -> None:
        await audited.library.es.indices.delete(index=audited.index)
        await self.restore(audited)

    async def restore(self, audited: Audited) -> None:
        await audited.library.es.options(request_timeout=60).snapshot.restore(
            repository=SNAPSHOTS,
            snapshot=self.name,
            indices=audited.index,
            include_global_state=False,
            wait_for_completion=True,
        )

    async def aclose(self, audited: Audited) -> None:
        await audited.library.es.snapshot.delete(repository=SNAPSHOTS, snapshot=self.name)


class RestoredOver(Restored):
    """A snapshot is restored into the closed index, whose UUID stays."""

    expected = "new_history"

    async def happens(self, audited: Audited) -> None:
        await audited.library.es.indices.close(index=audited.index)
        await self.restore(audited)


@asynccontextmanager
async def prepared(audited: Audited, incident: Remade) -> AsyncIterator[None]:
    """A library of every kind of change since the snapshot, one of them still on its way to the stores."""
    names = ("same", "edited", "revoked", "narrowed", "deleted", "on-its-way")
    old = {name: document(name, text(name)) for name in names}
    await audited.library.put(*old.values())
    await incident.before(audited)
    try:
        await audited.library.put(document("edited", text("edited").replace("part 1", "chapter 1")))
        await audited.library.put(access(old["revoked"], []), access(old["narrowed"], ["board"]))
        await audited.library.put(deletion(old["deleted"]), document("new", text("new")))
        edited = text("on-its-way").replace("part 2", "chapter 2")
        await audited.library.put(document("on-its-way", edited))
        await audited.library.accept(document("on-its-way", edited.replace("part 0", "chapter 0")))
        yield
    finally:
        await incident.aclose(audited)


@pytest.mark.parametrize("incident", [Remade(), Restored(), RestoredOver()], ids=lambda one: type(one).__name__)
async def test_a_replaced_index_is_not_searched_until_it_matches_the_ledger_again(
    audited: Audited, incident: Remade
) -> None:
    guard = guard_of(audited)
    async with prepared(audited, incident):
        assert await guard.look() == []
        before = result_ids(await search(audited, mode="keyword"))
        assert before == {"same", "edited", "narrowed", "on-its-way", "new"}
        embedded = len(audited.embedder.texts)
        await incident.happens(audited)

        for _ in range(2):  # before any worker has noticed it, and after
            response = await search(audited)
            assert "not searched until" in str(next(s for s in response.steps if s.name == "keywords").facts["reason"])
            assert response.degraded, "results of vectors alone are reported as degraded"
            with pytest.raises(IndexFenced, match="`penstock audit --repair`"):
                await search(audited, mode="keyword")
            [known] = await guard.look()
            assert known.change == incident.expected
        assert await guard.finish(30)
        await audited.waking.rest()

        assert await change_of(audited) is None
        assert result_ids(await search(audited, mode="keyword")) == before
        assert not (await search(audited)).degraded
        assert len(audited.embedder.texts) == embedded + 1, "nothing but the edit that was on its way"
        for name in ("revoked", "deleted"):
            assert await entries(audited, name) == {}, "nor does a reader of the index see what is gone"
        assert {tag for e in (await entries(audited, "narrowed")).values() for tag in e["acl_tags"]} == {"wiki/board"}
        await audited.library.converge(document_id("acme", "wiki", "on-its-way"))
        assert (await audited.audit())[1] == set()
    counted = audited.library.metrics.registry.get_sample_value
    assert counted("penstock_keyword_index_changes_total", {"change": incident.expected}) == 1
    assert counted("penstock_keyword_index_fenced") == 0


async def test_an_index_recreated_during_writes_is_filled_again(audited: Audited) -> None:
    library, stop = audited.library, asyncio.Event()
    await library.put(*(document(f"old{n}", text(f"old{n}")) for n in range(20)))
    guard = asyncio.create_task(guard_of(audited).run())

    async def until(change: str | None) -> None:
        async with asyncio.timeout(60):
            while await library.execute("SELECT change FROM keyword_indexes") != [(change,)]:
                await asyncio.sleep(0.05)

    async def write() -> int:
        n = 0
        while not stop.is_set():
            [id_] = await library.accept(document(f"old{n % 20}", text(f"old{n % 20} {n}")))
            n += 1
            while True:
                try:
                    await library.converge(id_)
                    break
                except Misconfigured:  # there is no index at this moment: what a worker does then is to wait
                    await asyncio.sleep(0.05)
        return n

    await until(None)
    writing = asyncio.create_task(write())
    await Remade().happens(audited)
    await until("recreated")
    await until(None)
    stop.set()
    assert await writing > 0
    await audited.waking.rest()
    await cancel_and_wait([guard])
    assert (await audited.audit())[1] == set()
    assert result_ids(await search(audited, mode="keyword")) == {f"old{n}" for n in range(20)}


async def test_a_second_index_change_restarts_the_comparison(audited: Audited) -> None:
    await audited.library.put(*(document(f"d{n}", text(f"d{n}")) for n in range(5)))
    guard = guard_of(audited)
    await guard.look()
    await Remade().happens(audited)
    await guard.look()
    for _ in range(2):
        await guard.turn()
    await audited.waking.rest()
    [known] = await guard.look()
    assert known.compared
    await Remade().happens(audited)
    [known] = await guard.look()
    assert not known.compared
    assert await guard.finish(30)
    await audited.waking.rest()
    assert (await audited.audit())[1] == set()


async def test_a_fenced_index_is_not_searched_before_its_missing_entries_are_written(audited: Audited) -> None:
    await audited.library.put(document("d", text("d")))
    guard = guard_of(audited)
    await guard.look()
    await Remade().happens(audited)
    audited.waking.asleep = True
    assert not await guard.finish(0.2)
    with pytest.raises(IndexFenced):
        await search(audited, mode="keyword")
    await audited.library.converge(*audited.waking.hinted)
    assert await guard.finish(30)
    assert result_ids(await search(audited, mode="keyword")) == {"d"}


async def test_a_shard_that_lost_operations_is_detected(audited: Audited) -> None:
    """As when the disk of a node was set back. (Here the ledger is told of operations that never were.)"""
    await audited.library.put(document("d", text("d")))
    guard = guard_of(audited)
    await guard.look()
    await audited.library.put(document("e", text("e")))
    await guard.look()
    [(shards,)] = await audited.library.execute("SELECT shards FROM keyword_indexes")
    assert shards["0"][1] >= 5, "each operation has a number"
    await audited.library.execute("UPDATE keyword_indexes SET shards = jsonb_set(shards, '{0,1}', '1000')")
    with pytest.raises(IndexFenced):
        await search(audited, mode="keyword")
    assert [known.change for known in await guard.look()] == ["rewound"]
    assert await guard.finish(30)
    assert (await audited.audit())[1] == set()


async def test_routine_index_maintenance_is_not_reported_as_a_change(audited: Audited) -> None:
    es, index = audited.library.es, audited.index
    guard = guard_of(audited)
    await audited.library.put(document("d", text("d")))
    await guard.look()
    await es.indices.forcemerge(index=index, max_num_segments=1)
    await es.indices.flush(index=index, force=True)
    await es.indices.put_settings(index=index, settings={"number_of_replicas": 1})
    await es.indices.close(index=index)
    await es.indices.open(index=index, wait_for_active_shards="1")
    assert await guard.look() == []
    assert await change_of(audited) is None


async def test_an_unavailable_index_does_not_delay_the_comparison_of_another(audited: Audited) -> None:
    library = audited.library
    await library.put(document("d", text("d")))
    guard = guard_of(audited)
    await guard.look()
    await library.execute(
        "INSERT INTO generations SELECT (jsonb_populate_record(g, jsonb_build_object("
        " 'name', 'a', 'keyword_index', 'a-that-is-away', 'chunk_table', 'a', 'state', 'building'))).*"
        " FROM generations g"
    )
    await library.execute(
        "INSERT INTO keyword_indexes (keyword_index, index_uuid, shards, changes, change, changed_at)"
        " VALUES ('a-that-is-away', 'uuid', '{}', 1, 'recreated', now())"
    )
    await Remade().happens(audited)
    for n in range(3):
        stranger = {"document_id": str(document_id("x", "y", f"{n}"))}
        await library.es.index(index=audited.index, id=str(uuid4()), document=stranger)
    with pytest.raises(Misconfigured, match="a-that-is-away"):
        await guard.finish(30)
    await audited.waking.rest()
    assert result_ids(await search(audited, mode="keyword")) == {"d"}
    assert await Keywords(library.es).count(audited.index) == len(await entries(audited, "d")), "no stranger is left"


async def test_a_worker_without_repair_reports_a_fenced_index(audited: Audited) -> None:
    await audited.library.put(document("d", text("d")))
    looking = guard_of(audited)
    looking._repairs = False
    await looking.look()
    await Remade().happens(audited)
    registry = audited.library.metrics.registry
    running = asyncio.create_task(looking.run())
    async with asyncio.timeout(60):
        while registry.get_sample_value("penstock_keyword_index_fenced") != 1:
            await asyncio.sleep(0.05)
    await cancel_and_wait([running])
    assert audited.waking.hinted == []
    away: list[str] = []
    await ledger_report(audited.library.settings.postgres, {}, away)
    [line] = [line for line in away if audited.index in line]
    assert "changed (recreated" in line
    assert "0% compared: it is not searched until then" in line


async def test_an_index_without_a_recorded_state_is_searched(audited: Audited) -> None:
    await audited.library.put(document("d", text("d")))
    assert result_ids(await search(audited, mode="keyword")) == {"d"}
    async with audited.library.pool.connection() as connection:
        assert await index_fence.load(connection, audited.index) is None


@pytest.mark.asyncio(loop_scope="module")
async def test_the_query_service_answers_without_a_fenced_keyword_index_and_says_why(
    world: World, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "INDEX_CHECK_SECONDS", 0.0)
    library = world.library
    await library.put(document("a.md", "The harbour.", tenant=tenant, acl_tags=["user:ann"]))
    producer: Any = None
    guard = IndexGuard(library.pool, library.es, Keywords(library.es), producer, library.metrics, confirm_seconds=0.0)
    assert await guard.look() == []

    tops = iter(range(1, 50))  # so that no answer is a remembered one

    async def ask(mode: str) -> Any:
        question = {"query": "harbour", "mode": mode, "top": next(tops)}
        return await world.client.post("/v1/search", json=question, headers=as_("ann", tenant))

    async def fenced() -> float:
        lines = (await world.client.get("/metrics")).text.splitlines()
        [line] = [line for line in lines if line.startswith("penstock_query_keyword_index_fenced ")]
        return float(line.split()[1])

    assert (await ask("keyword")).status_code == 200
    await library.execute("UPDATE keyword_indexes SET index_uuid = 'another'")
    try:
        answer = await ask("keyword")
        assert problem(answer) == (503, "index-fenced")
        assert "`penstock audit --repair`" in answer.json()["detail"]
        answer = (await ask("hybrid")).json()
        assert [result["external_id"] for result in answer["results"]] == ["a.md"]
        [reason] = [step["reason"] for step in answer["steps"] if step["step"] == "keywords"]
        assert "not searched until" in reason
        assert await fenced() == 1
        async with asyncio.timeout(30):
            while "keywords fenced" not in (await world.client.get("/readyz")).text:
                await asyncio.sleep(0.1)
    finally:
        [(uuid,)] = [
            (index["settings"]["index"]["uuid"],)
            for index in (await library.es.indices.get(index=library.generation.keyword_index)).body.values()
        ]
        await library.execute("UPDATE keyword_indexes SET index_uuid = %s", uuid)
    assert (await ask("keyword")).status_code == 200
    assert await fenced() == 0
