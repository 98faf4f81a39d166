"""Reads single records by partition and offset."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from pipeline.kafka.stopping import stop_consumer
from topics.letters import RawRecord
from topics.registry import Topic

READ_SECONDS = 30.0
FETCH_BYTES = 1024 * 1024
"""The size of one fetch; a larger record comes alone. The next records are then already in memory."""


class ReadFailed(Exception):
    """Kafka cannot be reached or does not answer in time. The message is one line; a later attempt may succeed."""


class Reader:
    """Reads one topic, for one task at a time; an async context manager. It is in no consumer group and commits
    nothing."""

    def __init__(
        self, bootstrap: str, topic: Topic, topic_prefix: str = "", security: Mapping[str, object] | None = None
    ) -> None:
        """bootstrap: ``host:port``, several separated by commas. security: aiokafka's TLS and SASL options."""
        self._bootstrap = bootstrap
        self._topic = topic_prefix + topic.name
        self._kafka = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=FETCH_BYTES,
            request_timeout_ms=int(READ_SECONDS * 1000),
            **dict(security or {}),
        )
        self._next: int | None = None
        """The consumer's position in its assigned partition."""
        self._end = 0
        """The end of that partition, as last requested."""

    async def __aenter__(self) -> Self:
        """Raises ReadFailed."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                await self._kafka.start()
        except (KafkaError, TimeoutError, OSError) as error:
            await stop_consumer(self._kafka)
            raise ReadFailed(f"Kafka at {self._bootstrap} cannot be reached: check that it is running") from error
        except BaseException:
            await stop_consumer(self._kafka)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop_consumer(self._kafka)

    async def read(self, partition: int, offset: int) -> RawRecord | None:
        """The record at an offset; None when there is none, or no longer. Raises ReadFailed."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await self._read(TopicPartition(self._topic, partition), offset)
        except OffsetOutOfRangeError:
            self._next = None
            return None
        except (KafkaError, TimeoutError, OSError) as error:
            self._next = None
            reason = f"{self._topic} partition {partition}: {type(error).__name__}"
            raise ReadFailed(f"Kafka at {self._bootstrap} did not give a record of {reason}") from error

    async def _read(self, at: TopicPartition, offset: int) -> RawRecord | None:
        if at not in self._kafka.assignment():
            self._kafka.assign([at])
            self._next, self._end = None, 0
        if offset >= self._end:
            self._end = (await self._kafka.end_offsets([at]))[at]
        if offset >= self._end:
            return None
        if self._next != offset:
            if offset < (await self._kafka.beginning_offsets([at]))[at]:
                return None
            self._kafka.seek(at, offset)
        record = await self._kafka.getone(at)
        self._next = record.offset + 1
        return RawRecord(record.key, record.value, list(record.headers)) if record.offset == offset else None
