"""Creates everything that a worker needs: schema, topics, the first generation and its index."""

from __future__ import annotations

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.embedding.choose import chunk_params, embedder, service_of, settings_of
from pipeline.kafka.admin import TopicRefused, TopicsNotReady, ensure_topics
from pipeline.kafka.client import refusal, security
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist, load
from pipeline.stores.elasticsearch import connect, create_index, extend_index
from pipeline.stores.postgres import Connection, connect_alone, divide_rows, migrate, translated


async def prepare(settings: Settings | None = None, *, partitions: int | None = None) -> list[str]:
    """Migrations, topics, generation, index. partitions: see ``ensure_topics``. Repeats are harmless. Returns one line
    for each thing that was done or that differs from what this version wants."""
    settings = settings or load()
    generation, lines = await prepare_ledger(settings)
    lines += await prepare_topics(settings, partitions=partitions)
    await prepare_indexes(settings, generation)
    return lines


async def prepare_topics(settings: Settings, *, partitions: int | None = None) -> list[str]:
    """The part of ``prepare`` that needs Kafka."""
    kafka = settings.kafka
    try:
        return await ensure_topics(
            kafka.bootstrap,
            prefix=kafka.topic_prefix,
            replication=kafka.replication,
            partitions=partitions,
            security=security(kafka),
        )
    except TopicsNotReady as error:
        raise await refusal(kafka) or Retryable(str(error)) from error
    except TopicRefused as error:
        raise Misconfigured(str(error)) from error


async def prepare_ledger(settings: Settings) -> tuple[Generation, list[str]]:
    """The part of ``prepare`` that needs Postgres. Returns the active generation and the lines."""
    lines = [f"migration {name}" for name in await migrate(settings.postgres)]
    lines += await divide_rows(settings.postgres)
    model = embedder(settings.embedding, dist() / "models")
    try:
        params = chunk_params(settings.embedding, model)
        with translated("setup"):
            async with await _connection(settings) as connection:
                generation = await generations.ensure_first(
                    connection,
                    model,
                    params,
                    index_prefix=settings.elasticsearch.index_prefix,
                    service=service_of(settings.embedding),
                )
    finally:
        await model.aclose()
    if settings_of(generation, settings.embedding) is not settings.embedding:
        lines.append(
            f"the settings name {model.model} ({model.dimensions} dimensions), but the active generation"
            f" {generation.name} uses {generation.model} ({generation.dimensions}); `penstock generation build`"
            " changes the model"
        )
    return generation, lines


async def prepare_indexes(settings: Settings, generation: Generation) -> None:
    """The part of ``prepare`` that needs Elasticsearch, after ``prepare_ledger``, which returned the generation."""
    with translated("setup"):
        async with await _connection(settings) as connection:
            indexes = {g.keyword_index for g in await generations.writable(connection)}
    es = connect(settings.elasticsearch)
    try:
        await create_index(
            es,
            generation.keyword_index,
            shards=settings.elasticsearch.shards,
            replicas=settings.elasticsearch.replicas,
            dimensions=generation.indexed_dimensions,
        )
        for index in sorted(indexes - {generation.keyword_index}):
            await extend_index(es, index)
    finally:
        await es.close()


async def _connection(settings: Settings) -> Connection:
    return await connect_alone(settings.postgres, "migrate")
