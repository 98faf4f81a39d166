"""The connections that a build needs, and the lock that keeps two of them apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from psycopg import AsyncConnection

from pipeline.core.errors import Misconfigured
from pipeline.core.model import Store
from pipeline.generations.building import Builder, OnProgress
from pipeline.groups import group, groups, kafka_translated
from pipeline.kafka import producer
from pipeline.settings import PostgresSettings, Settings
from pipeline.stages.hints import send_hints
from pipeline.stores import fence
from pipeline.stores.elasticsearch import connect as elasticsearch_client
from pipeline.stores.postgres import BUILD_LOCK, Connection, require_migrated, translated


@asynccontextmanager
async def connect(settings: PostgresSettings, *, lock: bool = True) -> AsyncIterator[Connection]:
    """A connection without time limit that holds the build lock. Raises Misconfigured while another command has it."""
    with translated("generations"):
        await require_migrated(settings)
        async with await AsyncConnection.connect(
            settings.dsn.get_secret_value(), autocommit=True, connect_timeout=10, application_name="penstock build"
        ) as connection:
            await connection.execute("SET jit = off")
            await fence.require(connection, "stores")
            if lock:
                cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [BUILD_LOCK])
                row = await cursor.fetchone()
                if not (row and row[0]):
                    raise Misconfigured("another rebuild or build is running: wait for it, or stop it")
            yield connection


@asynccontextmanager
async def open_builder(
    settings: Settings,
    on_progress: OnProgress = lambda phase, done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Builder]:
    """A Builder on connections of its own. Raises Retryable when a service is away."""
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(connect(settings.postgres))
        es = elasticsearch_client(settings.elasticsearch)
        stack.push_async_callback(es.close)
        sender = await stack.enter_async_context(producer(settings.kafka))
        consumers = await stack.enter_async_context(groups(settings.kafka))

        async def served(store: Store) -> bool:
            with kafka_translated():
                return bool(await consumers.members(group(store)))

        yield Builder(
            connection, es, settings.elasticsearch, partial(send_hints, sender), served,
            sweep_after_seconds=settings.stream.sweep_after_seconds, on_progress=on_progress, on_note=on_note,
        )  # fmt: skip
