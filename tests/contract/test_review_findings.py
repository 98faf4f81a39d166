"""What a review found at the seams between the parts, each with the proof that it is mended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipeline.audit.background import BackgroundAudit
from pipeline.audit.examine import Examiner
from pipeline.audit.mend import Mender
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
from tests.contract.build_kit import Site, document, sections
from tests.space import Space, now
from topics.codec import encode
from topics.messages import IndexHint
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
