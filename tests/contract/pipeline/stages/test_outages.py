"""An outage of one store, index or partition makes no dead letters and does not stop the work of the others."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.diagnosis import story
from pipeline.diagnosis.story_verdict import judge
from pipeline.embedding.openai import OpenAIEmbedder
from pipeline.embedding.port import OneModel
from pipeline.embedding.tokens import byte_pairs
from pipeline.kafka.producer import NotDelivered, Stored
from pipeline.ledger import builds, generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import EmbeddingSettings
from pipeline.stages import sink
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.postgres import create_chunk_table
from pipeline.stream import attempts
from pipeline.stream.lanes import Lanes
from tests.fakes.openai import FakeOpenAI
from tests.support.pipeline.build_kit import Site, access, document, sections
from tests.support.pipeline.delivered import delivered
from tests.support.pipeline.stage_kit import Working, event, hint
from tests.support.space import Space
from topics.messages import DocumentIndexed


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.BASE_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.CAP_SECONDS", 0.05)


async def test_a_successful_announcement_closes_the_circuit_breaker_after_a_kafka_outage(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        site.keywords,
        count=4,
        queue_size=20,
        batch_wait_seconds=0,
        backfill_share=0.1,
        metrics=Metrics(),
        on_done=lambda _record, name: done.append(str(name)),
    )
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


async def test_while_the_index_is_read_only_no_document_counts_as_failed(site: Site, short_pauses: None) -> None:
    """A batch with nothing to write succeeds, and proves nothing about the index."""
    site.keywords.batch_size = 1
    settled = [f"{n}.md" for n in range(20)]
    await site.put(*(document(name, sections(name)) for name in settled))
    await site.accept(document("new", sections("new")))
    async with site.pool.connection() as connection:
        index = (await generations.active(connection)).keyword_index
    await site.es.indices.put_settings(index=index, settings={"index.blocks.write": True})
    async with Working(site.keywords) as working:
        await working.lanes.put(hint("new", "g1"), "new")
        await working.until(lambda: working.tries >= 2)
        for name in settled:
            await working.lanes.put(hint(name, "g1"), name)
        await working.until(lambda: len(working.done) >= len(settled) and working.tries >= 12)
        assert await site.space.query("SELECT count(*) FROM index_state WHERE attempts > 0") == [(0,)]
        await site.es.indices.put_settings(index=index, settings={"index.blocks.write": False})
        await working.until(lambda: "new" in working.done)
    assert await site.entries_of(document_id("acme", "wiki", "new"))


async def test_a_full_disk_under_large_texts_makes_no_dead_letters(site: Site, short_pauses: None) -> None:
    """Small changes still find room in the pages that are there."""
    await site.space.execute(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    )
    await site.space.execute(
        "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON document_bodies FOR EACH ROW"
        " WHEN (length(NEW.text) > 2000) EXECUTE FUNCTION full_disk()"
    )
    set_aside: list[Incoming] = []
    site.detect.set_aside = lambda record, error: _append(set_aside, record)  # type: ignore[assignment, method-assign]
    site.detect.batch_size = 1
    async with Working(site.detect) as working:
        await working.lanes.put(event(document("large", sections(*"abcd"))), "large")
        await working.until(lambda: working.tries >= 1)
        for n in range(20):
            await working.lanes.put(event(document(f"{n}.md", "small")), f"{n}.md")
        await working.until(lambda: len(working.done) >= 20 and working.tries >= 12)
        assert set_aside == []
        await site.space.execute("DROP TRIGGER full_disk ON document_bodies")
        await working.until(lambda: "large" in working.done)


async def _append(noted: list[Incoming], record: Incoming) -> None:
    noted.append(record)


async def test_a_kafka_partition_without_leader_makes_no_dead_letters_of_accepted_events(
    site: Site, short_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other partitions take their hints."""
    down, send, letters = True, site.hints.send, list[object]()

    async def refuse(topic: object, message: Any) -> asyncio.Future[Stored]:
        if down and message.external_id == "a":
            raise NotDelivered("its partition has no leader")
        return await send(topic, message)

    async def send_raw(_topic: object, *record: object) -> asyncio.Future[Stored]:
        letters.append(record)
        return delivered()

    monkeypatch.setattr(site.hints, "send", refuse)
    monkeypatch.setattr(site.hints, "send_raw", send_raw, raising=False)
    site.detect.batch_size = 1
    async with Working(site.detect) as working:
        await working.lanes.put(event(document("a", sections("one"))), "a")
        await working.until(lambda: working.tries >= 1)
        for n in range(20):
            await working.lanes.put(event(document(f"{n}.md", "small")), f"{n}.md")
        await working.until(lambda: len(working.done) >= 20 and working.tries >= 12)
        assert letters == []
        down = False
        await working.until(lambda: "a" in working.done)
    assert await site.space.query("SELECT count(*) FROM dead_letters") == [(0,)]


