"""Creates everything that a worker needs: schema, topics, the first generation and its index."""

from __future__ import annotations

from psycopg import AsyncConnection

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.embedding.choose import chunk_params, embedder, service_of, settings_of
from pipeline.kafka.admin import TopicRefused, TopicsNotReady, ensure_topics
from pipeline.kafka.client import refusal, security
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings, dist, load
from pipeline.stores.elasticsearch import connect, create_index, extend_index
from pipeline.stores.postgres import divide_rows, migrate, translated


async def prepare(settings: Settings | None = None, *, partitions: int | None = None) -> list[str]:
    """Migrations, topics, generation, index. partitions: see ``ensure_topics``. Repeats are harmless. Returns one line
    for each thing that was done or that differs from what this version wants."""
    settings = settings or load()
    lines = [f"migration {name}" for name in await migrate(settings.postgres)]
    lines += await divide_rows(settings.postgres)
    kafka = settings.kafka
    try:
        lines += await ensure_topics(
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
    model = embedder(settings.embedding, dist() / "models")
    try:
        params = chunk_params(settings.embedding, model)
        with translated("setup"):
            async with await AsyncConnection.connect(
                settings.postgres.dsn.get_secret_value(), autocommit=True
            ) as connection:
                generation = await generations.ensure_first(
                    connection,
                    model,
                    params,
                    index_prefix=settings.elasticsearch.index_prefix,
                    service=service_of(settings.embedding),
                )
                indexes = {g.keyword_index for g in await generations.writable(connection)}
    finally:
        await model.aclose()
    if settings_of(generation, settings.embedding) is not settings.embedding:
        lines.append(
            f"the settings name {model.model} ({model.dimensions} dimensions), but the active generation"
            f" {generation.name} uses {generation.model} ({generation.dimensions}); `penstock generation build`"
            " changes the model"
        )
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
    return lines
