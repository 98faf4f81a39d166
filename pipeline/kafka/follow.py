"""Follows all partitions of a topic of any cluster, in no consumer group: the caller keeps the positions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.admin import TopicRefused, TopicsNotReady, topic_settings
from pipeline.kafka.batches import POLL_BYTES, begin_poll
from pipeline.kafka.client import refusal, security
from pipeline.kafka.logs import identities
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.settings import KafkaSettings

SILENT_SECONDS = 30.0
"""How long a response, or the next record before the end of a partition, may take."""
POLL_MS = 100
MAX_RECORDS = 500
"""The records of one batch."""
FETCH_WAIT_MS = 20
"""How long Kafka may delay a response at the end of a log. aiokafka fetches what follows a record as soon as it has the
record, and the next change of partition waits for that response."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A record. ``key`` and ``value`` are as stored."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Ends:
    """The state of a topic."""

    log_id: str
    """Identifies the cluster and the topic: a topic that was deleted and created again has another one."""
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    """Offsets by partition. Records of open transactions are beyond the end."""


class Follower:
    """All methods raise Retryable while Kafka does not respond, and Misconfigured where it refuses us or the topic does
    not exist. For one task at a time. After an error it connects again."""

    def __init__(self, kafka: KafkaSettings, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._consumer: AIOKafkaConsumer | None = None

    async def close(self) -> None:
        if (consumer := self._consumer) is not None:
            self._consumer = None
            await stop_consumer(consumer)

    async def settings(self, names: Sequence[str]) -> dict[str, str]:
        """Return settings of the topic, such as ``cleanup.policy``."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._kafka.bootstrap, **security(self._kafka))
        try:
            await admin.start()
            return await topic_settings(admin, self._topic, names)
        except TopicRefused as error:
            raise Misconfigured(str(error), service="kafka") from error
        except (TopicsNotReady, KafkaError, TimeoutError, OSError) as error:
            raise await self._explained(error) from error
        finally:
            await admin.close()

    async def ends(self) -> Ends:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                consumer = await self._connected()
                ids = await identities(consumer, [self._topic])
                if not ids:
                    raise Misconfigured(f"the topic {self._topic} does not exist, or may not be described")
                places = [TopicPartition(*place) for place in sorted(ids)]
                begins, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
        except (KafkaError, TimeoutError, OSError) as error:
            raise await self._explained(error) from error
        return Ends(
            next(iter(ids.values())),
            {place.partition: begins[place] for place in places},
            {place.partition: ends[place] for place in places},
        )

    async def read(self, partition: int, start: int, end: int) -> AsyncIterator[tuple[Sequence[Followed], int]]:
        """Yield the records from ``start`` to before ``end`` in batches, each with the offset that follows it. Offsets
        may be missing: those of compacted records and of transactions. ``start`` exists."""
        place = TopicPartition(self._topic, partition)
        try:
            consumer = await self._connected()
            consumer.assign([place])
            consumer.seek(place, start)
            position, silent = start, 0.0
            while position < end:
                begin_poll(POLL_BYTES)
                batches = await consumer.getmany(place, timeout_ms=POLL_MS, max_records=MAX_RECORDS)
                records = [
                    Followed(partition, record.offset, record.key, record.value)
                    for record in batches.get(place, ())
                    if record.offset < end
                ]
                before, position = position, await consumer.position(place)
                silent = 0.0 if position > before else silent + POLL_MS / 1_000
                if position > before:
                    yield records, position
                elif silent > SILENT_SECONDS:
                    raise Retryable(f"Kafka returns no records of {self._topic} before its end", service="kafka")
        except OffsetOutOfRangeError as error:
            await self.close()
            raise Retryable(f"the topic {self._topic} lost records while it was read", service="kafka") from error
        except (KafkaError, TimeoutError, OSError) as error:
            raise await self._explained(error) from error

    async def _connected(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self._kafka.bootstrap,
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",
                isolation_level="read_committed",
                fetch_max_wait_ms=FETCH_WAIT_MS,
                request_timeout_ms=int(SILENT_SECONDS * 1_000),
                **security(self._kafka),
            )
            self._consumer = consumer
            await consumer.start()
        return self._consumer

    async def _explained(self, error: BaseException) -> Misconfigured | Retryable:
        await self.close()
        reason = f"Kafka at {self._kafka.bootstrap} does not respond ({type(error).__name__})"
        return await refusal(self._kafka) or Retryable(reason, service="kafka")
