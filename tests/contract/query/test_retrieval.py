"""Answers that are remembered, and searches that are given up, on the real servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import uuid4

import pytest

from pipeline.embedding.port import Vectors
from query.access.callers import Caller
from query.access.filters import Filters
from query.embedding.embedders import QueryEmbedder
from query.model import SearchResults
from query.retrieval.search import Search
from query.retrieval.stores import Stores
from query.settings import RetrievalSettings
from query.telemetry import QueryMetrics
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from topics.messages import DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


class CountingEmbedder(WordEmbedder):
    def __init__(self) -> None:
        self.texts: list[str] = []

    async def embed_query(self, text: str) -> Vectors:
        self.texts.append(text)
        return self._vector(text)


class Desk:
    """One tenant of the library, a search of its own, and how often that had to work."""

    def __init__(self, library: Library, settings: RetrievalSettings | None = None) -> None:
        self.library = library
        self.tenant = f"t{uuid4().hex[:8]}"
        self.metrics = QueryMetrics()
        self.model = CountingEmbedder()
        self.search = Search(
            library.pool, library.es, QueryEmbedder(lambda: self.model), settings=settings, metrics=self.metrics
        )

    async def ask(self, query: str, *tags: str, filters: Filters | None = None) -> list[str]:
        response = await self.search_as(query, await self.library.caller(self.tenant, *tags), filters=filters)
        return sorted(result.passage.title for result in response.results)

    async def search_as(self, query: str, caller: Caller, *, filters: Filters | None = None) -> SearchResults:
        return await self.search.search(query, caller, filters=filters or Filters())

    def hits(self, cache: str = "results") -> int:
        value = self.metrics.registry.get_sample_value("penstock_query_cache_total", {"cache": cache, "outcome": "hit"})
        return int(value or 0)


@pytest.fixture
def desk(library: Library) -> Desk:
    return Desk(library)


async def test_a_repeated_question_is_answered_from_the_cache(desk: Desk) -> None:
    await desk.library.put(document("a.md", "Moss on the lock gates.", tenant=desk.tenant))
    caller = await desk.library.caller(desk.tenant, "staff")
    first = await desk.search_as("moss lock", caller)
    second = await desk.search_as("moss lock", caller)
    assert (desk.hits(), desk.model.texts) == (1, ["moss lock"])
    assert second.results == first.results
    assert second.relevant

    def step_facts(response: SearchResults) -> list[tuple[str, dict[str, object]]]:
        return sorted((step.name, dict(step.facts)) for step in response.steps)

    assert step_facts(second) == step_facts(first), "the steps do not show whether somebody searched before"
    assert await desk.ask("moss lock", "staff", filters=Filters(sources=("drive",))) == []
    assert await desk.ask("moss gates", "staff") == ["a.md"]
    assert desk.hits() == 1


async def test_cached_results_are_not_shared_between_different_access(desk: Desk) -> None:
    await desk.library.put(
        document("open.md", "Ferns by the mill.", tenant=desk.tenant),
        document("closed.md", "Ferns in the mill's cellar.", tenant=desk.tenant, acl_tags=["board"]),
    )
    assert await desk.ask("ferns mill", "staff", "board") == ["closed.md", "open.md"]
    assert await desk.ask("ferns mill", "staff") == ["open.md"]
    assert await desk.ask("ferns mill", "nobody") == []
    assert await desk.ask("ferns mill", "board") == ["closed.md"]
    assert desk.hits() == 0
    assert await desk.ask("ferns mill", "staff", "of nothing here") == ["open.md"]
    assert desk.hits() == 1, "the same may be read: the same access set"


ONE = ("one.md", "Reeds along the towpath.")
TWO = ("two.md", "Reeds and herons along the towpath too.")


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    "what", ["deleted", "revoked", "restricted", "edited", "renamed", "added", "opened", "nothing"]
)
async def test_a_cached_result_is_dropped_when_its_documents_change(desk: Desk, what: str, settled: bool) -> None:
    """settled: the stores have followed too; else only the ledger knows."""
    tenant = desk.tenant
    one, two = document(*ONE, tenant=tenant), document(*TWO, tenant=tenant, acl_tags=["staff", "board"])
    shut = document("shut.md", "Reeds behind the fence of the towpath.", tenant=tenant, acl_tags=["board"])
    await desk.library.put(one, two, shut)
    before = ["one.md", "two.md"]
    assert await desk.ask("reeds towpath", "staff") == before
    assert await desk.ask("reeds towpath", "staff") == before
    assert desk.hits() == 1
    event, after = {
        "deleted": (deletion(one), ["two.md"]),
        "revoked": (access(one, ["board"]), ["two.md"]),
        "restricted": (access(one, ["staff"], ["restriction-1"]), ["two.md"]),
        "edited": (document("one.md", "Nothing of the kind.", tenant=tenant), ["two.md"]),
        # A short document is embedded with its title: its chunks are others now, which no store has yet (ADR 93).
        "renamed": (document(*ONE, tenant=tenant, title="New"), ["New", "two.md"] if settled else ["two.md"]),
        "added": (document("new.md", "Reeds, reeds, and the towpath.", tenant=tenant), ["new.md", *before]),
        "opened": (access(shut, ["staff"]), ["one.md", "shut.md", "two.md"]),
        "nothing": (document(*ONE, tenant=tenant), before),
    }[what]
    if settled:
        await desk.library.put(event)
    else:
        await desk.library.accept(event)
    results = await desk.ask("reeds towpath", "staff")
    if settled or what not in ("added", "opened"):
        assert [name for name in results if name != "one.md" or what != "edited"] == after
        fresh = Desk(desk.library, RetrievalSettings(cached_queries=0))
        fresh.tenant = tenant
        assert results == await fresh.ask("reeds towpath", "staff"), "as it is without a cache"
    else:
        assert results == before, "what becomes readable may wait until a store has followed"


async def test_a_cached_result_has_the_headings_that_its_document_has_now(desk: Desk) -> None:
    """One that was removed was shown above the text below it for as long as the stores had not followed."""
    herons = "\n\n".join(f"Heron {n} stood by the weir and looked at the water for a while." for n in range(60))
    reeds = " ".join(f"Reeds of kind {n} line the towpath." for n in range(20))

    def page(heading: str) -> DocumentUpserted:
        return document("a.md", f"# {heading}\n\n{herons}\n\n{reeds}", tenant=desk.tenant)

    async def headings() -> set[tuple[str, ...]]:
        caller = await desk.library.caller(desk.tenant, "staff")
        return {result.headings for result in (await desk.search.search("reeds", caller, mode="keyword")).results}

    await desk.library.put(page("Secret"))
    assert await headings() == {("Secret",)}
    await desk.library.accept(page("Open"))
    assert await headings() == {("Open",)}
    assert desk.hits() == 1


async def test_cached_results_are_not_used_after_the_caller_left_a_group(desk: Desk) -> None:
    await desk.library.put(document("a.md", "Rota of the lock keepers.", tenant=desk.tenant, acl_tags=["crew"]))

    async def reads() -> list[str]:
        caller = await desk.library.caller(desk.tenant, principals=["ann"])
        return [result.passage.title for result in (await desk.search_as("rota keepers", caller)).results]

    await desk.library.execute(
        "INSERT INTO memberships (tenant, source, principal, groups, observed_at)"
        " VALUES (%s, 'wiki', 'ann', %s, now())",
        desk.tenant,
        ["crew"],
    )
    assert [await reads(), await reads()] == [["a.md"], ["a.md"]]
    await desk.library.execute("UPDATE memberships SET groups = '{}' WHERE tenant = %s", desk.tenant)
    assert await reads() == []


async def test_a_cached_result_is_recomputed_after_a_store_settled_in_an_older_transaction(desk: Desk) -> None:
    """A change in a transaction that began before the result was cached and ended after it drops the result."""
    library, tenant = desk.library, desk.tenant
    await library.put(document("a.md", "Willows at the bend.", tenant=tenant))
    [(id_,)] = await library.execute("SELECT id FROM documents WHERE tenant = %s", tenant)
    async with library.pool.connection() as slow:
        await slow.execute("UPDATE index_state SET settled_at = clock_timestamp() WHERE document_id = %s", [id_])
        assert await desk.ask("willows bend", "staff") == ["a.md"]
        assert await desk.ask("willows bend", "staff") == ["a.md"]
        assert desk.hits() == 1
    assert await desk.ask("willows bend", "staff") == ["a.md"]
    assert desk.hits() == 1, "worked out anew"
    assert await desk.ask("willows bend", "staff") == ["a.md"]
    assert desk.hits() == 2


async def test_a_store_that_settles_during_a_search_invalidates_its_cached_result(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search had asked the stores by then, and lacks what they have now."""
    await desk.library.put(document("a.md", "Teal on the mere.", tenant=desk.tenant))
    offers = Stores.offers

    async def then_settles(stores: Stores, *arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(Stores, "offers", offers)
        before = await offers(stores, *arguments, **named)
        await desk.library.put(document("b.md", "Teal and geese on the mere.", tenant=desk.tenant))
        return before

    monkeypatch.setattr(Stores, "offers", then_settles)
    assert await desk.ask("teal mere", "staff") == ["a.md"]
    assert await desk.ask("teal mere", "staff") == ["a.md", "b.md"]


async def test_changes_of_unreadable_documents_do_not_invalidate_cached_results(desk: Desk) -> None:
    """Else the time of an answer would tell."""
    await desk.library.put(document("a.md", "Sedge in the pond.", tenant=desk.tenant))
    assert await desk.ask("sedge pond", "staff") == ["a.md"]
    await desk.library.put(
        document("b.md", "Sedge in the pond, in secret.", tenant=desk.tenant, acl_tags=["board"]),
        document("c.md", "Sedge in the pond.", tenant="another"),
    )
    assert await desk.ask("sedge pond", "staff") == ["a.md"]
    assert desk.hits() == 1


async def test_degraded_results_are_not_cached(desk: Desk) -> None:
    await desk.library.put(document("a.md", "Rushes.", tenant=desk.tenant))
    index = desk.library.generation.keyword_index
    await desk.library.es.indices.close(index=index)
    try:
        caller = await desk.library.caller(desk.tenant, "staff")
        assert (await desk.search_as("rushes", caller)).degraded
    finally:
        await desk.library.es.indices.open(index=index)
    await desk.library.es.cluster.health(index=index, wait_for_status="green", timeout="30s")
    assert (await desk.search_as("rushes", caller)).degraded == ()
    assert desk.hits() == 0


async def test_the_number_of_cached_results_is_limited_by_the_setting(library: Library) -> None:
    small = Desk(library, RetrievalSettings(cached_queries=2))
    for query in ("a", "b", "c", "a"):
        await small.ask(query, "staff")
    assert small.hits() == small.hits("embeddings") == 0
    await small.ask("a", "staff")
    assert small.hits() == small.hits("embeddings") == 1


# Given up


class SlowEmbedder(WordEmbedder):
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    async def embed_query(self, text: str) -> Vectors:
        await asyncio.sleep(self._dice.uniform(0, 0.03))
        return self._vector(text)


async def test_cancelled_searches_leave_no_connection_or_task_behind(library: Library) -> None:
    """200 of them, each after a time of its own: every pool connection and every one to Elasticsearch comes back."""
    tenant = f"t{uuid4().hex[:8]}"
    await library.put(*(document(f"{n}.md", f"Otters at weir {n}.", tenant=tenant) for n in range(5)))
    caller = await library.caller(tenant, "staff")
    dice = random.Random(5)
    search = Search(library.pool, library.es, QueryEmbedder(lambda: SlowEmbedder(dice)))
    assert (await search.search("otters", caller)).results
    tasks_before = len(asyncio.all_tasks())

    async def cancelled_search(n: int) -> bool:
        task = asyncio.create_task(search.search(f"otters {n}", caller))
        await asyncio.sleep(dice.uniform(0, 0.15))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    cancelled = 0
    for _ in range(10):
        cancelled += sum(await asyncio.gather(*(cancelled_search(n) for n in range(20))))
    assert cancelled > 20, "too few were still at work to prove anything"

    assert (await search.search("otters weir", caller)).degraded == ()
    async with asyncio.timeout(30):  # what was cut off in the middle of a statement is replaced
        while (stats := library.pool.get_stats())["pool_available"] < stats["pool_size"]:
            await asyncio.sleep(0.05)
    assert stats.get("requests_waiting", 0) == 0
    for node in library.es.transport.node_pool.all():
        assert not node.session._connector._acquired  # type: ignore[attr-defined]
    assert len(asyncio.all_tasks()) <= tasks_before


async def test_no_postgres_connection_is_held_while_waiting_for_the_embedding_model(library: Library) -> None:
    caller = await library.caller(f"t{uuid4().hex[:8]}", "staff")
    waiting, go_on = asyncio.Event(), asyncio.Event()

    class Waiting(WordEmbedder):
        async def embed_query(self, text: str) -> Vectors:
            await asyncio.sleep(0.3)  # the keyword half has come to its end
            waiting.set()
            await go_on.wait()
            return self._vector(text)

    search = Search(library.pool, library.es, QueryEmbedder(Waiting))
    task = asyncio.create_task(search.search("otters", caller))
    await waiting.wait()
    stats = library.pool.get_stats()
    assert stats["pool_available"] == stats["pool_size"]
    go_on.set()
    assert (await task).degraded == ()


async def test_a_task_cancelled_while_returning_a_connection_still_returns_it(library: Library) -> None:
    pool = library.pool
    holding, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with pool.connection():
            holding.set()
            await go_on.wait()

    task = asyncio.create_task(hold())
    await holding.wait()
    async with pool._lock:  # as if another one were giving back
        go_on.set()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(10):
        while (stats := pool.get_stats())["pool_available"] < stats["pool_size"]:
            await asyncio.sleep(0.02)


async def test_a_task_cancelled_during_a_pipeline_leaves_a_usable_connection(library: Library) -> None:
    pool, dice = library.pool, random.Random(7)

    async def pipelined() -> None:
        async with pool.connection() as connection, connection.pipeline(), connection.transaction():
            await connection.execute("SELECT pg_sleep(0.004)")
            await (await connection.execute("SELECT pg_sleep(0.004)")).fetchall()

    async def cancelled_search() -> None:
        task = asyncio.create_task(pipelined())
        await asyncio.sleep(dice.uniform(0, 0.03))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(60):
        await asyncio.gather(*(cancelled_search() for _ in range(8)))
        async with asyncio.timeout(10):
            while (stats := pool.get_stats())["pool_available"] < stats["pool_size"]:
                await asyncio.sleep(0.02)
        for _ in range(stats["pool_size"]):
            async with pool.connection() as connection:
                assert (await connection.execute("SELECT 1")).description, "it was answered at once"
