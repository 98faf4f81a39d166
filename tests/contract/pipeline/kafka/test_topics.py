"""Creating topics, on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local.stack import Stack
from pipeline.kafka import admin as admin_module
from pipeline.kafka.admin import TopicRefused, TopicsNotReady, ensure_topics
from pipeline.kafka.groups import Groups
from pipeline.kafka.producer import Producer
from pipeline.kafka.stopping import stop_consumer
from topics.codec import decode, encode
from topics.messages import MAX_CONTENT_BYTES, DocumentUpserted
from topics.registry import COPARTITIONED, DOCUMENTS_LIVE, IDENTITIES, INTAKE, TOPICS

pytestmark = pytest.mark.stack


@pytest.fixture
def bootstrap(stack: Stack) -> str:
    return next(service.url for service in stack.services() if service.name == "kafka")


@pytest.fixture
def prefix() -> str:
    return f"{uuid4().hex[:8]}."


@pytest.fixture
async def admin(bootstrap: str) -> AsyncIterator[Any]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    yield client
    await client.close()


async def test_unknown_consumer_groups_of_a_new_cluster_have_no_members_and_raise_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock status` before any worker was started said that Kafka does not describe the second group that it asked
    for: the first question had Kafka make the topic that it keeps groups in."""
    monkeypatch.setenv("PENSTOCK_HEAP_KAFKA_MB", "256")
    mine = Stack(tmp_path / "home", die_with_parent=True)
    try:
        await asyncio.to_thread(mine.up, services=["kafka"])
        at = mine.endpoints()["kafka"]["bootstrap"]
        await ensure_topics(at)
        groups = ["penstock-detect", "penstock-identities", "penstock-vectors"]
        async with Groups(at, settle_seconds=120) as kafka:  # however slow this machine is
            for _ in range(20):  # all the while that Kafka makes that topic
                assert [(await kafka.committed(group), await kafka.members(group)) for group in groups] == [
                    ({}, [])
                ] * 3
                await asyncio.sleep(0.1)
            logs = await kafka.logs([DOCUMENTS_LIVE.name], datetime.now(UTC))
            assert len(logs) == DOCUMENTS_LIVE.partitions
    finally:
        await asyncio.to_thread(mine.down)


async def test_ensure_topics_creates_all_topics_once(bootstrap: str, prefix: str, admin: Any) -> None:
    first = await ensure_topics(bootstrap, prefix=prefix)
    assert sorted(first) == sorted(f"topic {prefix}{t.name}: created ({t.partitions} partitions)" for t in TOPICS)
    topics = {t["topic"]: t for t in await admin.describe_topics(None)}
    for topic in TOPICS:
        partitions = topics[f"{prefix}{topic.name}"]["partitions"]
        assert len(partitions) == topic.partitions
        assert all(partition["leader"] >= 0 for partition in partitions)
    assert await ensure_topics(bootstrap, prefix=prefix) == []


async def test_concurrent_processes_create_each_topic_once(bootstrap: str, prefix: str) -> None:
    results = await asyncio.gather(*(ensure_topics(bootstrap, prefix=prefix) for _ in range(5)))
    created = sorted(line.split()[1] for lines in results for line in lines)
    assert created == sorted(f"{prefix}{topic.name}:" for topic in TOPICS)


async def test_a_topic_with_other_settings_is_reported_and_left_unchanged(
    bootstrap: str, prefix: str, admin: Any
) -> None:
    live, identities = f"{prefix}{DOCUMENTS_LIVE.name}", f"{prefix}{IDENTITIES.name}"
    await admin.create_topics(
        [
            NewTopic(live, 2, 1, topic_configs={"max.message.bytes": "1000000", "retention.ms": "60000"}),
            NewTopic(identities, 32, 1, topic_configs=IDENTITIES.configs(replication=1)),  # more partitions: fine
        ]
    )
    for _ in range(2):
        lines = [line for line in await ensure_topics(bootstrap, prefix=prefix) if "created" not in line]
        assert all("\n" not in line for line in lines)
        text = "\n".join(lines)
        assert f"topic {live}: 2 partitions, this version wants 8" in text
        assert f"topic {live}: max.message.bytes is 1000000, this version wants 27262976" in text
        assert f"topic {live}: retention.ms is 60000" in text
        assert f"topics {live} (2 partitions) and {prefix}documents.backfill.v1 (8) must have equally many" in text
        assert len(lines) == 4
    topics = {t["topic"]: len(t["partitions"]) for t in await admin.describe_topics(None)}
    assert (topics[live], topics[identities]) == (2, 32)


