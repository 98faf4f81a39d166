"""A place of its own for a collection: a database and an index on the running servers, filled by the real stages.

Not a tenant beside the company's: BM25's word statistics are the whole index's, so a collection there would move the
company's scores, and the company's documents the collection's numbers (docs/adr/0022-evaluation.md). Kafka is not
involved: the stages are called with the events that a connector would publish.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
from elasticsearch import AsyncElasticsearch
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from pipeline.core.identity import document_id
from pipeline.core.model import ChunkParams, Generation, Quantisation, VectorIndex
from pipeline.embedding.choose import chunk_params
from pipeline.embedding.port import Embedder, OneModel
from pipeline.kafka.producer import Stored
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings, Settings
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect, create_index, drop_index
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.keywords import Keywords
from pipeline.stores.postgres import Pool, connect_alone, migrate, open_pool, translated
from query.evaluation.dataset import Dataset, Document
from topics.codec import encode
from topics.messages import DocumentUpserted

TENANT, SOURCE, TAG = "evaluation", "collection", "evaluation"
BATCH = 64


class NoKafka:
    """A producer that discards every record: hints and announcements have no reader here."""

    async def send(self, *_: object, **__: object) -> asyncio.Future[Stored]:
        return self._delivered()

    async def send_raw(self, *_: object, **__: object) -> asyncio.Future[Stored]:
        return self._delivered()

    @staticmethod
    def _delivered() -> asyncio.Future[Stored]:
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        done.set_result(Stored(0, 0))
        return done


@dataclass(slots=True)
class Place:
    """The stages over the stores of a collection. ``opened`` opens and closes them."""

    settings: Settings
    pool: Pool
    es: AsyncElasticsearch
    generation: Generation
    detect: Detect
    vectors: VectorSink
    keywords: KeywordSink
    metrics: Metrics

    async def load(self, documents: Sequence[Document], done: Callable[[int], None] = lambda _: None) -> int:
        """Load documents into the ledger and both stores, and return the number of chunks. done: called with the number
        of documents that were just stored. Raises Retryable or Misconfigured."""
        moment = datetime.now(UTC)
        for n in range(0, len(documents), BATCH):
            events = [_event(document, moment) for document in documents[n : n + BATCH]]
            records = [
                Incoming("documents", 0, n + k, r.key, r.value, r.headers, "backfill")
                for k, r in enumerate(map(encode, events))
            ]
            await self.detect.handle(records)
            ids = list(dict.fromkeys(document_id(e.tenant, e.source, e.external_id) for e in events))
            await asyncio.gather(
                self.vectors.converge(self.generation, ids), self.keywords.converge(self.generation, ids)
            )
            done(len(events))
        return await self._complete(len({document.id for document in documents}))

    async def _complete(self, documents: int) -> int:
        """Check that the whole collection is loaded: measures of a part of it would be meaningless. Raises
        Misconfigured."""
        with translated("evaluation"):
            async with self.pool.connection() as connection:
                await connection.execute(
                    sql.SQL("ANALYZE {}, documents").format(sql.Identifier(self.generation.chunk_table))
                )
                cursor = await connection.execute(
                    "SELECT count(*) FILTER (WHERE NOT EXISTS (SELECT FROM index_state s WHERE s.document_id = d.id"
                    " AND s.seq < s.want_seq)), (SELECT sum(cardinality(chunk_ids)) FROM manifests) FROM documents d"
                )
                settled, chunks = await cursor.fetchone() or (0, 0)
        if settled < documents:
            raise Misconfigured(
                f"{documents - settled} of {documents} documents did not reach both stores: nothing was measured"
            )
        return int(chunks or 0)


def _event(document: Document, moment: datetime) -> DocumentUpserted:
    return DocumentUpserted(
        tenant=TENANT,
        source=SOURCE,
        external_id=document.id,
        observed_at=moment,
        version=1,
        title=document.title,
        content=document.text,
        author=document.author,
        media_type="text/plain",
        acl_tags=[TAG],
    )


@asynccontextmanager
async def opened(settings: Settings, embedder: Embedder, dataset: Dataset) -> AsyncIterator[Place]:
    """Open an empty place for a collection, as ``empty`` does."""
    params = chunk_params(settings.embedding, embedder)
    async with empty(settings, embedder, f"penstock_eval_{_name(dataset)}", params) as place:
        yield place


@asynccontextmanager
async def empty(
    settings: Settings,
    embedder: Embedder,
    name: str,
    params: ChunkParams,
    *,
    vectors: VectorIndex = "pgvector",
    quantisation: Quantisation | None = None,
) -> AsyncIterator[Place]:
    """A database of this name and its index on the settings' servers, removed at the end. vectors: where the nearest
    are searched. Raises Retryable when a server is away, Misconfigured when we may not create a database."""
    mine = _settings(settings, name)
    async with AsyncExitStack() as closing:
        await _create(settings.postgres, name)
        closing.push_async_callback(_drop, settings.postgres, name)
        await migrate(mine.postgres)
        pool = await closing.enter_async_context(open_pool(mine.postgres))
        async with pool.connection() as connection:
            generation = await generations.ensure_first(
                connection,
                embedder,
                params,
                index_prefix=mine.elasticsearch.index_prefix,
                vectors=vectors,
                quantisation=quantisation,
            )
            await generations.check_model(connection, generation, embedder)
            generation = await generations.active(connection)
        es = connect(mine.elasticsearch)
        closing.push_async_callback(es.close)
        closing.push_async_callback(_remove_index, es, generation.keyword_index)
        await create_index(
            es,
            generation.keyword_index,
            shards=mine.elasticsearch.shards,
            replicas=mine.elasticsearch.replicas,
            dimensions=generation.indexed_dimensions,
        )
        yield assembled(mine, pool, es, generation, embedder)


def _name(dataset: Dataset) -> str:
    """A name that no other evaluation has, also not one of the same collection at the same time."""
    return hashlib.sha256(f"{dataset.name} {datetime.now(UTC).isoformat()}".encode()).hexdigest()[:12]


def _settings(settings: Settings, name: str) -> Settings:
    dsn = make_conninfo(settings.postgres.dsn.get_secret_value(), dbname=name)
    return settings.model_copy(
        update={
            "postgres": settings.postgres.model_copy(update={"dsn": SecretStr(dsn)}),
            "elasticsearch": settings.elasticsearch.model_copy(update={"index_prefix": f"{name.replace('_', '-')}-"}),
        }
    )


async def _create(postgres: PostgresSettings, name: str) -> None:
    try:
        await _administer(postgres, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except Misconfigured as error:
        if not isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            raise
        raise Misconfigured(
            "this Postgres role may not create a database, where a collection is loaded: grant it CREATEDB, or judge"
            " what is already there with --no-load"
        ) from error


async def _drop(postgres: PostgresSettings, name: str) -> None:
    await _administer(postgres, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


async def _administer(postgres: PostgresSettings, statement: sql.Composed) -> None:
    with translated("evaluation"):
        async with await connect_alone(postgres, "evaluation") as connection:
            await connection.execute(statement)


async def _remove_index(es: AsyncElasticsearch, index: str) -> None:
    await drop_index(es, index)
    with es_translated(f"drop the template of {index}"):
        await es.indices.delete_index_template(name=index)


def assembled(
    settings: Settings, pool: Pool, es: AsyncElasticsearch, generation: Generation, embedder: Embedder
) -> Place:
    """Build the product's own stages over these stores."""
    metrics, producer = Metrics(), NoKafka()
    dead = DeadLetters(pool, producer, metrics)  # type: ignore[arg-type]
    announcer = Announcer(pool, producer, metrics)  # type: ignore[arg-type]
    chunker = Chunker(lambda _: embedder.count_tokens)

    async def known() -> dict[str, Generation]:
        return {generation.name: generation}

    return Place(
        settings,
        pool,
        es,
        generation,
        Detect(
            pool,
            producer,  # type: ignore[arg-type]
            dead,
            announcer,
            lambda _: embedder.count_tokens,
            metrics,
            batch_size=32,
            grace_seconds=30,
        ),
        VectorSink(pool, OneModel(embedder), known, chunker, announcer, producer, dead, metrics, batch_size=32),  # type: ignore[arg-type]
        KeywordSink(pool, Keywords(es), known, chunker, announcer, dead, metrics, batch_size=32),
        metrics,
    )
