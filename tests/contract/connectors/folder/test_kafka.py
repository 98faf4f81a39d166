"""The folder connector and the producer through a real Kafka."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import psutil
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from connectors.folder import publisher
from connectors.folder.connector import FolderConnector, FolderOptions
from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from pipeline.kafka import producer as producer_module
from pipeline.kafka.admin import ensure_topics
from pipeline.kafka.producer import DeliveryRefused, DeliveryUnknown, KafkaUnavailable, Producer
from pipeline.kafka.stopping import stop_consumer
from tests.support.connectors.folder_kit import Desk
from topics.codec import decode
from topics.messages import AnyMessage, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES, Topic

pytestmark = pytest.mark.stack


@pytest.fixture
def bootstrap(stack: Stack) -> str:
    return next(service.url for service in stack.services() if service.name == "kafka")


@pytest.fixture
async def prefix(bootstrap: str) -> AsyncIterator[str]:
    prefix = f"{uuid.uuid4().hex[:8]}."
    await ensure_topics(bootstrap, prefix=prefix)
    yield prefix
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([topic for topic in await admin.list_topics() if topic.startswith(prefix)])
    await admin.close()


@pytest.fixture
def kafka_process(stack: Stack) -> Iterator[psutil.Process]:
    """To be suspended; it goes on when the test ends."""
    pid = next(service.pid for service in stack.services() if service.name == "kafka")
    assert pid is not None
    process = psutil.Process(pid)
    yield process
    process.resume()


async def all_messages(bootstrap: str, *topics: str) -> list[AnyMessage]:
    """All that the topics hold, each partition in order."""
    consumer = AIOKafkaConsumer(
        *topics, bootstrap_servers=bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=2**25
    )
    await consumer.start()
    try:
        ends = await consumer.end_offsets(consumer.assignment())
        results = []
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                results += [decode(record.value, record.headers) for record in records]
        return results
    finally:
        await stop_consumer(consumer)


def document(name: str, content: str = "text") -> DocumentUpserted:
    return DocumentUpserted(
        tenant="t",
        source="s",
        external_id=name,
        observed_at=datetime(2026, 1, 1, tzinfo=UTC),
        version=1,
        title="t",
        content=content,
        acl_tags=["a"],
    )


async def test_a_folders_documents_edits_and_deletions_arrive_on_kafka(desk: Desk, bootstrap: str, prefix: str) -> None:
    for n in range(60):
        desk.write(f"{n}.md", f"# Document {n}\n\nIts text.")
    desk.write("large.txt", ("ω" * 999 + "\n") * 2000)
    options = FolderOptions(acl_tags=("staff",), tenant=desk.tenant)
    for step in range(3):
        async with Producer(bootstrap, prefix) as producer:
            connector = FolderConnector([desk.root], options=options, producer=producer, checkpoint=desk.checkpoint)
            report = await connector.scan()
        assert len(report.published) == [61, 2, 0][step]
        desk.write("0.md", "# Edited")
        (desk.root / "1.md").unlink(missing_ok=True)
    first = await all_messages(bootstrap, f"{prefix}documents.backfill.v1")
    assert len({message.key for message in first}) == 61
    later = await all_messages(bootstrap, f"{prefix}documents.live.v1")
    assert sorted(message.kind for message in later) == ["document.deleted.v1", "document.upserted.v1"]
    edited = next(message for message in later if isinstance(message, DocumentUpserted))
    assert (edited.title, edited.content) == ("Edited", "# Edited")


async def test_the_checkpoint_does_not_advance_while_kafka_hangs(
    desk: Desk, bootstrap: str, prefix: str, kafka_process: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "DELIVERY_SECONDS", 1.0)
    monkeypatch.setattr(producer_module, "CLOSE_SECONDS", 1.0)
    desk.write("a.txt")
    options = FolderOptions(acl_tags=("staff",), tenant=desk.tenant)
    async with Producer(bootstrap, prefix) as producer:
        await (await producer.send(DOCUMENTS_LIVE, document("warm")))
        connector = FolderConnector([desk.root], options=options, producer=producer, checkpoint=desk.checkpoint)
        kafka_process.suspend()
        with pytest.raises(Retryable, match="acknowledged"):
            await connector.scan()
        kafka_process.resume()
    async with Producer(bootstrap, prefix) as producer:
        connector = FolderConnector([desk.root], options=options, producer=producer, checkpoint=desk.checkpoint)
        assert [event.kind for event in (await connector.scan()).published] == ["upserted"]


async def test_flush_waits_until_kafka_acknowledged_every_record(bootstrap: str, prefix: str) -> None:
    async with Producer(bootstrap, prefix) as producer:
        deliveries = [
            await producer.send(DOCUMENTS_LIVE, document(f"d{n}"), traceparent="00-1-2-01") for n in range(500)
        ]
        await producer.flush(30)
        assert all(delivery.done() for delivery in deliveries)
    assert len(await all_messages(bootstrap, f"{prefix}documents.live.v1")) == 500


async def test_a_document_has_the_same_partition_in_the_live_and_backfill_topics(bootstrap: str, prefix: str) -> None:
    async with Producer(bootstrap, prefix) as producer:
        for n in range(50):
            await producer.send(DOCUMENTS_LIVE, document(f"d{n}"))
            await producer.send(DOCUMENTS_BACKFILL, document(f"d{n}"))
    places: dict[bytes, set[int]] = {}
    topics = [f"{prefix}{topic.name}" for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL)]
    consumer = AIOKafkaConsumer(*topics, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    count = 0
    while count < 100:
        for partition, records in (await consumer.getmany(timeout_ms=500)).items():
            for record in records:
                places.setdefault(record.key, set()).add(partition.partition)
                count += 1
    await stop_consumer(consumer)
    assert all(len(partitions) == 1 for partitions in places.values())


async def test_records_after_a_refused_record_are_delivered(bootstrap: str, prefix: str) -> None:
    """A refused batch leaves nothing behind in the producer that the next one would fail of."""
    small = Topic("small.v1", (), "takes little", partitions=1)
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(f"{prefix}small.v1", 1, 1, topic_configs={"max.message.bytes": "1000"})])
    await admin.close()
    async with Producer(bootstrap, prefix) as producer:
        await (await producer.send_raw(small, b"k", b"v", []))
        with pytest.raises(DeliveryRefused, match=r"small\.v1"):
            await (await producer.send_raw(small, b"k", os.urandom(5000), []))
        for _ in range(3):
            await (await producer.send_raw(small, b"k", b"v", [("x", b"y")]))


async def test_flush_and_close_time_out_while_kafka_hangs(
    bootstrap: str, prefix: str, kafka_process: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "CLOSE_SECONDS", 1.0)
    producer = await Producer(bootstrap, prefix).__aenter__()
    await (await producer.send(DOCUMENTS_LIVE, document("warm")))
    kafka_process.suspend()
    delivery = await producer.send(DOCUMENTS_LIVE, document("late"))
    with pytest.raises(DeliveryUnknown, match="has not acknowledged 1 records within"):
        await producer.flush(0.5)
    assert not delivery.done()  # still under way
    began = time.monotonic()
    with pytest.raises(DeliveryUnknown, match="has not acknowledged"):
        await producer.__aexit__(None, None, None)
    assert time.monotonic() - began < 5
    assert isinstance(delivery.exception(), DeliveryUnknown)


async def test_the_producer_raises_if_kafka_is_unreachable_it_is_not_open_or_the_topic_is_wrong(
    bootstrap: str, prefix: str
) -> None:
    with pytest.raises(KafkaUnavailable, match="check that it is running"):
        async with Producer("127.0.0.1:1", prefix):
            pass
    with pytest.raises(RuntimeError, match="not open"):
        await Producer(bootstrap, prefix).send(DOCUMENTS_LIVE, document("a"))
    async with Producer(bootstrap, prefix) as producer:
        with pytest.raises(ValueError, match="does not belong"):
            await producer.send(IDENTITIES, document("a"))
