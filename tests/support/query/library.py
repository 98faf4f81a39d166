"""Documents in both stores without Kafka and without workers: the real stages, called directly, on the real servers."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

import numpy as np
from elasticsearch import AsyncElasticsearch

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.core.model import ChunkParams, Generation, Quantisation, VectorIndex
from pipeline.embedding.port import Embedded, Embedder, Vectors
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import (
    ElasticsearchSettings,
    EmbeddingSettings,
    KafkaSettings,
    PostgresSettings,
    Settings,
    StreamSettings,
)
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from pipeline.stores.postgres import Pool
from pipeline.stores.refresh import Refresher
from query.access.callers import Caller, identify
from query.access.tenant_rows import rows_of
from query.embedding.embedders import QueryEmbedder
from query.evaluation.place import Place, empty
from query.retrieval.search import Search
from topics.codec import encode
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

Event = DocumentUpserted | DocumentDeleted | AccessChanged


def settings_on(stack: Stack) -> Settings:
    endpoints = json.loads((stack.home / "endpoints.json").read_text())
    return Settings(
        kafka=KafkaSettings(),
        postgres=PostgresSettings(dsn=endpoints["postgres"]["dsn"]),
        elasticsearch=ElasticsearchSettings(url=endpoints["elasticsearch"]["url"]),
        embedding=EmbeddingSettings(),
        stream=StreamSettings(),
    )


@dataclass
class Library:
    settings: Settings
    pool: Pool
    es: AsyncElasticsearch
    generation: Generation
    detect: Detect
    vectors: VectorSink
    keywords: KeywordSink
    embedder: Embedder
    search: Search
    metrics: Metrics
    offset: int = 0

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        stack: Stack,
        embedder: Embedder,
        *,
        params: ChunkParams | None = None,
        vectors: VectorIndex = "pgvector",
        quantisation: Quantisation | None = None,
    ) -> AsyncIterator[Library]:
        """An empty database and index of its own on the stack's servers. vectors: where the nearest are searched."""
        name = f"q{uuid.uuid4().hex[:10]}"
        params = params or ChunkParams(200, 80, 254)
        settings = settings_on(stack)
        async with empty(settings, embedder, name, params, vectors=vectors, quantisation=quantisation) as own:
            yield cls.over(own, embedder)

    @classmethod
    def over(cls, own: Place, embedder: Embedder) -> Library:
        """Return a library over a place that exists already."""
        index = own.generation.keyword_index  # each test waits for its own writes, which nobody shares a refresh with
        own.keywords._keywords._refreshers[index] = Refresher(own.es, index, interval_seconds=0.0)
        return cls(
            own.settings,
            own.pool,
            own.es,
            own.generation,
            own.detect,
            own.vectors,
            own.keywords,
            embedder,
            Search(own.pool, own.es, QueryEmbedder(lambda: embedder)),
            own.metrics,
        )

    async def accept(self, *events: Event) -> list[UUID]:
        """Into the ledger only: neither store knows it yet."""
        records = []
        for event in events:
            record = encode(event)
            self.offset += 1
            records.append(Incoming("documents", 0, self.offset, record.key, record.value, record.headers, "live"))
        await self.detect.handle(records)
        return [document_id(e.tenant, e.source, e.external_id) for e in events]

    async def make_dead_letter(self, tenant: str, external_id: str) -> None:
        """An event of this document that nobody can read."""
        self.offset += 1
        key = f"{tenant}/wiki/{external_id}".encode()
        await self.detect.handle([Incoming("documents", 0, self.offset, key, b"{broken", [], "live")])

    async def put(self, *events: Event, batch: int = 64) -> None:
        """Into the ledger and both stores."""
        for n in range(0, len(events), batch):
            await self.converge(*dict.fromkeys(await self.accept(*events[n : n + batch])))

    async def converge(self, *ids: UUID) -> None:
        """Both stores follow the ledger."""
        await asyncio.gather(self.vectors.converge(self.generation, ids), self.keywords.converge(self.generation, ids))
        if self.generation.vectors == "elasticsearch":  # the hint of the vectors sink
            await self.keywords.converge(self.generation, ids)

    def write_home(self, folder: Path) -> None:
        """Make ``folder`` a PENSTOCK_HOME that leads here."""
        written = {
            "postgres": {"dsn": self.settings.postgres.dsn.get_secret_value()},
            "elasticsearch": {
                "url": self.settings.elasticsearch.url,
                "index_prefix": self.settings.elasticsearch.index_prefix,
            },
        }
        (folder / "endpoints.json").write_text(json.dumps(written))

    async def caller(self, tenant: str, *tags: str, principals: Sequence[str] = ()) -> Caller:
        async with rows_of(self.pool, tenant) as connection:
            return await identify(connection, tenant, tags=tags, principals=principals)

    async def execute(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        await self.pool.check()  # another test may have killed the server since this library was filled
        async with self.pool.connection() as connection:
            cursor = await connection.execute(statement.encode(), parameters)
            return await cursor.fetchall() if cursor.description else []


_clock = datetime.now(UTC) - timedelta(days=1)
_tick = 0


def _now() -> tuple[datetime, int]:
    """A moment and a version, later than any before."""
    global _tick
    _tick += 1
    return _clock + timedelta(milliseconds=_tick), _tick


def document(external_id: str, content: str, **fields: object) -> DocumentUpserted:
    moment, version = _now()
    return DocumentUpserted(
        **{  # type: ignore[arg-type]
            "tenant": "acme",
            "source": "wiki",
            "external_id": external_id,
            "observed_at": moment,
            "version": version,
            "title": external_id,
            "content": content,
            "acl_tags": ["staff"],
            "media_type": "text/markdown",
            **fields,
        }
    )


def access(of: DocumentUpserted, acl_tags: Sequence[str], required_tags: Sequence[str] = ()) -> AccessChanged:
    return AccessChanged(
        tenant=of.tenant,
        source=of.source,
        external_id=of.external_id,
        observed_at=_now()[0],
        acl_tags=list(acl_tags),
        required_tags=list(required_tags),
    )


def deletion(of: DocumentUpserted) -> DocumentDeleted:
    moment, version = _now()
    return DocumentDeleted(
        tenant=of.tenant, source=of.source, external_id=of.external_id, observed_at=moment, version=version
    )


class WordEmbedder:
    """Texts that share words are near each other: each word is a random direction, a text the sum of its words."""

    model = "words"
    revision = "1"
    dimensions = 64
    input_window = 254
    document_prefix = ""
    query_prefix = ""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        return Embedded(np.array([self._vector(text) for text in texts], dtype=np.float32))

    async def embed_query(self, text: str) -> Vectors:
        return self._vector(text)

    async def aclose(self) -> None:
        pass

    def _vector(self, text: str) -> Vectors:
        words = re.findall(r"\w+", text.lower()) or ["nothing"]
        total = np.sum([np.random.default_rng(crc32(w.encode())).standard_normal(64) for w in words], axis=0)
        return np.asarray(total / np.linalg.norm(total), dtype=np.float32)
