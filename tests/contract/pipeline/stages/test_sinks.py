"""The sinks' protocols on the real stores: whoever is late, paused or behind, both stores end as the ledger says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.core.model import Generation, Lane
from pipeline.embedding.choose import token_counter
from pipeline.embedding.failures import Alone
from pipeline.embedding.port import Embedded, OneModel, Vectors
from pipeline.kafka.producer import Stored
from pipeline.ledger import generations, work
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import dist
from pipeline.stages import detect as detecting
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink, LateBulks
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect, create_index
from pipeline.stores.keywords import Keywords, Outcome, Write
from pipeline.stores.postgres import Pool, open_pool
from pipeline.stream.attempts import Attempts, Batch
from tests.support.pipeline.build_kit import sections
from tests.support.pipeline.delivered import delivered
from tests.support.pipeline.generations import record_centre
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space, now
from topics.codec import encode
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IndexHint

Hook = Callable[[], Coroutine[Any, Any, None]]


class Recorder:
    """Stands where the producer stands: these tests say themselves when a sink wakes."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    async def send(self, _topic: object, message: object) -> asyncio.Future[Stored]:
        self.sent.append(message)
        return delivered()


@dataclass
class CountingEmbedder:
    """Deterministic vectors at no cost; refuses texts that hold ``poison``; fails while ``down``."""

    dimensions: int
    down: bool = False
    before: Hook | None = None
    texts: list[str] = field(default_factory=list)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        if self.before is not None:
            hook, self.before = self.before, None
            await hook()
        if self.down:
            raise Retryable("the model is down")
        self.texts += texts
        rows: Vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for n, text in enumerate(texts):
            rows[n] = self.vector(text)
        return Embedded(rows, {n: "poisonous" for n, text in enumerate(texts) if "poison" in text})

    def vector(self, text: str) -> Vectors:
        row: Vectors = np.zeros(self.dimensions, dtype=np.float32)
        row[hash(text) % self.dimensions] = 1.0
        return row


class PausedKeywords(Keywords):
    """A keyword store whose next bulk is held up until something else has happened."""

    pause: Hook | None = None
    after: Hook | None = None

    async def refreshed(self, index: str, *, patient: bool = False) -> None:
        if self.after is not None:
            after, self.after = self.after, None
            await after()
        await super().refreshed(index, patient=patient)

    async def apply(
        self, writes: Sequence[Write], *, patient: bool = False, send_before: float = math.inf
    ) -> list[Outcome]:
        if self.pause is not None:
            pause, self.pause = self.pause, None
            await pause()
        return await super().apply(writes, patient=patient, send_before=send_before)


@dataclass
class Bench:
    space: Space
    pool: Pool
    generation: Generation
    detect: Detect
    embedder: CountingEmbedder
    vectors: VectorSink
    keywords: KeywordSink
    late_keywords: KeywordSink
    late_store: PausedKeywords
    recorder: Recorder
    es: AsyncElasticsearch
    known: dict[str, Generation]

    async def accept(self, *messages: DocumentUpserted | DocumentDeleted | AccessChanged, lane: Lane = "live") -> None:
        records = []
        for n, message in enumerate(messages):
            record = encode(message)
            records.append(Incoming("t", 0, n, record.key, record.value, record.headers, lane))
        await self.detect.handle(records)

    async def converge(self, *ids: UUID) -> None:
        await self.vectors.converge(self.generation, ids)
        await self.keywords.converge(self.generation, ids)

    async def states(self, document: UUID) -> dict[str, tuple[bool, int, str | None]]:
        """store → (settled, refused chunks, error)."""
        rows = await self.space.query(
            "SELECT store, seq >= want_seq, cardinality(refused), error FROM index_state WHERE document_id = %s",
            document,
        )
        return {store: (settled, refused, error) for store, settled, refused, error in rows}