async def test_partitions_are_added_to_the_topics_that_workers_share_by_several_processes_at_once(
    bootstrap: str, prefix: str, admin: Any
) -> None:
    await ensure_topics(bootstrap, prefix=prefix)
    results = await asyncio.gather(*(ensure_topics(bootstrap, prefix=prefix, partitions=11) for _ in range(3)))
    shared = {f"{prefix}{topic.name}" for pair in COPARTITIONED for topic in pair}
    lines = {line for lines in results for line in lines}
    assert lines == {f"topic {name}: 8 partitions are now 11" for name in shared}
    counts = {t["topic"]: len(t["partitions"]) for t in await admin.describe_topics(None)}
    assert {name for name, count in counts.items() if name.startswith(prefix) and count == 11} == shared
    # Fewer are not requested by anybody who did not say so, and more are left.
    assert await ensure_topics(bootstrap, prefix=prefix) == []
    assert await ensure_topics(bootstrap, prefix=prefix, partitions=9) == []
    created = await ensure_topics(bootstrap, prefix=f"{prefix}2.", partitions=12)
    assert {f"topic {prefix}2.{t.name}: created (12 partitions)" for t in INTAKE[:2]} < set(created)


async def test_more_replicas_than_brokers_are_rejected(bootstrap: str, prefix: str, admin: Any) -> None:
    with pytest.raises(TopicRefused, match=r"cannot be created: InvalidReplicationFactor"):
        await ensure_topics(bootstrap, prefix=prefix, replication=3)
    await ensure_topics(bootstrap, prefix=prefix)
    lines = await ensure_topics(bootstrap, prefix=prefix, replication=3)
    assert f"topic {prefix}documents.live.v1: 1 replicas, the setting asks for 3; reassign its partitions" in lines


async def test_an_unreachable_kafka_is_reported_in_one_line() -> None:
    with pytest.raises(TopicsNotReady, match=r"Kafka at 127\.0\.0\.1:9: \w+; check that it is running") as raised:
        await ensure_topics("127.0.0.1:9")
    assert "\n" not in str(raised.value)


async def test_a_topic_that_stays_without_a_leader_raises_topics_not_ready(
    bootstrap: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "LEADER_SECONDS", 0.5)
    monkeypatch.setattr(admin_module, "_has_leaders", lambda partitions: False)
    with pytest.raises(TopicsNotReady, match="has no leader"):
        await ensure_topics(bootstrap, prefix=prefix)


async def test_the_largest_message_fits_its_topic(bootstrap: str, prefix: str) -> None:
    """4 MiB of content of the kind that JSON swells most: control characters, six bytes each."""
    await ensure_topics(bootstrap, prefix=prefix)
    message = DocumentUpserted.model_validate(
        {
            "tenant": "t",
            "source": "s",
            "external_id": "ß" * 2_000,
            "observed_at": "2026-01-01T00:00:00Z",
            "version": 1,
            "title": "\x01" * 4_000,
            "content": "\x01" * MAX_CONTENT_BYTES,
            "acl_tags": [f"{n}" * 100 for n in range(1_000)],
        }
    )
    record = encode(message)
    async with Producer(bootstrap, prefix) as producer:
        await (await producer.send_raw(DOCUMENTS_LIVE, record.key, record.value, record.headers))
    consumer = AIOKafkaConsumer(
        f"{prefix}{DOCUMENTS_LIVE.name}", bootstrap_servers=bootstrap, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        got = await asyncio.wait_for(consumer.getone(), 30)
    finally:
        await stop_consumer(consumer)
    assert got.key == record.key
    assert decode(got.value, got.headers) == message


async def test_a_record_of_a_time_beyond_the_calendar_hides_no_lag(bootstrap: str, prefix: str, admin: Any) -> None:
    """The lag of all topics was not shown while such a record was the first one of a partition: a writer of the topic
    chooses the times of its records, and brokers before 4.0 accept any."""
    anything = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    await admin.create_topics([NewTopic(f"{prefix}{IDENTITIES.name}", 1, 1, topic_configs=anything)])
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        await producer.send_and_wait(f"{prefix}{IDENTITIES.name}", b"x", partition=0, timestamp_ms=2**62)
    finally:
        await producer.stop()
    async with Groups(bootstrap, prefix) as groups:
        [log] = (await groups.logs([IDENTITIES.name], datetime.now(UTC))).values()
    assert (log.begin, log.behind(None)) == (0, 1)
    assert log.oldest is not None
    assert log.oldest.year == 9999
