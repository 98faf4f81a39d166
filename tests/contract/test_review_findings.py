"""What a review found at the seams between the parts, each with the proof that it is mended."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.audit import runs
from pipeline.audit.background import BackgroundAudit
from pipeline.audit.examine import Examiner
from pipeline.audit.mend import Mender
from pipeline.core.errors import Retryable
from pipeline.core.fingerprint import content_hash
from pipeline.core.identity import document_id
from pipeline.ledger import builds, generations, work
from pipeline.ledger.announce import Announcement, announced
from pipeline.ledger.documents import Identity
from pipeline.ledger.work import Work
from pipeline.rebuild import connect
from pipeline.settings import AuditSettings
from pipeline.stages import sink
from pipeline.stages.stage import Incoming
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Connection
from pipeline.stream import attempts
from pipeline.stream.lanes import Lanes
from pipeline.telemetry import Metrics
from tests.contract.build_kit import Event, Site, access, document, sections
from tests.space import Space, now
from topics.codec import encode
from topics.messages import DocumentDeleted, DocumentIndexed, DocumentUpserted, IndexHint
from topics.producer import NotDelivered, Stored


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


# A part of the world that is down is no fault of a record


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_CAP_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.BASE_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.core.breaker.CAP_SECONDS", 0.05)


class Working:
    """A stage in its lanes: records go in, and say when they are done."""

    def __init__(self, stage: Any, *, lanes: int = 4) -> None:
        self.done: list[str] = []
        self.metrics = Metrics()
        self.lanes = Lanes(
            stage, count=lanes, queue_size=1000, batch_wait_seconds=0, backfill_share=0.1, metrics=self.metrics,
            on_done=lambda _record, name: self.done.append(str(name)),
        )  # fmt: skip

    async def __aenter__(self) -> Working:
        self.lanes.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.lanes.stop(within_seconds=10)

    @property
    def tries(self) -> float:
        found = [
            s.value for m in self.metrics.registry.collect() for s in m.samples if s.name.endswith("retries_total")
        ]
        return sum(found)

    async def until(self, condition: Callable[[], bool], within_seconds: float = 30) -> None:
        async with asyncio.timeout(within_seconds):
            while not condition():
                await asyncio.sleep(0.01)


def event(message: Event) -> Incoming:
    record = encode(message)
    return Incoming("documents.live.v1", 0, 0, record.key, record.value, record.headers, "live")


async def test_while_the_index_takes_no_writes_no_document_is_blamed_for_it(site: Site, hurried: None) -> None:
    """What has nothing to write gets through all the same, and proves nothing about the index."""
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


async def test_a_full_disk_under_large_texts_makes_no_dead_letters(site: Site, hurried: None) -> None:
    """Small changes still find room in the pages that are there."""
    await site.space.execute(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    )
    await site.space.execute(
        "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON document_bodies FOR EACH ROW"
        " WHEN (length(NEW.text) > 2000) EXECUTE FUNCTION full_disk()"
    )
    buried: list[Incoming] = []
    site.detect.set_aside = lambda record, error: _note(buried, record)  # type: ignore[assignment, method-assign]
    site.detect.batch_size = 1
    async with Working(site.detect) as working:
        await working.lanes.put(event(document("large", sections(*"abcd"))), "large")
        await working.until(lambda: working.tries >= 1)
        for n in range(20):
            await working.lanes.put(event(document(f"{n}.md", "small")), f"{n}.md")
        await working.until(lambda: len(working.done) >= 20 and working.tries >= 12)
        assert buried == []
        await site.space.execute("DROP TRIGGER full_disk ON document_bodies")
        await working.until(lambda: "large" in working.done)


async def _note(noted: list[Incoming], record: Incoming) -> None:
    noted.append(record)


async def test_a_kafka_partition_without_leader_makes_no_dead_letters_of_what_was_accepted(
    site: Site, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other partitions take their hints."""
    down, send, letters = True, site.hints.send, list[object]()

    async def refuse(topic: object, message: Any) -> asyncio.Future[None]:
        if down and message.external_id == "a":
            raise NotDelivered("its partition has no leader")
        return await send(topic, message)

    async def send_raw(_topic: object, *record: object) -> asyncio.Future[Stored]:
        letters.append(record)
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        done.set_result(Stored(0, 0))
        return done

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


async def test_a_revocation_that_kafka_does_not_take_at_once_is_announced_at_the_next_try(
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


async def test_a_document_that_is_set_aside_is_logged_without_its_text(site: Site, hurried: None) -> None:
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


async def test_a_building_index_that_takes_no_writes_does_not_hold_up_the_active_one(
    site: Site, hurried: None, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr("pipeline.stages.sink.monotonic", lambda: monotonic() + sink.REST_SECONDS)
    await site.keywords.handle([hint(name, "g2") for name in names])  # as the sweeper brings them back
    assert await pending() == {"g1": 0, "g2": 0}


async def test_announcing_locks_documents_in_the_order_of_their_ids_like_everybody(site: Site) -> None:
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


async def test_a_sink_that_cuts_a_text_does_not_undo_how_detect_has_just_cut_it(
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
        found = await bodies(connection, works)
        monkeypatch.setattr(work, "bodies", bodies)
        await site.accept(document("a", text, media_type="text/plain"))
        return found

    monkeypatch.setattr(work, "bodies", overtaken)
    await site.vectors.handle([hint("a", "g1")])
    assert await site.space.query("SELECT chunk_ids FROM manifests") == plain
    assert {i for (i,) in await site.space.query("SELECT id FROM chunks_g1")} == set(plain[0][0])


async def test_a_generation_that_retires_while_the_background_audit_looks_up_its_run_ends_no_worker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.put(document("a", sections("one")))
    producer: Any = site.hints
    audit = BackgroundAudit(site.pool, site.es, producer, Metrics(), AuditSettings(), second_look_seconds=0.0)
    looked = runs.background

    async def overtaken(connection: Connection) -> Any:
        monkeypatch.setattr(runs, "background", looked)
        found = await looked(connection)
        await site.run("keywords")
        return found

    async with site.pool.connection() as connection:
        await runs.start(connection, "g1", "background")
    monkeypatch.setattr(runs, "background", overtaken)
    assert await audit.turn() > 0
    await audit.turn()
    assert await site.space.query("SELECT generation, documents FROM audit_runs ORDER BY id") == [("g1", 0), ("g2", 1)]
