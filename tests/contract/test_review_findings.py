"""What a review found at the seams between the parts, each with the proof that it is mended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline.audit.background import BackgroundAudit
from pipeline.audit.examine import Examiner
from pipeline.audit.mend import Mender
from pipeline.core.fingerprint import content_hash
from pipeline.core.identity import document_id
from pipeline.ledger import builds, generations
from pipeline.rebuild import connect
from pipeline.settings import AuditSettings
from pipeline.stages.stage import Incoming
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Connection
from pipeline.stream import attempts
from pipeline.stream.lanes import Lanes
from pipeline.telemetry import Metrics
from tests.contract.build_kit import Event, Site, document, sections
from tests.space import Space, now
from topics.codec import encode
from topics.messages import DocumentDeleted, DocumentUpserted, IndexHint
from topics.producer import NotDelivered


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def hint(name: str, generation: str) -> Incoming:
    record = encode(
        IndexHint(
            tenant="acme", source="wiki", external_id=name, observed_at=now(),
            document_id=str(document_id("acme", "wiki", name)), generation=generation,
        )
    )  # fmt: skip
    return Incoming("index.live.v1", 0, 0, record.key, record.value, record.headers, "live")


async def test_the_background_audit_and_a_rebuild_do_not_shut_each_other_out(site: Site) -> None:
    await site.put(document("a", sections("one")))
    producer: object = site.hints
    audit = BackgroundAudit(
        site.pool, site.es, producer, Metrics(), AuditSettings(), second_look_seconds=0.0  # type: ignore[arg-type]
    )  # fmt: skip
    async with connect(site.space.settings.postgres):  # the lock that a rebuild holds for as long as it runs
        await audit.turn()
        assert await site.space.query("SELECT documents FROM audit_runs") == [(1,)]


async def test_a_late_hint_of_a_generation_whose_table_is_gone_is_passed_over(site: Site) -> None:
    """A worker that serves generations for long knows the retired one still; its hints stood in the queue."""
    await site.put(document("a", sections("one")))
    await site.run("vectors")
    assert await site.tables() == {"chunks_g2"}
    await site.vectors.handle([hint("a", "g1"), hint("a", "g2")])


async def test_a_sink_that_announces_again_says_that_kafka_is_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.BASE_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.CAP_SECONDS", 0.05)
    names = [f"{n}.md" for n in range(12)]
    await site.accept(*(document(name, sections(name)) for name in names))
    await site.vectors.handle([hint(name, "g1") for name in names])
    down, send, done = True, site.hints.send, list[str]()

    async def refuse(topic: object, message: object) -> asyncio.Future[None]:
        if down:
            raise NotDelivered("Kafka is down")
        return await send(topic, message)

    monkeypatch.setattr(site.hints, "send", refuse)
    site.keywords.batch_size = 1
    lanes = Lanes(
        site.keywords, count=4, queue_size=20, batch_wait_seconds=0, backfill_share=0.1, metrics=Metrics(),
        on_done=lambda _record, name: done.append(str(name)),
    )  # fmt: skip
    lanes.start()
    try:
        async with asyncio.timeout(20):
            for name in names:
                await lanes.put(hint(name, "g1"), name)
            while lanes.trouble is None:
                await asyncio.sleep(0.01)
            down = False
            while len(done) < len(names):
                await asyncio.sleep(0.01)
    finally:
        await lanes.stop(within_seconds=5)
    assert lanes.trouble is None


async def test_rows_that_a_repair_took_out_just_before_a_swap_come_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sinks had not got to the repair when the generation for which it was asked retired."""
    await site.put(document("a", sections("one")), document("b", sections("two")))
    a = document_id("acme", "wiki", "a")
    async with site.pool.connection() as connection:
        examiner = Examiner(site.pool, site.es, await generations.active(connection))
    producer: Any = site.hints

    cut_over = builds.cut_over

    async def repaired_first(connection: Connection, build: builds.Build) -> int:
        await site.space.execute("UPDATE chunks_g1 SET text = 'wrong' WHERE document_id = %s", a)
        assert await Mender(examiner, Keywords(site.es), producer).doubt([a]) == 1
        site.hints.waiting.clear()
        return await cut_over(connection, build)

    monkeypatch.setattr(builds, "cut_over", repaired_first)
    await site.run("keywords")
    assert await site.states() == {"g1": "retired", "g2": "active"}
    await site.vectors.handle([hint("a", "g2")])  # the sweeper's
    [(rows,)] = await site.space.query("SELECT count(*) FROM chunks_g1 WHERE document_id = %s", a)
    assert rows > 0


