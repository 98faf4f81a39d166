"""Reading the present state of partitions: identity, beginning, end, and single records."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, ClassVar
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from pipeline.core.kafka_log import Witness, witness
from pipeline.kafka.stopping import stop_consumer

LOOK_SECONDS = 30.0
FETCH_BYTES = 1024
"""The smallest useful fetch: Kafka returns a whole batch of records even so."""
FETCH_WAIT_MS = 20
"""How long Kafka may delay a response at the end of a log. aiokafka fetches what follows a record as soon as it has the
record, and closing waits for that response."""

Place = tuple[str, int]
"""Topic, with its prefix, and partition."""


class LogsUnavailable(Exception):
    """Kafka cannot be reached or does not answer in time. The message is one line; a later attempt may succeed."""


@dataclass(slots=True)
class LogNow:
    log_id: str
    """Identifies the cluster and the topic: a topic that was deleted and created again has another one."""
    begin: int
    end: int
    records: dict[int, Witness] = field(default_factory=dict)
    """The records by offset. One that has expired, was compacted away or does not exist yet is absent."""


async def look(
    offsets: Mapping[Place, Collection[int]], bootstrap: str, security: Mapping[str, object] | None = None
) -> dict[Place, LogNow]:
    """Read the state of partitions, and the records at these offsets of each. A partition that does not exist, has no
    leader now, or was not reached within LOOK_SECONDS, is absent. security: aiokafka's TLS and SASL options. Raises
    LogsUnavailable when none was reached."""
    kafka = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_partition_fetch_bytes=FETCH_BYTES,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        request_timeout_ms=int(LOOK_SECONDS * 1000),
        **dict(security or {}),
    )
    logs: dict[Place, LogNow] = {}
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await kafka.start()
            await _look(kafka, offsets, logs)
        return logs
    except (KafkaError, TimeoutError, OSError) as error:
        if logs:
            return logs
        raise LogsUnavailable(
            f"Kafka at {bootstrap}: {type(error).__name__}; check that it is running and reachable"
        ) from error
    finally:
        await stop_consumer(kafka)


async def _look(kafka: Any, offsets: Mapping[Place, Collection[int]], logs: dict[Place, LogNow]) -> None:
    ids = await identities(kafka, {topic for topic, _ in offsets})
    places = [TopicPartition(*place) for place in sorted(offsets) if place in ids]
    if not places:
        return
    begins, ends = await kafka.beginning_offsets(places), await kafka.end_offsets(places)
    for at in places:
        now = LogNow(ids[at.topic, at.partition], begins[at], ends[at])
        for offset in sorted(n for n in set(offsets[at.topic, at.partition]) if now.begin <= n < now.end):
            if at not in kafka.assignment():
                kafka.assign([at])
            kafka.seek(at, offset)
            record = await kafka.getone(at)
            if record.offset == offset:
                now.records[offset] = witness(offset, as_read(record.timestamp), record.key, record.value)
        logs[at.topic, at.partition] = now


def as_read(sent_ms: int) -> int:
    """The time of a record, in milliseconds, as it would be computed from faust's seconds (a float, and so not always
    exact): the two must be equal to be compared."""
    return round(sent_ms / 1000.0 * 1000)


async def identities(kafka: Any, topics: Collection[str]) -> dict[Place, str]:
    """The log_id of each partition that exists and has a leader."""
    client = kafka._client  # aiokafka's own request for metadata has no topic ids
    answer = await client.send(client.get_random_node(), _TopicIds(sorted(topics)))
    return {
        (name, partition): f"{answer.cluster_id}/{topic_id}"
        for error, name, topic_id, _, partitions, *_ in answer.topics
        if not error
        for _, partition, leader, *_ in partitions
        if leader >= 0
    }


class _Uuid(AbstractType[UUID]):  # type: ignore[misc]  # aiokafka is untyped
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))

    @classmethod
    def repr(cls, value: UUID) -> str:
        return str(value)


class _TopicIdsResponse(Response):  # type: ignore[misc]
    """Kafka's Metadata response, version 12."""

    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _TopicIdsRequest(RequestStruct):  # type: ignore[misc]
    """Kafka's Metadata request, version 12 (Kafka 3.0 and later)."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = _TopicIdsResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicIds(Request[_TopicIdsRequest]):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 3

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_TopicIdsRequest]) -> _TopicIdsRequest:
        return request_struct_class([(UUID(int=0), name, {}) for name in self._topics], False, False, {})
