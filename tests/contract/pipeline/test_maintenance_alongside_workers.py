"""Audit, repair, rebuild and a retiring generation run while workers work: neither undoes or blocks the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from pipeline.audit import runs
from pipeline.audit.background import BackgroundAudit
from pipeline.audit.examine import Examiner
from pipeline.audit.repair import Repairer
from pipeline.core.identity import document_id
from pipeline.generations.building import connect
from pipeline.ledger import builds, generations, work
from pipeline.ledger.arrivals import Announcement
from pipeline.ledger.arrivals import mark_announced as announced
from pipeline.ledger.documents import Identity
from pipeline.ledger.work import Work
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import AuditSettings
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Connection
from tests.support.pipeline.build_kit import Site, document, sections
from tests.support.pipeline.stage_kit import hint
from tests.support.space import Space, now


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


async def test_the_background_audit_runs_during_a_rebuild(site: Site) -> None:
    await site.put(document("a", sections("one")))
    producer: object = site.hints
    audit = BackgroundAudit(
        site.pool,
        site.es,
        producer,
        Metrics(),
        AuditSettings(),
        second_look_seconds=0.0,  # type: ignore[arg-type]
    )
    async with connect(site.space.settings.postgres):  # the lock that a rebuild holds for as long as it runs
        await audit.turn()
        assert await site.space.query("SELECT documents FROM audit_runs") == [(1,)]


async def test_a_late_hint_of_a_retired_generation_is_ignored(site: Site) -> None:
    """A worker that serves generations for long knows the retired one still; its hints stood in the queue."""
    await site.put(document("a", sections("one")))
    await site.run("vectors")
    assert await site.tables() == {"chunks_g2"}
    await site.vectors.handle([hint("a", "g1"), hint("a", "g2")])


async def test_rows_removed_by_a_repair_just_before_a_cut_over_are_restored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sinks had not got to the repair when the generation for which it was asked retired."""
    await site.put(document("a", sections("one")), document("b", sections("two")))
    a = document_id("acme", "wiki", "a")
    async with site.pool.connection() as connection:
        examiner = Examiner(site.pool, site.es, await generations.active(connection))
    producer: Any = site.hints

    cut_over = builds.cut_over

    async def repaired_first(connection: Connection, build: builds.Build, **options: Any) -> int:
        await site.space.execute("UPDATE chunks_g1 SET text = 'wrong' WHERE document_id = %s", a)
        assert await Repairer(examiner, Keywords(site.es), producer).request_repairs([a]) == 1
        site.hints.waiting.clear()
        return await cut_over(connection, build, **options)

    monkeypatch.setattr(builds, "cut_over", repaired_first)
    await site.run("keywords")
    assert await site.states() == {"g1": "retired", "g2": "active"}
    await site.vectors.handle([hint("a", "g2")])  # the sweeper's
    [(rows,)] = await site.space.query("SELECT count(*) FROM chunks_g1 WHERE document_id = %s", a)
    assert rows > 0


async def test_announcing_locks_documents_in_the_order_of_their_ids(site: Site) -> None:
    """In any other it and detect, or two that announce, can wait for each other."""
    await site.accept(*(document(f"{n}.md", "text") for n in range(40)))
    done = [
        Announcement(Identity(id_, "acme", "wiki", name), seq, 1, "searchable", "g1", 1, "live", None, now())
        for id_, name, seq in await site.space.query("SELECT id, external_id, seq FROM documents")
    ]
    lowest = min(a.identity.id for a in done)
    async with site.pool.connection() as holding, site.pool.connection() as announcing:
        await holding.execute("SELECT FROM documents WHERE id = %s FOR UPDATE", [lowest])
        task = asyncio.create_task(announced(announcing, done))
        waits, pid = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted", announcing.info.backend_pid
        async with asyncio.timeout(20):
            while await site.space.query(waits, pid) == [(0,)]:
                await asyncio.sleep(0.01)
        free = await site.space.query("SELECT id FROM documents FOR UPDATE SKIP LOCKED")
        await holding.rollback()
        await task
    assert len(free) == len(done) - 1
    assert await site.space.query("SELECT count(*) FROM documents WHERE announced_seq < seq") == [(0,)]


async def test_a_sink_that_chunks_a_text_does_not_overwrite_the_manifest_detect_has_just_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text stayed; what kind of text it is did not."""
    text, bodies = sections("one", "two", "three"), work.bodies
    await site.accept(document("a", text, media_type="text/plain"))
    plain = await site.space.query("SELECT chunk_ids FROM manifests")
    await site.accept(document("a", text, media_type="text/markdown"))
    assert await site.space.query("SELECT chunk_ids FROM manifests") != plain
    await site.space.execute("DELETE FROM manifests")

    async def overtaken(connection: Connection, works: Collection[Work]) -> Any:
        results = await bodies(connection, works)
        monkeypatch.setattr(work, "bodies", bodies)
        await site.accept(document("a", text, media_type="text/plain"))
        return results

    monkeypatch.setattr(work, "bodies", overtaken)
    await site.vectors.handle([hint("a", "g1")])
    assert await site.space.query("SELECT chunk_ids FROM manifests") == plain
    assert {i for (i,) in await site.space.query("SELECT id FROM chunks_g1")} == set(plain[0][0])


async def test_a_generation_retired_during_the_background_audit_does_not_end_the_worker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.put(document("a", sections("one")))
    producer: Any = site.hints
    audit = BackgroundAudit(site.pool, site.es, producer, Metrics(), AuditSettings(), second_look_seconds=0.0)
    looked = runs.background

    async def overtaken(connection: Connection) -> Any:
        monkeypatch.setattr(runs, "background", looked)
        results = await looked(connection)
        await site.run("keywords")
        return results

    async with site.pool.connection() as connection:
        await runs.start(connection, "g1", "background")
    monkeypatch.setattr(runs, "background", overtaken)
    assert await audit.turn() > 0
    await audit.turn()
    assert await site.space.query("SELECT generation, documents FROM audit_runs ORDER BY id") == [("g1", 0), ("g2", 1)]