@pytest.fixture
async def bench(space: Space) -> AsyncIterator[Bench]:
    metrics, recorder = Metrics(), Recorder()
    producer: Any = recorder
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(space.settings.postgres))
        await record_centre(pool)
        async with pool.connection() as connection:
            generation = await generations.active(connection)

        def counters(generation: Generation) -> Any:
            return token_counter(generation, dist() / "models")

        dead = DeadLetters(pool, producer, metrics)
        announcer = Announcer(pool, producer, metrics)
        embedder = CountingEmbedder(generation.dimensions)
        store = Keywords(connect(space.settings.elasticsearch))
        late_store = PausedKeywords(connect(space.settings.elasticsearch))
        es = connect(space.settings.elasticsearch)
        for close in (store.aclose, late_store.aclose, es.close):
            stack.push_async_callback(close)

        serving = {generation.name: generation}

        async def known() -> dict[str, Generation]:
            return dict(serving)

        chunker = Chunker(counters)
        model: Any = embedder
        yield Bench(
            space,
            pool,
            generation,
            Detect(pool, producer, dead, announcer, counters, metrics, batch_size=32, grace_seconds=60),
            embedder,
            VectorSink(pool, OneModel(model), known, chunker, announcer, producer, dead, metrics, batch_size=8),
            KeywordSink(pool, store, known, chunker, announcer, dead, metrics, batch_size=8),
            KeywordSink(pool, late_store, known, chunker, announcer, dead, metrics, batch_size=8),
            late_store,
            recorder,
            es,
            serving,
        )


def document(content: str, version: int, **fields: object) -> DocumentUpserted:
    return DocumentUpserted(
        **{  # type: ignore[arg-type]
            "tenant": "acme",
            "source": "wiki",
            "external_id": "a.md",
            "observed_at": now(),
            "version": version,
            "title": "A",
            "content": content,
            "acl_tags": ["staff"],
            "media_type": "text/markdown",
            **fields,
        }
    )


ID = document_id("acme", "wiki", "a.md")


async def test_an_edit_within_the_same_hour_writes_only_the_changed_entries(bench: Bench) -> None:
    names = ["one", "two", "three", "four", "five", "six"]
    at = datetime(2026, 3, 1, 10, 5, tzinfo=UTC)

    async def written(new: DocumentUpserted) -> int:
        """Entries written for this version of the document."""
        [(before,)] = await bench.space.query(
            "SELECT coalesce(sum(written), 0) FROM index_state WHERE store = 'keywords'"
        )
        await bench.accept(new)
        await bench.converge(ID)
        [(after,)] = await bench.space.query("SELECT sum(written) FROM index_state WHERE store = 'keywords'")
        return int(after) - int(before)

    def version(number: int, minutes: int) -> DocumentUpserted:
        return document(sections(*names), number, source_modified_at=at + timedelta(minutes=minutes))

    whole = await written(version(1, 0))
    names[3] = "another"
    assert 1 <= await written(version(2, 50)) <= 2 < whole
    last = version(3, 60)
    assert await written(last) == whole, "the next hour"
    await assert_equal(bench.space, [last])


