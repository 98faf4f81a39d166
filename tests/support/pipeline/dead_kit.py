"""Dead letters on real Kafka and Postgres, without workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.core.errors import Poison
from pipeline.kafka.client import producer, reader
from pipeline.kafka.producer import Producer
from pipeline.kafka.reader import Reader
from pipeline.kafka.stopping import stop_consumer
from pipeline.ledger import letters
from pipeline.ledger.letters import Letter
from pipeline.observability.metrics import Metrics
from pipeline.stages.dead import DeadLetters
from pipeline.stages.replay import Replayer, Result
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, open_pool
from tests.support.space import Space
from topics.codec import Headers
from topics.registry import DEAD_LETTERS, DOCUMENTS_LIVE, Topic

INVALID = Poison("invalid", "title: too long")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    space: Space
    pool: Pool
    producer: Producer
    reader: Reader
    dead: DeadLetters
    metrics: Metrics
    clock: Clock = field(default_factory=Clock)
    next_offset: int = 0

    def letters(self, per_minute: int) -> DeadLetters:
        """Another process, with another limit."""
        return DeadLetters(self.pool, self.producer, Metrics(), per_minute=per_minute, clock=self.clock)

    def name(self, topic: Topic) -> str:
        return self.space.settings.kafka.topic_prefix + topic.name

    def record(
        self,
        key: bytes = b"acme/wiki/a.md",
        value: bytes | None = b"{",
        headers: Headers | None = None,
        topic: Topic = DOCUMENTS_LIVE,
    ) -> Incoming:
        """A record that stands nowhere: only its bytes and its name count."""
        self.next_offset += 1
        return Incoming(self.name(topic), 2, self.next_offset, key, value, headers or [], "live")

    async def write_dead_letter(self, record: Incoming, *, stage: str = "detect") -> str:
        await self.dead.add(record, stage=stage, error=INVALID)
        return f"{record.topic}:{record.partition}:{record.offset}"

    async def replay(self, *ids: str) -> dict[str, Result]:
        replayer = Replayer(self.pool, self.producer, self.reader, topic_prefix=self.space.settings.kafka.topic_prefix)
        return {result.id: result async for result in replayer.replay(ids)}

    async def listed(self, id_: str) -> Letter:
        async with self.pool.connection() as connection:
            return (await letters.get(connection, [id_]))[id_]

    async def on_topic(self, topic: Topic) -> list[Any]:
        """Every record that stands on a topic, by partition and offset."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.space.settings.kafka.bootstrap, group_id=None, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            places = [TopicPartition(self.name(topic), number) for number in range(topic.partitions)]
            consumer.assign(places)  # once: aiokafka may hang when it is stopped soon after a change
            first, end = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
            records = [await consumer.getone() for _ in range(sum(end[at] - first[at] for at in places))]
            return sorted(records, key=lambda record: (record.partition, record.offset))
        finally:
            await stop_consumer(consumer)

    async def configure(self, topic: Topic, **settings: str) -> None:
        """Returns once the broker knows of it: the controller that is told answers before."""
        expected = {name.replace("_", "."): value for name, value in settings.items()}
        admin = AIOKafkaAdminClient(bootstrap_servers=self.space.settings.kafka.bootstrap)
        await admin.start()
        try:
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, self.name(topic), expected)])
            async with asyncio.timeout(30):
                while not expected.items() <= (await self._configured(admin, topic)).items():
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # it says so just before it does so
        finally:
            await admin.close()

    async def _configured(self, admin: AIOKafkaAdminClient, topic: Topic) -> dict[str, str]:
        [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, self.name(topic))])
        return {entry[0]: entry[1] for *_, entries in answer.resources for entry in entries}


@asynccontextmanager
async def open_desk(space: Space) -> AsyncIterator[Desk]:
    metrics, clock = Metrics(), Clock()
    async with (
        open_pool(space.settings.postgres) as pool,
        producer(space.settings.kafka) as sender,
        reader(space.settings.kafka, DEAD_LETTERS) as records,
    ):
        dead = DeadLetters(pool, sender, metrics, clock=clock)
        yield Desk(space, pool, sender, records, dead, metrics, clock)