# The order of arrival, on the real ledger


def upsert(name: str, version: int, second: int, content: str) -> DocumentUpserted:
    return document(name, content, version=version, observed_at=START + timedelta(seconds=second))


def delete(name: str, second: int) -> DocumentDeleted:
    return DocumentDeleted(
        tenant="acme", source="wiki", external_id=name, observed_at=START + timedelta(seconds=second), version=1
    )


START = datetime(2026, 1, 1, tzinfo=UTC)


async def stands(site: Site, *names: str) -> dict[str, tuple[int, str] | None]:
    """(version, text) of each document; None: deleted, or never there."""
    rows = await site.space.query(
        "SELECT d.external_id, d.version, b.text, d.deleted_at FROM documents d"
        " LEFT JOIN document_bodies b ON b.document_id = d.id WHERE d.external_id = ANY(%s)",
        list(names),
    )
    alive = {
        name: (version, text.strip()) for name, version, text, gone in rows if gone is None and version is not None
    }
    return {name: alive.get(name) for name in names}


async def test_a_restored_old_file_that_is_deleted_in_the_same_batch_leaves_the_recreated_document(site: Site) -> None:
    """Its own content was written over for a moment only: nothing kept it, and the document stayed deleted."""
    await site.put(upsert("a", 1, 30, "the new one"))
    await site.put(upsert("a", 2, 10, "the old one"), delete("a", 20))
    assert await stands(site, "a") == {"a": (1, "the new one")}
    [(rows,)] = await site.space.query("SELECT count(*) FROM chunks_g1")
    assert (rows, len(site.embedder.texts)) == (1, 1)


async def test_of_two_superseded_alike_the_greater_comes_back_whichever_came_first(site: Site) -> None:
    for name, order in (("a", ("x", "y")), ("b", ("y", "x"))):
        await site.accept(upsert(name, 5, 10, "first"))
        for content in order:
            await site.accept(upsert(name, 1, 30, content))
        await site.accept(delete(name, 20))
    found = await stands(site, "a", "b")
    assert found["a"] == found["b"] is not None


async def test_a_source_that_went_back_to_one_version_fills_no_table(site: Site) -> None:
    """Each crawl observes the document anew under a version that loses: only the last of them can ever come back."""
    await site.accept(upsert("a", 9, 0, "nine"))
    for second in range(1, 30):
        await site.accept(upsert("a", 1, second, f"one, {second}"))
    assert await site.space.query("SELECT count(*) FROM superseded") == [(1,)]
    await site.accept(delete("a", 15))
    assert await stands(site, "a") == {"a": (1, "one, 29")}


async def test_whatever_the_order_and_the_batches_the_ledger_ends_alike(site: Site) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    events: dict[str, list[Event]] = {}
    for n in range(300):
        name = f"d{n}"
        events[name] = [
            delete(name, chance.randint(1, 5))
            if chance.random() < 0.3
            else upsert(name, chance.randint(1, 4), chance.randint(1, 5), chance.choice("xyz"))
            for _ in range(chance.randint(3, 7))
        ]
    rounds: list[list[Event]] = [[] for _ in range(4)]
    for its in events.values():
        arriving = chance.sample(its, len(its)) + chance.choices(its, k=2)
        for message, place in zip(arriving, sorted(chance.choices(range(4), k=len(arriving))), strict=True):
            rounds[place].append(message)
    for batch in rounds:
        await site.accept(*batch)
    found = await stands(site, *events)
    assert {name: found[name] for name in events} == {name: shall_stand(its) for name, its in events.items()}


def shall_stand(events: Sequence[Event]) -> tuple[int, str] | None:
    floor = max((e.observed_at for e in events if isinstance(e, DocumentDeleted)), default=START)
    upserts = [e for e in events if isinstance(e, DocumentUpserted) and e.observed_at > floor]
    won = max(upserts, key=lambda e: (e.version, e.observed_at, content_hash(e.content)), default=None)
    return (won.version, won.content) if won else None
