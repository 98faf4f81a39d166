"""A consumer on real Kafka leaves no connection open, however its end is disturbed."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer

from deploy.local.stack import Stack
from pipeline.kafka.stopping import stop_consumer

pytestmark = pytest.mark.stack


async def started(stack: Stack) -> tuple[AIOKafkaConsumer, list]:
    """A consumer, and its open connections."""
    bootstrap = next(service.url for service in stack.services() if service.name == "kafka")
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
    await consumer.start()
    await consumer.topics()
    connections = list(consumer._client._conns.values())
    assert connections
    assert all(connection.connected() for connection in connections)
    return consumer, connections


async def test_connections_are_closed_when_the_cancellation_of_a_fetch_escapes(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, connections = await started(stack)
    close = consumer._fetcher.close

    async def escaping() -> None:
        await close()
        raise asyncio.CancelledError

    monkeypatch.setattr(consumer._fetcher, "close", escaping)
    await stop_consumer(consumer)
    assert not any(connection.connected() for connection in connections)


async def test_connections_are_closed_when_stopping_takes_too_long(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, connections = await started(stack)
    close = consumer._fetcher.close

    async def endless() -> None:
        await close()
        await asyncio.Event().wait()

    monkeypatch.setattr(consumer._fetcher, "close", endless)
    await stop_consumer(consumer, within_seconds=0.2)
    assert not any(connection.connected() for connection in connections)


async def test_connections_are_closed_when_the_caller_is_cancelled(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, connections = await started(stack)
    close = consumer._fetcher.close
    stopping = asyncio.Event()

    async def endless() -> None:
        await close()
        stopping.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(consumer._fetcher, "close", endless)
    task = asyncio.create_task(stop_consumer(consumer, within_seconds=60))
    await stopping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(connection.connected() for connection in connections)