async def test_backfill_waits_while_enough_of_it_is_pending_in_the_stores(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detecting, "MAX_PENDING_BACKFILL_DOCUMENTS", 2)
    monkeypatch.setattr(detecting, "BACKLOG_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(detecting, "BACKLOG_CHECK_PAUSE_FACTOR", 0)
    monkeypatch.setattr(detecting, "NO_LIVE_SECONDS", 60.0)
    await bench.accept(*(document("Live.", 1, external_id=f"live-{n}.md") for n in range(5)))
    assert not await bench.detect.is_backlogged()
    await bench.accept(document("Old.", 1), lane="backfill")
    assert not await bench.detect.is_backlogged()
    await bench.accept(document("Old.", 1, external_id="b.md"), lane="backfill")
    assert await bench.detect.is_backlogged()
    await bench.keywords.converge(bench.generation, [ID])
    assert await bench.detect.is_backlogged(), "the other store has not followed"
    monkeypatch.setattr(detecting, "STALLED_STORE_SECONDS", 0.0)
    assert not await bench.detect.is_backlogged(), "it is away: nothing is waited for"
    monkeypatch.setattr(detecting, "STALLED_STORE_SECONDS", 60.0)
    assert await bench.detect.is_backlogged()
    monkeypatch.setattr(detecting, "NO_LIVE_SECONDS", 0.0)
    assert not await bench.detect.is_backlogged(), "nothing came live of late: more may wait"
    monkeypatch.setattr(detecting, "MAX_PENDING_BACKFILL_DOCUMENTS_WITHOUT_LIVE", 2)
    assert await bench.detect.is_backlogged()
    await bench.vectors.converge(bench.generation, [ID])
    assert not await bench.detect.is_backlogged()


async def test_a_keyword_worker_paused_between_claim_and_bulk_does_not_overwrite_a_newer_revision(bench: Bench) -> None:
    old = document(sections("one", "two", "three"), 1)
    new = document(sections("one", "four"), 2)
    await bench.accept(old)

    async def overtaken() -> None:
        await bench.accept(new)
        await bench.converge(ID)
        await assert_equal(bench.space, [new])

    bench.late_store.pause = overtaken
    await bench.late_keywords.converge(bench.generation, [ID])
    await bench.vectors.converge(bench.generation, [ID])
    assert all(settled for settled, _, _ in (await bench.states(ID)).values())
    await assert_equal(bench.space, [new])


async def test_a_paused_worker_does_not_resurrect_a_deleted_document(bench: Bench) -> None:
    await bench.accept(document(sections("one", "two"), 1))

    async def overtaken() -> None:
        await bench.accept(
            DocumentDeleted(tenant="acme", source="wiki", external_id="a.md", observed_at=now(), version=1)
        )
        await bench.converge(ID)

    bench.late_store.pause = overtaken
    await bench.late_keywords.converge(bench.generation, [ID])
    await assert_equal(bench.space, [])


async def test_a_document_changed_during_embedding_does_not_embed_unchanged_chunks_again(bench: Bench) -> None:
    old, new = document(sections("one", "two", "three"), 1), document(sections("one", "two", "four"), 2)
    await bench.accept(old)

    async def overtaken() -> None:
        await bench.accept(new)

    bench.embedder.before = overtaken
    await bench.converge(ID)
    chunks = await assert_equal(bench.space, [new])
    assert len(bench.embedder.texts) == len(set(bench.embedder.texts)), "nothing is embedded twice"
    assert len(bench.embedder.texts) < 2 * chunks


async def test_the_ledger_overwrites_entries_of_an_index_that_is_ahead(bench: Bench) -> None:
    message = document(sections("one"), 1)
    await bench.accept(message)
    await bench.converge(ID)
    [entry, *_] = await bench.space.entries()
    store = Keywords(connect(bench.space.settings.elasticsearch))
    try:  # what a ledger restored from an older backup would meet
        body = {**(await bench.space.entries())[entry], "title": "from the future"}
        await store.apply([Write(bench.generation.keyword_index, entry, 10**12, body)])
    finally:
        await store.aclose()
    renamed = document(message.content, 2, title="B")
    await bench.accept(renamed)
    await bench.converge(ID)
    await assert_equal(bench.space, [renamed])


async def test_refused_chunks_leave_the_rest_of_a_document_searchable(bench: Bench) -> None:
    await bench.accept(document(sections("one", "poison", "three"), 1))
    await bench.converge(ID)
    states = await bench.states(ID)
    settled, refused, error = states["vectors"]
    assert settled
    assert refused >= 1
    assert error is not None
    rows = await bench.space.query(f"SELECT text FROM {bench.generation.chunk_table}")
    assert rows
    assert not any("poison" in text for (text,) in rows)
    assert any("poison" in e["text"] for e in (await bench.space.entries()).values()), "keyword search has all of it"
    assert getattr(bench.recorder.sent[-1], "state", None) == "partial"


async def test_keyword_search_is_updated_while_the_embedding_model_is_down(bench: Bench) -> None:
    message = document(sections("one"), 1)
    await bench.accept(message)
    bench.embedder.down = True
    with pytest.raises(Retryable):
        await bench.vectors.converge(bench.generation, [ID])
    await bench.keywords.converge(bench.generation, [ID])
    assert (await bench.states(ID))["keywords"][0]
    assert not (await bench.states(ID))["vectors"][0]
    bench.embedder.down = False
    await bench.converge(ID)
    await assert_equal(bench.space, [message])


async def test_a_revocation_is_announced_at_once_and_embeds_nothing(bench: Bench) -> None:
    message = document(sections("one", "two"), 1)
    await bench.accept(message)
    await bench.converge(ID)
    before = len(bench.embedder.texts)
    await bench.accept(access("board"))
    assert getattr(bench.recorder.sent[-2], "state", None) == "revoked", "told at once, before the stores follow"
    await bench.converge(ID)
    assert len(bench.embedder.texts) == before
    await assert_equal(bench.space, [message.model_copy(update={"acl_tags": ["board"]})])


async def test_a_document_of_hundreds_of_chunks_is_written_completely(bench: Bench) -> None:
    message = document(sections(*(f"subject-{n}" for n in range(260))), time.time_ns())
    await bench.accept(message)
    await bench.converge(ID)
    assert await assert_equal(bench.space, [message]) > 200


def access(*tags: str) -> AccessChanged:
    return AccessChanged(tenant="acme", source="wiki", external_id="a.md", observed_at=now(), acl_tags=list(tags))


async def test_a_grant_during_the_refresh_of_a_revocation_is_not_lost(bench: Bench) -> None:
    message = document(sections("one", "two"), 1)
    await bench.accept(message)
    await bench.converge(ID)
    await bench.accept(access())

    async def granted_again() -> None:
        await bench.accept(access("staff"))

    bench.late_store.after = granted_again
    await bench.late_keywords.converge(bench.generation, [ID])
    await bench.vectors.converge(bench.generation, [ID])
    await assert_equal(bench.space, [message])


async def test_access_restored_before_its_change_was_confirmed_is_written_back(bench: Bench) -> None:
    message = document(sections("one"), 1)
    await bench.accept(message)
    await bench.converge(ID)
    await bench.accept(access("staff", "public"))

    async def refresh_fails() -> None:
        raise Retryable("Elasticsearch went away")

    bench.late_store.after = refresh_fails
    with pytest.raises(Retryable):
        await bench.late_keywords.converge(bench.generation, [ID])
    await bench.accept(access("staff"))
    await bench.converge(ID)
    await assert_equal(bench.space, [message])


async def test_a_bulk_that_lands_after_a_delete_was_confirmed_is_removed_again(bench: Bench) -> None:
    """A worker whose refresh failed never confirms; its bulk landed after another worker settled the deletion."""
    await bench.accept(document(sections("one", "two"), 1))

    async def deleted_and_forgotten() -> None:
        gone = DocumentDeleted(tenant="acme", source="wiki", external_id="a.md", observed_at=now(), version=1)
        await bench.accept(gone)
        await bench.converge(ID)
        es = connect(bench.space.settings.elasticsearch)
        await es.indices.put_settings(index=bench.generation.keyword_index, settings={"index.gc_deletes": "1ms"})
        await asyncio.sleep(1.5)
        await es.indices.refresh(index=bench.generation.keyword_index)
        await es.close()

    async def refresh_fails() -> None:
        raise Retryable("Elasticsearch went away")

    bench.late_store.pause, bench.late_store.after = deleted_and_forgotten, refresh_fails
    with pytest.raises(Retryable):
        await bench.late_keywords.converge(bench.generation, [ID])
    await bench.late_keywords.converge(bench.generation, [ID])
    async with bench.pool.connection() as connection:
        await connection.execute("UPDATE open_bulks SET next_at = now()")
    assert await LateBulks(bench.pool, bench.late_store, Metrics()).check_due() > 0
    await assert_equal(bench.space, [])


async def test_each_chunk_keeps_the_vector_of_its_own_text_while_the_document_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = document(sections("one", "two", "three"), 1), document(sections("zero", "one", "two", "four"), 2)
    await bench.accept(old)
    read = work.bodies
    changes = [new]

    async def changed_before_the_bodies_are_read(connection: Any, works: Any) -> Any:
        if changes:
            await bench.accept(changes.pop())
        return await read(connection, works)

    monkeypatch.setattr(work, "bodies", changed_before_the_bodies_are_read)
    await bench.converge(ID)
    await assert_equal(bench.space, [new])
    rows = await bench.space.query(f"SELECT text, embedding::text FROM {bench.generation.chunk_table}")
    for text, vector in rows:
        values = [float(v) for v in vector.strip("[]").split(",")]
        assert values.index(max(values)) == hash(text) % bench.generation.dimensions


async def test_hundreds_of_refused_chunks_do_not_block_the_rest_of_the_document(bench: Bench) -> None:
    await bench.accept(document(sections(*(f"poison-{n}" for n in range(210)), "sound"), 1))
    async with asyncio.timeout(60):
        await bench.converge(ID)
    rows = await bench.space.query(f"SELECT text FROM {bench.generation.chunk_table}")
    assert any("sound" in text for (text,) in rows)
    assert (await bench.states(ID))["vectors"][0]


async def test_a_document_with_text_already_embedded_elsewhere_copies_its_vectors(bench: Bench) -> None:
    old = document(sections("one", "two", "three"), 1)
    await bench.accept(old)
    await bench.converge(ID)
    paid = len(bench.embedder.texts)
    renamed = old.model_copy(update={"external_id": "renamed", "observed_at": now()})
    new_id = document_id(renamed.tenant, renamed.source, renamed.external_id)
    await bench.accept(renamed)
    await bench.converge(new_id)
    await assert_equal(bench.space, [old, renamed])
    assert len(bench.embedder.texts) == paid
    rows = await bench.space.query(
        f"SELECT count(DISTINCT embedding::text) FROM {bench.generation.chunk_table} GROUP BY text"
    )
    assert set(rows) == {(1,)}, "the twin's very vector"


async def test_a_new_title_embeds_a_short_document_again_and_nothing_of_a_long_one(bench: Bench) -> None:
    async def embedded(new: DocumentUpserted) -> int:
        """Texts embedded for this version of the document."""
        before = len(bench.embedder.texts)
        await bench.accept(new)
        await bench.converge(ID)
        await assert_equal(bench.space, [new], vector=bench.embedder.vector)
        return len(bench.embedder.texts) - before

    short, long = sections("one"), sections("one", "two", "three", "four", "five", "six")
    chunks = await embedded(document(short, 1))
    assert await embedded(document(short, 2, title="B")) == chunks <= 3
    assert await embedded(document(short, 3, title="B", author="Ann")) == 0
    await embedded(document(long, 4, title="B"))
    assert await embedded(document(long, 5, title="C")) == 0
    assert await embedded(document(short, 6, title="C")) == chunks


async def test_a_vector_is_copied_only_from_a_chunk_with_the_same_title(bench: Bench) -> None:
    first = document(sections("one"), 1)
    await bench.accept(first)
    await bench.converge(ID)
    paid = len(bench.embedder.texts)
    held = [first]
    for name, title, is_embedded in (("b.md", "B", True), ("c.md", "B", False), ("d.md", "A", False)):
        other = document(first.content, 1, external_id=name, title=title)
        await bench.accept(other)
        await bench.converge(document_id(other.tenant, other.source, name))
        held.append(other)
        await assert_equal(bench.space, held, vector=bench.embedder.vector)
        assert (len(bench.embedder.texts) > paid) == is_embedded, name
        paid = len(bench.embedder.texts)


async def test_the_lookup_of_already_embedded_texts_uses_an_index(bench: Bench) -> None:
    await bench.accept(*(document(sections(f"topic-{n}"), n + 1) for n in range(2)))
    await bench.converge(ID)
    async with bench.pool.connection() as connection:
        await connection.execute("SET enable_seqscan = off")
        cursor = await connection.execute(
            "EXPLAIN SELECT f.id FROM unnest(%s::text[]) w (text) CROSS JOIN LATERAL (SELECT c.id FROM"
            f" {bench.generation.chunk_table} c WHERE hashtextextended(c.text, 0) = hashtextextended(w.text, 0)"
            " AND c.text = w.text LIMIT 1) f".encode(),
            [["a", "b"]],
        )
        plan = await cursor.fetchall()
        await connection.execute("RESET enable_seqscan")
    assert any(f"{bench.generation.chunk_table}_text" in line for (line,) in plan), plan


async def test_a_missing_active_index_does_not_delay_the_generation_that_replaces_it(bench: Bench) -> None:
    """The hints of both generations come in one batch of one lane, and nobody else gets through to prove anything."""
    new = replace(bench.generation, name="g2", state="building", keyword_index=f"{bench.generation.keyword_index}-new")
    await create_index(bench.es, new.keyword_index)
    async with bench.pool.connection() as connection:
        await generations.add(connection, new)
    bench.known[new.name] = new
    event = document(sections("one", "two"), 1)
    await bench.accept(event)
    await bench.es.indices.delete(index=bench.generation.keyword_index)
    hints = [encode(m) for m in bench.recorder.sent if isinstance(m, IndexHint)]
    records = [Incoming("t", 0, n, h.key, h.value, h.headers, "live") for n, h in enumerate(hints)]
    assert len(records) == 2
    attempts = Attempts(bench.keywords, Metrics(), asyncio.Event())
    assert await attempts.once(Batch([(record, None) for record in records])) == "done"
    rows = await bench.space.query(
        "SELECT generation, seq >= want_seq, error FROM index_state WHERE store = 'keywords'"
    )
    states = {name: (settled, error) for name, settled, error in rows}
    assert states["g2"] == (True, None)
    settled, error = states["g1"]
    assert not settled
    assert "index" in error
    assert attempts.breaker.trouble is None


async def test_embedding_costs_are_charged_to_the_build_once_despite_failures(bench: Bench) -> None:
    """A call that fails in part, then a bill that cannot be written."""
    building = replace(bench.generation, state="building")
    message = document(" ".join(f"Sentence {n} says what it has to." for n in range(200)), 1)
    await bench.accept(message)
    async with bench.pool.connection() as connection:
        await connection.execute(
            "INSERT INTO builds (generation, origin, replaces) VALUES (%s, %s, %s)",
            [building.name, building.name, ["vectors"]],
        )
        await connection.execute(
            b"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            b" $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = 'serialization_failure'; END $$"
        )

    async def spent() -> int:
        [(tokens,)] = await bench.space.query("SELECT tokens FROM builds")
        return int(tokens)

    async def fails_in_part() -> None:
        error = Retryable("one request of several")
        error.tokens = 7
        raise error

    bench.embedder.before = fails_in_part
    with pytest.raises(Retryable, match="one request of several"):
        await bench.vectors.converge(building, [ID])
    assert await spent() == 7

    async with bench.pool.connection() as connection:
        await connection.execute("CREATE TRIGGER refuse BEFORE UPDATE ON builds EXECUTE FUNCTION refuse()")
    with pytest.raises(Retryable, match="40001"):
        await bench.vectors.converge(building, [ID])
    bought = len(bench.embedder.texts)
    assert bought > 0
    async with bench.pool.connection() as connection:
        await connection.execute("DROP TRIGGER refuse ON builds")
    await bench.converge(ID)
    assert len(bench.embedder.texts) == bought
    [(counted,)] = await bench.space.query("SELECT sum(n) FROM manifests, unnest(token_counts) n")
    assert await spent() == 7 + counted
    await assert_equal(bench.space, [message])


async def test_tokens_of_a_call_in_which_a_text_fails_alone_are_counted_where_the_server_reports_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = replace(bench.generation, state="building")
    message = document(" ".join(f"Sentence {n} says what it has to." for n in range(200)), 1)
    await bench.accept(message)
    async with bench.pool.connection() as connection:
        await connection.execute(
            "INSERT INTO builds (generation, origin, replaces) VALUES (%s, %s, %s)",
            [building.name, building.name, ["vectors"]],
        )
    embed, calls = bench.embedder.embed_documents, 0

    async def fails_alone(texts: Sequence[str]) -> Embedded:
        nonlocal calls
        calls += 1
        embedded = await embed(texts)
        if calls > 1:
            return embedded
        error = Alone("one text", service="embedding")
        error.arrived = dict(enumerate(embedded.vectors[:-1]))
        raise error

    monkeypatch.setattr(bench.embedder, "embed_documents", fails_alone)
    await bench.vectors.converge(building, [ID])
    assert calls == 2
    [(counted, spent)] = await bench.space.query(
        "SELECT (SELECT sum(n) FROM manifests, unnest(token_counts) n), (SELECT tokens FROM builds)"
    )
    assert spent == counted
