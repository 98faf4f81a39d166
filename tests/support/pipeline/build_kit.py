"""A Penstock whose stages are called directly, on the real servers, so that a test says what happens in between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID
from zlib import crc32

import numpy as np
from elasticsearch import AsyncElasticsearch

from pipeline.core.model import Generation, Lane, Store
from pipeline.embedding.choose import token_counter
from pipeline.embedding.port import Embedded, OneModel, Vectors
from pipeline.generations.building import Builder, connect
from pipeline.kafka.producer import Stored
from pipeline.ledger import generations
from pipeline.ledger.documents import Identity
from pipeline.maintenance.rebuild import Rebuild, Result
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import dist
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect as elasticsearch_client
from pipeline.stores.keywords import Keywords, Outcome, Write
from pipeline.stores.postgres import Pool, open_pool
from tests.support.pipeline.delivered import delivered
from tests.support.pipeline.generations import record_centre
from tests.support.space import Space, now
from tests.support.space import document as timed_document
from topics.codec import encode
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IndexHint

Event = DocumentUpserted | DocumentDeleted | AccessChanged
Hook = Callable[[], Coroutine[Any, Any, None]]


def vector(text: str, dimensions: int = 384) -> Vectors:
    row: Vectors = np.zeros(dimensions, dtype=np.float32)
    row[crc32(text.encode()) % dimensions] = 1.0
    return row


@dataclass
class CountingEmbedder:
    """Deterministic vectors at no cost; refuses texts that hold ``poison``."""

    texts: list[str] = field(default_factory=list)
    before: Hook | None = None

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        if self.before is not None:
            hook, self.before = self.before, None
            await hook()
        self.texts += texts
        rows = np.stack([vector(text) for text in texts])
        return Embedded(rows, {n: "poisonous" for n, text in enumerate(texts) if "poison" in text})


class PausedKeywords(Keywords):
    """A keyword store whose next bulk is held up until something else happened; titles in ``failing`` are refused."""

    pause: Hook | None = None
    failing: frozenset[str] = frozenset()

    async def apply(
        self, writes: Sequence[Write], *, patient: bool = False, send_before: float = math.inf
    ) -> list[Outcome]:
        if self.pause is not None:
            pause, self.pause = self.pause, None
            await pause()
        done = await super().apply(writes, patient=patient, send_before=send_before)
        return [
            Outcome("refused", reason="mapper_parsing_exception") if w.body and w.body["title"] in self.failing else o
            for w, o in zip(writes, done, strict=True)
        ]


class _Hints:
    """Stands where the producer stands and keeps the hints: the test says when a sink wakes."""

    def __init__(self) -> None:
        self.waiting: list[IndexHint] = []

    async def send(self, _topic: object, message: object) -> asyncio.Future[Stored]:
        if isinstance(message, IndexHint):
            self.waiting.append(message)
        return delivered()


@dataclass
class Site:
    space: Space
    pool: Pool
    es: AsyncElasticsearch
    detect: Detect
    vectors: VectorSink
    keywords: KeywordSink
    embedder: CountingEmbedder
    store: PausedKeywords
    hints: _Hints

    @classmethod
    @asynccontextmanager
    async def create(cls, space: Space) -> AsyncIterator[Site]:
        metrics, hints, embedder = Metrics(), _Hints(), CountingEmbedder()
        producer: Any = hints
        model: Any = embedder
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(space.settings.postgres))
            await record_centre(pool)

            async def known() -> dict[str, Generation]:
                async with pool.connection() as connection:
                    return {g.name: g for g in await generations.writable(connection)}

            def counters(generation: Generation) -> Any:
                return token_counter(generation, dist() / "models")

            dead, announcer = DeadLetters(pool, producer, metrics), Announcer(pool, producer, metrics)
            chunker = Chunker(counters)
            store = PausedKeywords(elasticsearch_client(space.settings.elasticsearch))
            stack.push_async_callback(store.aclose)
            es = elasticsearch_client(space.settings.elasticsearch)
            stack.push_async_callback(es.close)
            yield cls(
                space,
                pool,
                es,
                Detect(pool, producer, dead, announcer, counters, metrics, batch_size=32, grace_seconds=60),
                VectorSink(pool, OneModel(model), known, chunker, announcer, producer, dead, metrics, batch_size=8),
                KeywordSink(pool, store, known, chunker, announcer, dead, metrics, batch_size=8),
                embedder,
                store,
                hints,
            )

    async def accept(self, *messages: Event) -> None:
        """Into the ledger only."""
        records = []
        for n, message in enumerate(messages):
            record = encode(message)
            records.append(Incoming("t", 0, n, record.key, record.value, record.headers, "live"))
        await self.detect.handle(records)

    async def put(self, *messages: Event) -> None:
        """Into the ledger and both stores, of every generation."""
        await self.accept(*messages)
        await self.work()

    async def work(self) -> None:
        """The sinks work off every hint that was sent."""
        while self.hints.waiting:
            records = [encode(hint) for hint in self.hints.waiting]
            self.hints.waiting.clear()
            batch = [Incoming("i", 0, n, r.key, r.value, r.headers, "live") for n, r in enumerate(records)]
            for sink in (self.vectors, self.keywords):
                await sink.handle(batch)

    async def served(self, _store: Store) -> bool:
        return True

    async def hint(self, hints: Sequence[tuple[Identity, str, Lane]]) -> int:
        """Queue the hints of a rebuild, as running workers would receive them."""
        for identity, generation, _ in hints:
            self.hints.waiting.append(
                IndexHint(
                    tenant=identity.tenant,
                    source=identity.source,
                    external_id=identity.external_id,
                    observed_at=now(),
                    document_id=str(identity.id),
                    generation=generation,
                )
            )
        await self.work()
        return len(hints)

    @asynccontextmanager
    async def builder(
        self,
        *,
        hint: Callable[[Sequence[tuple[Identity, str, Lane]]], Awaitable[int]] | None = None,
        served: Callable[[Store], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[Builder]:
        async with connect(self.space.settings.postgres) as connection:
            yield Builder(
                connection,
                self.es,
                self.space.settings.elasticsearch,
                hint or self.hint,
                served or self.served,
                sweep_after_seconds=30,
                queries_end_seconds=0,
                stall_seconds=1,
                put_off_seconds=2,
            )

    @asynccontextmanager
    async def rebuild(self, **options: Any) -> AsyncIterator[Rebuild]:
        async with self.builder(**options) as builder:
            yield Rebuild(builder)

    async def run(self, store: Store, **options: Any) -> Result:
        async with asyncio.timeout(60):
            async with self.rebuild(**options) as rebuild:
                return await rebuild.run(store)

    async def states(self) -> dict[str, str]:
        """Generation → state."""
        return dict(await self.space.query("SELECT name, state FROM generations"))

    async def indexes(self) -> set[str]:
        """Keyword indexes of this space, without its prefix."""
        prefix = self.space.settings.elasticsearch.index_prefix
        return {name.removeprefix(prefix) for name in await self.es.indices.get(index=f"{prefix}*")}

    async def entries_of(self, document: UUID) -> set[UUID]:
        """Return the entries of a document in the active index."""
        return {i for i, e in (await self.space.entries()).items() if e["document_id"] == str(document)}

    async def tables(self) -> set[str]:
        rows = await self.space.query("SELECT tablename FROM pg_tables WHERE tablename LIKE 'chunks%%'")
        return {name for (name,) in rows}


_versions = iter(range(1, 10**9))


def document(name: str, content: str, **fields: object) -> DocumentUpserted:
    """Return a document that is newer than each one before."""
    return timed_document(name, content, **{"version": next(_versions), **fields})


def deletion(of: DocumentUpserted) -> DocumentDeleted:
    return DocumentDeleted(
        tenant=of.tenant, source=of.source, external_id=of.external_id, observed_at=now(), version=of.version
    )


def access(of: DocumentUpserted, *tags: str) -> AccessChanged:
    return AccessChanged(
        tenant=of.tenant, source=of.source, external_id=of.external_id, observed_at=now(), acl_tags=list(tags)
    )


def sections(*names: str) -> str:
    filler = "It says what there is to say about that at some length, with all that follows from it. " * 12
    return "\n\n".join(f"# {name}\n\nThis is about {name}. {filler}" for name in names)
