"""Stops a consumer of aiokafka so that its connections are closed whatever happens."""

from __future__ import annotations

import asyncio

import structlog
from aiokafka import AIOKafkaConsumer

log = structlog.get_logger()

STOP_SECONDS = 2.0
"""aiokafka can miss the first request to stop when it comes soon after a change of partition."""


async def stop_consumer(consumer: AIOKafkaConsumer, *, within_seconds: float = STOP_SECONDS) -> None:
    """Leave the group, if it is in one, and close the connections. Raises nothing of its own.

    Each step runs in a task of its own: ``AIOKafkaConsumer.stop`` lets the cancellation of its fetches escape, which
    would cancel the caller and leave the connections open.
    """
    for end in (consumer.stop, consumer._client.close):
        ending = asyncio.ensure_future(end())
        try:
            _, late = await asyncio.wait([ending], timeout=within_seconds)
        except asyncio.CancelledError:
            ending.cancel()
            await consumer._client.close()
            raise
        if late:
            ending.cancel()
        elif not ending.cancelled() and (error := ending.exception()) is not None:
            log.info("kafka_connection_not_closed", reason=type(error).__name__)
