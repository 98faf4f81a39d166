"""The producer that connectors and workers share: durable, idempotent, ordered by key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from aiokafka import AIOKafkaProducer

from topics.codec import Headers, encode
from topics.messages import AnyMessage
from topics.registry import MAX_MESSAGE_BYTES, Topic

STOP_SECONDS = 10.0


class DeliveryUnknown(Exception):
    """Kafka did not confirm in time: whether it has the records is unknown. Send again; a checkpoint must not move."""


class Producer:
    """``async with Producer(...) as producer``. Partitions by key as every Kafka client does (murmur2).

    Idempotent batches never expire in the client, so every wait here has its own limit.
    """

    def __init__(self, bootstrap: str, topic_prefix: str = "", security: Mapping[str, object] | None = None) -> None:
        self._bootstrap = bootstrap
        self._prefix = topic_prefix
        self._security = dict(security or {})
        self._kafka: Any = None
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._failed: BaseException | None = None

    async def __aenter__(self) -> Producer:
        self._kafka = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            acks="all",
            enable_idempotence=True,
            linger_ms=20,
            max_batch_size=256 * 1024,
            compression_type="lz4",
            max_request_size=MAX_MESSAGE_BYTES + 2**16,  # room for a dead letter's headers
            request_timeout_ms=30_000,
            **self._security,
        )
        await self._kafka.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.wait_for(self._kafka.stop(), STOP_SECONDS)
        except TimeoutError as late:
            if error is None:
                raise DeliveryUnknown(f"Kafka did not confirm within {STOP_SECONDS:.0f} s while stopping") from late

    async def send(self, topic: Topic, message: AnyMessage, *, traceparent: str | None = None) -> asyncio.Future[Any]:
        """Enqueue a message; the future is done when Kafka has it on all in-sync replicas."""
        record = encode(message, traceparent=traceparent)
        return await self.send_raw(topic, record.key, record.value, record.headers)

    async def send_raw(
        self, topic: Topic, key: bytes | None, value: bytes | None, headers: Headers
    ) -> asyncio.Future[Any]:
        """Enqueue a record as it is. Waits while the client's buffer is full, at most as long as a request may take."""
        future: asyncio.Future[Any] = await asyncio.wait_for(
            self._kafka.send(f"{self._prefix}{topic.name}", value=value, key=key, headers=headers), 60
        )
        self._outstanding.add(future)
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: asyncio.Future[Any]) -> None:
        self._outstanding.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failed = error

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until everything sent so far is delivered. Raises DeliveryUnknown."""
        waiting = set(self._outstanding)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_seconds)
            if late:
                raise DeliveryUnknown(f"Kafka did not confirm {len(late)} records within {timeout_seconds:.0f} s")
        failed, self._failed = self._failed, None
        if failed is not None:
            raise DeliveryUnknown(f"Kafka refused a record: {type(failed).__name__}") from failed
