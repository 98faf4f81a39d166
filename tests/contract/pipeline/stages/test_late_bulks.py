"""A bulk request that reaches Elasticsearch after its worker died and after the delete that it is older than was
forgotten. Real Postgres and Elasticsearch; a proxy holds the requests of the worker that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.ledger import bulks
from pipeline.ledger.bulks import Entry
from pipeline.observability.metrics import Metrics
from pipeline.stages.keywords import KeywordSink, LateBulks
from pipeline.stores.elasticsearch import GC_DELETES, connect, create_index
from pipeline.stores.keywords import Keywords, Write
from tests.faults.elasticsearch_proxy import Bulk, ElasticsearchProxy, elasticsearch_proxy
from tests.support.query.library import Library, WordEmbedder, deletion, document
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PATIENCE_SECONDS = 60.0


@dataclass
class Site:
    library: Library
    es_proxy: ElasticsearchProxy
    doomed: KeywordSink
    """A worker that reaches Elasticsearch through the proxy."""
    keywords: Keywords
    """The store, without the proxy."""

    async def send(self, *ids: Any, bulk: Bulk) -> asyncio.Task[None]:
        """Let the doomed worker converge while the proxy treats its request as ``bulk`` says; returns once it has."""
        self.es_proxy.next_bulk, self.es_proxy.unanswered = bulk, None
        working = asyncio.create_task(self.doomed.converge(self.library.generation, ids))
        held = asyncio.create_task(self.es_proxy.holding.wait())
        await asyncio.wait([working, held], return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        return working

    async def forget_deletes(self) -> None:
        """Return when Elasticsearch has forgotten the versions of all that was deleted until now.

        An old tombstone counts as forgotten while ``gc_deletes`` is short, and again as known once it is long, unless a
        refresh has removed it in between: so that is asked for under the long one, of a tombstone that is newer."""
        es, index = self.library.es, self.library.generation.keyword_index
        id_ = uuid4()
        body = {"document_id": str(id_), "tenant": "probe", "text": "probe"}
        await self.keywords.apply([Write(index, id_, 2, body)])
        await self.keywords.apply([Write(index, id_, 3, None)])
        while [o.result for o in await self.keywords.apply([Write(index, id_, 2, body)])] == ["stale"]:
            await es.indices.put_settings(index=index, settings={"index.gc_deletes": "1s"})
            await asyncio.sleep(0.5)
            await es.indices.refresh(index=index)
            await es.indices.put_settings(index=index, settings={"index.gc_deletes": GC_DELETES})
        await self.keywords.apply([Write(index, id_, 3, None)])

    async def entries(self, *ids: Any) -> int:
        await self.library.es.indices.refresh(index=self.library.generation.keyword_index)
        counts = [len(await self.keywords.versions(self.library.generation.keyword_index, id_)) for id_ in ids]
        return sum(counts)

    async def open_bulks(self) -> int:
        [(count,)] = await self.library.execute("SELECT count(*) FROM open_bulks")
        return int(count)

    @asynccontextmanager
    async def another_worker(self, **seconds: float) -> AsyncIterator[LateBulks]:
        """Run the background work of a keywords worker with the given pauses."""
        late = LateBulks(self.library.pool, self.keywords, Metrics(), interval_seconds=0.1, **seconds)
        running = asyncio.create_task(late.run())
        try:
            yield late
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def built(stack: Stack) -> AsyncIterator[Site]:
    async with (
        Library.create(stack, WordEmbedder()) as library,
        elasticsearch_proxy(library.settings.elasticsearch.url) as es_proxy,
    ):
        own, through_proxy = (
            Keywords(connect(library.settings.elasticsearch)),
            connect(library.settings.elasticsearch.model_copy(update={"url": es_proxy.url})),
        )
        store, healthy = Keywords(through_proxy, retry_seconds=5), library.keywords

        async def known() -> Any:
            return {library.generation.name: library.generation}

        doomed = KeywordSink(
            library.pool, store, known, healthy._chunker, healthy._announcer, healthy._dead, Metrics(), batch_size=8
        )
        try:
            yield Site(library, es_proxy, doomed, own)
        finally:
            await es_proxy.release()
            await store.aclose()
            await own.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def site(built: Site) -> Site:
    await built.library.execute("TRUNCATE open_bulks")
    return built


async def test_a_deleted_text_restored_by_a_dead_workers_late_bulk_is_removed_again(site: Site) -> None:
    library = site.library
    one = document("late.md", "The plans of the merger are for the board alone.")
    ids = await library.accept(one)
    dead = await site.send(*ids, bulk="hold")  # the request is on its way, and its worker never hears of it
    held, site.es_proxy.held = site.es_proxy.held, []
    dead.cancel()
    await asyncio.wait([dead])

    await library.put(deletion(one))
    assert await site.entries(*ids) == 0
    await site.forget_deletes()
    for request in held:
        request.set()
    await until(lambda: _equals(site.entries(*ids), 1))  # accepted, for Elasticsearch knows nothing of a delete

    await library.execute("UPDATE open_bulks SET next_at = now()")
    async with site.another_worker():
        await until(lambda: _equals(site.entries(*ids), 0))
    assert await site.open_bulks() == 1, "it may have been sent twice: it is watched until it can no longer arrive"


async def test_deletes_are_repeated_so_that_elasticsearch_rejects_a_late_bulk(site: Site) -> None:
    """Nobody ever sees the entry: the delete is repeated before Elasticsearch forgets it."""
    library, index = site.library, site.library.generation.keyword_index
    one = document("refused.md", "The plans of the second merger.")
    ids = await library.accept(one)
    with pytest.raises(Retryable):
        await (await site.send(*ids, bulk="late"))
    await library.put(deletion(one))
    await site.forget_deletes()
    late = LateBulks(library.pool, site.keywords, Metrics())
    await library.execute("UPDATE open_bulks SET next_at = now()")
    assert await late.check_due() == 0, "nothing had arrived"
    await site.es_proxy.release()
    assert await site.entries(*ids) == 0
    assert (await library.es.indices.get_settings(index=index))[index]["settings"]["index"]["gc_deletes"] == GC_DELETES


async def test_an_answered_bulk_is_not_recorded_as_open(site: Site) -> None:
    library = site.library
    one = document("answered.md", "Everything went well.")
    await library.put(one)
    await library.put(deletion(one))
    assert await site.open_bulks() == 0


async def test_desired_entries_of_a_late_bulk_stay_and_an_expired_bulk_is_forgotten(site: Site) -> None:
    library = site.library
    one = document("kept.md", "It is edited while a bulk of its first text is lost.")
    ids = await library.accept(one)
    with pytest.raises(Retryable):
        await (await site.send(*ids, bulk="cut"))
    await library.converge(*ids)
    assert await site.open_bulks() == 1, "a repetition that was answered says nothing of the first one"
    await library.execute("UPDATE open_bulks SET next_at = now()")
    async with site.another_worker(expire_seconds=0.0):
        await until(lambda: _equals(site.open_bulks(), 0))
    assert await site.entries(*ids) == 1


async def test_a_bulk_answered_with_503_by_a_proxy_stays_recorded_as_open(site: Site) -> None:
    library = site.library
    ids = await library.accept(document("proxy.md", "A proxy says 503, and sends the request on all the same."))
    await (await site.send(*ids, bulk="broken"))
    assert await site.entries(*ids) == 1, "the second try was answered"
    assert await site.open_bulks() == 1


async def test_a_worker_that_stalls_too_long_after_its_claim_sends_nothing(site: Site) -> None:
    index = site.library.generation.keyword_index
    with pytest.raises(Retryable, match="too old"):
        await site.keywords.apply([Write(index, uuid4(), 1, {"text": "late"})], send_before=time.monotonic() - 1)


async def test_late_entries_of_a_document_removed_from_the_ledger_are_deleted(site: Site) -> None:
    library, index = site.library, site.library.generation.keyword_index
    document_id, chunk = uuid4(), uuid4()
    async with library.pool.connection() as connection:
        await bulks.record_open(connection, index, [Entry(document_id, chunk, 7)], check_in_seconds=0)
        await bulks.record_open(connection, "an-index-that-is-gone", [Entry(document_id, chunk, 7)], check_in_seconds=0)
    await site.keywords.apply([Write(index, chunk, 7, {"document_id": str(document_id), "text": "left over"})])
    assert await LateBulks(library.pool, site.keywords, Metrics()).check_due() == 1
    assert await site.entries(document_id) == 0
    assert await site.open_bulks() == 1, "of an index that nobody uses any more nothing is watched"


async def test_migrating_raises_the_delete_retention_of_an_older_index(site: Site) -> None:
    es, index = site.library.es, site.library.generation.keyword_index
    await es.indices.put_settings(index=index, settings={"index.gc_deletes": None})
    await create_index(es, index)
    assert (await es.indices.get_settings(index=index))[index]["settings"]["index"]["gc_deletes"] == GC_DELETES


async def _equals(count: Awaitable[int], expected: int) -> bool:
    return await count == expected