async def test_a_revocation_kafka_did_not_accept_is_announced_once_by_the_next_attempt(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the event is a duplicate, which changes nothing any more."""
    mine = document("a", sections("one"))
    await site.put(mine)
    said: list[DocumentIndexed] = []
    down, send = True, site.hints.send

    async def refuse(topic: object, message: object) -> asyncio.Future[None]:
        if down:
            raise NotDelivered("Kafka is down")
        if isinstance(message, DocumentIndexed):
            said.append(message)
        return await send(topic, message)

    monkeypatch.setattr(site.hints, "send", refuse)
    revoked = access(mine, "others")
    with pytest.raises(Retryable):
        await site.accept(revoked)
    down = False
    await site.accept(revoked)
    assert [m.state for m in said] == ["revoked"]
    await site.accept(revoked)
    assert len(said) == 1


async def test_a_document_that_is_set_aside_is_logged_without_its_text(site: Site, short_pauses: None) -> None:
    """Postgres quotes the row that breaks a constraint, and psycopg repeats it."""
    await site.space.execute("ALTER TABLE chunks_g1 ADD CHECK (text NOT LIKE '%%hush%%')")
    await site.accept(document("a", "hush, this is between us"))
    with capture_logs() as logs:
        async with Working(site.vectors) as working:
            await working.lanes.put(hint("a", "g1"), "a")
            await working.until(lambda: working.done == ["a"])
    [aside] = [entry for entry in logs if entry["event"] == "document_set_aside"]
    error = aside.get("exc_info")
    shown = f"{aside} {''.join(traceback.format_exception(error)) if error else ''}"
    assert "CheckViolation (23514)" in shown
    assert "hush" not in shown


@pytest.mark.parametrize("state", ["active", "building"])
async def test_a_document_that_the_model_refuses_alone_says_why_it_waits_and_until_when(
    site: Site, short_pauses: None, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """One whose passage the server answers 429 each time was pending without a reason, and its record stayed in the
    worker. Where it had another model than the active generation, it interrupted the build for all others, too."""
    name = "g1"
    if state == "building":
        name = "g2"
        async with site.pool.connection() as connection:
            g1 = await generations.active(connection)
            g2 = replace(g1, name="g2", state="building", keyword_index=g1.keyword_index.replace("g1", "g2"))
            g2 = replace(g2, chunk_table="chunks_g2", model="another")
            await create_chunk_table(connection, g2)
            await builds.begin(connection, g2, g1)
    others = [f"{n}.md" for n in range(12)]
    await site.accept(document("large", "a poison passage"), *(document(other, sections(other)) for other in others))
    async with FakeOpenAI(dimensions=384) as server:
        server.faults.poison, server.faults.poison_status = "poison", 429
        server.faults.throttle_headers = {"retry-after-ms": "20"}
        settings = EmbeddingSettings(
            provider="openai", base_url=server.url, dimensions=384, timeout_seconds=5.0, batch_inputs=1
        )
        model = OpenAIEmbedder(settings, byte_pairs(), patience_seconds=2.0, backoff_base_seconds=0.01)
        monkeypatch.setattr(site.vectors, "_models", OneModel(model))
        try:
            async with Working(site.vectors) as working:
                for document_name in ("large", *others):
                    await working.lanes.put(hint(document_name, name), document_name)
                await working.until(lambda: len(working.done) == 13)
        finally:
            await model.aclose()
    id_ = document_id("acme", "wiki", "large")
    waiting = await site.space.query(
        "SELECT document_id, attempts, error, extract(epoch FROM next_at - pending_since) FROM index_state"
        f" WHERE store = 'vectors' AND generation = '{name}' AND seq < want_seq"
    )
    [(document_, attempts_, error, seconds)] = waiting
    assert (document_, attempts_) == (id_, 0)
    assert "answers 429" in error
    assert seconds >= sink.SET_ASIDE_BASE_SECONDS
    async with site.pool.connection() as connection:
        known = await story.read(connection, id_)
    if state == "active":
        assert f"({error}), next attempt at" in judge(known).reason


async def test_the_other_passages_of_a_document_that_fails_alone_are_searchable_and_embedded_once(
    site: Site, short_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 199 passages waited with it, in the worker's memory: after a restart they were embedded again."""
    names, others = [f"subject{n}" for n in range(12)], [f"{n}.md" for n in range(12)]
    names[5] = "poison"
    await site.accept(document("large", sections(*names)), *(document(other, sections(other)) for other in others))
    [(chunks,)] = await site.space.query("SELECT max(cardinality(chunk_ids)) FROM manifests")
    async with FakeOpenAI(dimensions=384) as server:
        settings = EmbeddingSettings(
            provider="openai", base_url=server.url, dimensions=384, timeout_seconds=5.0, batch_inputs=1
        )

        def start() -> OpenAIEmbedder:
            site.vectors._cached.clear()
            model = OpenAIEmbedder(settings, byte_pairs(), patience_seconds=2.0, backoff_base_seconds=0.01)
            monkeypatch.setattr(site.vectors, "_models", OneModel(model))
            return model

        async def handle(*waiting: str) -> None:
            model = start()
            try:
                async with Working(site.vectors) as working:
                    for name in waiting:
                        await working.lanes.put(hint(name, "g1"), name)
                    await working.until(lambda: len(working.done) == len(waiting))
            finally:
                await model.aclose()

        server.faults.poison, server.faults.poison_status = "poison", 429
        server.faults.throttle_headers = {"retry-after-ms": "20"}
        await handle("large", *others)
        state = (
            "SELECT s.seq < s.want_seq, s.error IS NOT NULL FROM index_state s JOIN documents d ON d.id = s.document_id"
        )
        state += " WHERE d.external_id = 'large' AND s.store = 'vectors'"
        assert await site.space.query(state) == [(True, True)]
        failing = f"SELECT count(*) FROM chunks_g1 WHERE document_id = '{document_id('acme', 'wiki', 'large')}'"
        [(written,)] = await site.space.query(failing)
        assert written >= chunks - 2  # a passage overlaps with the next one
        server.faults.poison = None
        before = server.stats.inputs
        await handle("large")
        assert server.stats.inputs - before == chunks - written
        assert await site.space.query(failing) == [(chunks,)]


async def test_a_read_only_index_of_a_building_generation_does_not_delay_the_active_one(
    site: Site, short_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches hold hints of both generations: each one failed, was waited for, and halved, for every document."""
    async with site.pool.connection() as connection:
        g1 = await generations.active(connection)
        g2 = replace(g1, name="g2", state="building", keyword_index=g1.keyword_index.replace("g1", "g2"))
        await create_index(site.es, g2.keyword_index)
        await builds.begin(connection, g2, g1)
    await site.es.indices.put_settings(index=g2.keyword_index, settings={"index.blocks.write": True})
    names = [f"{n}.md" for n in range(60)]
    await site.accept(*(document(name, sections(name)) for name in names))
    async with Working(site.keywords) as working:
        for name in names:
            await working.lanes.put(hint(name, "g2"), name)
            await working.lanes.put(hint(name, "g1"), name)
        await working.until(lambda: len(working.done) == 2 * len(names), within_seconds=60)
        assert working.tries < 200, "more than a few batches were waited for"

    async def pending() -> dict[str, int]:
        return dict(
            await site.space.query(
                "SELECT generation, count(*) FILTER (WHERE seq < want_seq) FROM index_state WHERE store = 'keywords'"
                " GROUP BY generation"
            )
        )

    assert await pending() == {"g1": 0, "g2": len(names)}
    await site.es.indices.put_settings(index=g2.keyword_index, settings={"index.blocks.write": False})
    monkeypatch.setattr("pipeline.stages.sink.monotonic", lambda: monotonic() + sink.PAUSE_SECONDS)
    await site.keywords.handle([hint(name, "g2") for name in names])  # as the sweeper brings them back
    assert await pending() == {"g1": 0, "g2": 0}
