"""Shared parts of the runner's tests: a runner on real Kafka and Postgres, and what it published."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from pydantic import SecretStr

from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.source import Context, Source
from deploy.local.stack import Stack
from pipeline.kafka.admin import ensure_topics
from pipeline.kafka.producer import Producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings, PostgresSettings
from pipeline.stores.postgres import Pool, open_pool
from tests.support.connectors.folder_kit import own_database
from tests.support.connectors.runner_world import World, WorldSource
from tests.support.waiting import until
from topics.codec import decode
from topics.messages import AnyMessage
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

HEARTBEAT_SECONDS = 0.1
"""A runner looks for commands at each heartbeat, and most tests give it several."""


@asynccontextmanager
async def running(instance: Instance) -> AsyncIterator[Instance]:
    task = asyncio.create_task(instance.run())
    try:
        yield instance
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass
class Bench:
    """A runner's surroundings. ``take`` returns what was published since the last call."""

    pool: Pool
    kafka: KafkaSettings
    postgres: PostgresSettings
    producer: Producer
    folder: Path
    consumer: AIOKafkaConsumer
    make: Callable[[Context], Source] | None = None
    """Makes the source that is run; None for one that reads ``world``."""
    events_url: str | None = None
    world: World = field(default_factory=World)
    tenant: str = field(default_factory=lambda: uuid.uuid4().hex)
    taken: list[AnyMessage] = field(default_factory=list)
    """Everything that ``take`` has returned so far."""
    name: str = "wiki"
    times: dict[str, float] = field(
        default_factory=lambda: {"poll_seconds": 3600.0, "sweep_seconds": 3600.0, "groups_seconds": 3600.0}
    )

    def instance(self, **times: float) -> Instance:
        plan = Plan(
            name=self.name,
            tenant=self.tenant,
            kind="world",
            make=self.make or (lambda context: WorldSource(self.world, context)),
            **{**self.times, **times},
        )
        services = Services(
            postgres=self.postgres,
            pool=self.pool,
            producer=self.producer,
            metrics=Metrics(),
            folder=self.folder,
            events_url=self.events_url,
        )
        return Instance(plan, services)

    @asynccontextmanager
    async def running(self, **times: float) -> AsyncIterator[Instance]:
        async with running(self.instance(**times)) as instance:
            yield instance

    @asynccontextmanager
    async def loaded(self, **times: float) -> AsyncIterator[Instance]:
        """Running, the first load and the sweep after it done, and its messages taken."""
        async with self.running(**times) as instance:
            await self.until(lambda: self.done(instance, "full", "changes", "groups", "sweep"))
            await self.take()
            yield instance

    @staticmethod
    def done(instance: Instance, *names: str) -> bool:
        results = instance.activities
        return all(name in results and results[name].status.succeeded_at is not None for name in names)

    until = staticmethod(until)

    async def ask(self, action: str, argument: str | None = None) -> dict[str, Any]:
        """Ask the runner and wait for its answer."""
        [(number,)] = await self.query(
            "INSERT INTO connector_asks (tenant, source, action, argument) VALUES (%s, %s, %s, %s) RETURNING id",
            self.tenant,
            self.name,
            action,
            argument,
        )
        async with asyncio.timeout(60):
            while True:
                [(outcome,)] = await self.query("SELECT outcome FROM connector_asks WHERE id = %s", number)
                if outcome is not None:
                    return dict(outcome)
                await asyncio.sleep(0.02)

    async def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        async with self.pool.connection() as connection:
            cursor = await connection.execute(statement.encode(), parameters)
            return await cursor.fetchall() if cursor.description else []

    async def mine(self, what: str, table: str, where: str = "true") -> list[tuple[Any, ...]]:
        return await self.query(f"SELECT {what} FROM {table} WHERE tenant = %s AND {where}", self.tenant)

    async def pause(self, paused: bool) -> None:
        await self.query("UPDATE connectors SET paused = %s WHERE tenant = %s", paused, self.tenant)

    async def take(self) -> list[AnyMessage]:
        messages = [message for _, message in await self.records()]
        self.taken += messages
        return messages

    async def records(self) -> list[tuple[str, AnyMessage]]:
        """(topic without its prefix, message), since the last call."""
        ends = await self.consumer.end_offsets(self.consumer.assignment())
        results = []
        while any([await self.consumer.position(partition) < end for partition, end in ends.items()]):
            for partition, records in (await self.consumer.getmany(timeout_ms=200)).items():
                topic = partition.topic.removeprefix(self.kafka.topic_prefix)
                results += [(topic, decode(record.value, record.headers)) for record in records]
        return [result for result in results if result[1].tenant == self.tenant]


def kinds(messages: Sequence[AnyMessage]) -> list[tuple[str, str]]:
    """(kind without its version, external id or principal), sorted."""
    return sorted((m.kind.rpartition(".")[0], getattr(m, "external_id", None) or m.principal) for m in messages)


@dataclass(frozen=True)
class Ground:
    """Topics and a database, for as many tests as like: each has a tenant of its own."""

    bootstrap: str
    prefix: str
    dsn: str


@contextlib.contextmanager
def ground_on(stack: Stack) -> Iterator[Ground]:
    bootstrap = next(service.url for service in stack.services() if service.name == "kafka")
    prefix = f"{uuid.uuid4().hex[:8]}."
    asyncio.run(_topics(bootstrap, prefix))
    try:
        with own_database(stack) as dsn:
            yield Ground(bootstrap, prefix, dsn)
    finally:
        asyncio.run(_no_topics(bootstrap, prefix))


async def _topics(bootstrap: str, prefix: str) -> None:
    await ensure_topics(bootstrap, prefix=prefix)


async def _no_topics(bootstrap: str, prefix: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([topic for topic in await admin.list_topics() if topic.startswith(prefix)])
    await admin.close()


@asynccontextmanager
async def bench_on(
    ground: Ground,
    folder: Path,
    make: Callable[[Context], Source] | None = None,
    events_url: str | None = None,
) -> AsyncIterator[Bench]:
    postgres = PostgresSettings(dsn=SecretStr(ground.dsn))
    kafka = KafkaSettings(bootstrap=ground.bootstrap, topic_prefix=ground.prefix)
    partitions = [
        TopicPartition(f"{ground.prefix}{topic.name}", number)
        for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES)
        for number in range(topic.partitions)
    ]
    consumer = AIOKafkaConsumer(bootstrap_servers=ground.bootstrap, max_partition_fetch_bytes=2**25)
    await consumer.start()
    try:
        consumer.assign(partitions)
        for partition, end in (await consumer.end_offsets(partitions)).items():
            consumer.seek(partition, end)
        async with open_pool(postgres) as pool, Producer(ground.bootstrap, ground.prefix) as producer:
            with patch("connectors.runner.instance.HEARTBEAT_SECONDS", HEARTBEAT_SECONDS):
                yield Bench(pool, kafka, postgres, producer, folder, consumer, make, events_url)
    finally:
        await stop_consumer(consumer)
