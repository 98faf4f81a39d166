"""Another writer of a topic cannot harm our producer, on a real Kafka."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from aiokafka.producer.transaction_manager import PidAndEpoch

from deploy.local.stack import Stack
from pipeline.kafka.producer import Producer, _close
from pipeline.kafka.stopping import stop_consumer
from topics.registry import DOCUMENTS_LIVE

pytestmark = pytest.mark.stack

NEIGHBOURS = 30
"""Kafka counts producer ids: those that were given just before belong to others."""


async def impersonate(bootstrap: str, topic: str) -> None:
    """Take the place of the second record of every producer that started before: the broker answers its own record as
    a repetition, and does not store it."""
    attacker = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, retry_backoff_ms=10)
    await attacker.start()
    manager = attacker._txn_manager
    mine = manager.producer_id
    try:
        for neighbour in range(max(0, mine - NEIGHBOURS), mine):
            manager._pid_and_epoch = PidAndEpoch(neighbour, 0)
            manager._sequence_numbers[TopicPartition(topic, 0)] = 1
            try:
                async with asyncio.timeout(1):
                    await attacker.send_and_wait(topic, b"forged", partition=0)
            except (KafkaError, TimeoutError):
                continue
    finally:
        await _close(attacker)


async def test_a_record_is_stored_although_another_writer_uses_the_ids_of_its_producer(stack: Stack) -> None:
    """Kafka asks nobody whose producer id a batch names. A revocation was acknowledged, and not stored."""
    bootstrap = next(service.url for service in stack.services() if service.name == "kafka")
    prefix = f"{uuid4().hex[:8]}."
    topic = prefix + DOCUMENTS_LIVE.name
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()
    async with Producer(bootstrap, prefix) as producer:
        await (await producer.send_raw(DOCUMENTS_LIVE, b"key", b"first", []))
        await impersonate(bootstrap, topic)
        stored = await (await producer.send_raw(DOCUMENTS_LIVE, b"key", b"revocation", []))
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="earliest")
    await consumer.start()
    try:
        place = TopicPartition(topic, stored.partition)
        consumer.assign([place])
        end = (await consumer.end_offsets([place]))[place]
        values = [(await consumer.getone()).value for _ in range(end)]
    finally:
        await stop_consumer(consumer)
    assert values[stored.offset] == b"revocation", values
