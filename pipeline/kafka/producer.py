"""Messages → Kafka, durably: acknowledged by every in-sync replica, in order within a key, and perhaps twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    IllegalOperation,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    ProducerClosed,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from topics.codec import Headers, encode
from topics.messages import AnyMessage
from topics.registry import INTAKE, MAX_MESSAGE_BYTES, Topic

REQUEST_SECONDS = 30.0
"""How long ``send`` waits for room or for the topic's partitions."""
CLOSE_SECONDS = 10.0
LINGER_MS = 2
"""How long a record waits for others of its partition. A change waits twice: its message, and then its hint. Under
load, records gather while the request before theirs is answered."""
TURN_BYTES = 256 * 1024
"""After a message of more, other tasks have a turn: it takes milliseconds to encode, and a caller may send hundreds."""

_HARMLESS = (
    TimeoutError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
"""The errors that ``send`` raises before anything was sent, after which the producer can still be used."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The position of a delivered record."""

    partition: int
    offset: int


Delivery = asyncio.Future[Stored]
"""Done when every in-sync replica has the record; otherwise it raises DeliveryUnknown or DeliveryRefused."""


Sign = Callable[[str, bytes | None, bytes | None, Headers], Headers]
"""(the topic's full name, key, value, headers) → the headers with a signature (``signatures.Signer.headers``)."""


class Sending(Protocol):
    """The trace of a message that is being sent."""

    @property
    def traceparent(self) -> str | None: ...

    def ended(self, size: int, error: BaseException | None) -> None:
        """End the trace. size: the size of the message's value in bytes. error: None when the message is stored."""
        ...


class NotDelivered(Exception):
    """A record is not known to be stored. The message is one line for people."""


class KafkaUnavailable(NotDelivered):
    """Kafka cannot be reached, or is too slow. A later attempt may succeed."""


class DeliveryUnknown(KafkaUnavailable):
    """Kafka has not acknowledged a record in time: it may be stored, now or later. Keep the checkpoint, send again."""


class DeliveryRefused(NotDelivered):
    """Kafka has refused a record and said why: it is too large, we are not authorised, or there is no such topic."""


class Producer:
    """An async context manager; one for a process and event loop, shared by its tasks.

    ``send`` only enqueues. A record is stored when its delivery future is done, or when ``flush`` has returned.
    """

    def __init__(
        self,
        bootstrap: str,
        topic_prefix: str = "",
        security: Mapping[str, object] | None = None,
        *,
        trace: Callable[[str, AnyMessage], Sending | None] = lambda topic, message: None,
        sign: Sign | None = None,
    ) -> None:
        """bootstrap: ``host:port``, several separated by commas. security: aiokafka's TLS and SASL options. trace:
        asked for every message that comes without a ``traceparent``, with its topic's full name. sign: signs the
        messages for the topics of ``registry.INTAKE``; records that are sent as they are keep their signature."""
        self._trace = trace
        self._sign = sign
        self._bootstrap = bootstrap
        self._prefix = topic_prefix
        self._security = dict(security or {})
        self._kafka: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._open = False
        self._closing: set[asyncio.Task[None]] = set()
        self._under_way: set[Delivery] = set()

    async def __aenter__(self) -> Self:
        """Raises KafkaUnavailable."""
        self._open = True
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the records in flight, at most CLOSE_SECONDS. Raises like ``flush``, unless the block has raised."""
        self._open = False
        try:
            if error is None:
                await self.flush(CLOSE_SECONDS)
        finally:
            kafka, self._kafka = self._kafka, None
            if kafka is not None:
                await _close(kafka)
            await asyncio.gather(*self._closing)

    async def send(self, topic: Topic, message: AnyMessage, traceparent: str | None = None) -> Delivery:
        """Enqueue a message; waits only for room. Raises KafkaUnavailable or DeliveryRefused when it cannot be
        enqueued at all."""
        if message.kind not in topic.holds:
            raise ValueError(f"{message.kind} does not belong on {topic.name}")
        sending = self._trace(self._prefix + topic.name, message) if traceparent is None else None
        record = encode(message, traceparent=sending.traceparent if sending else traceparent)
        if len(record.value) > TURN_BYTES:
            await asyncio.sleep(0)
        headers = record.headers
        if self._sign is not None and topic in INTAKE:
            headers = self._sign(self._prefix + topic.name, record.key, record.value, headers)
        if sending is None:
            return await self.send_raw(topic, record.key, record.value, headers)
        size = len(record.value)
        try:
            delivery = await self.send_raw(topic, record.key, record.value, headers)
        except BaseException as error:
            sending.ended(size, error)
            raise
        delivery.add_done_callback(lambda done: sending.ended(size, None if done.cancelled() else done.exception()))
        return delivery

    async def send_raw(self, topic: Topic, key: bytes | None, value: bytes | None, headers: Headers) -> Delivery:
        """Enqueue a record as it is (dead letters, replays)."""
        kafka = await self._connected()
        if key is None and value is None:
            value = b""  # aiokafka refuses a record without both
        name = self._prefix + topic.name
        try:
            # aiokafka's own timeouts do not end a send while Kafka is down.
            async with asyncio.timeout(REQUEST_SECONDS + 5):
                sent = await kafka.send(name, value, key=key, headers=headers)
        except (KafkaError, TimeoutError) as error:
            if not isinstance(error, _HARMLESS):
                self._retire(kafka)
            raise self._explained(error, name) from error
        delivery: Delivery = asyncio.get_running_loop().create_future()
        self._under_way.add(delivery)
        sent.add_done_callback(lambda done: self._settle(kafka, name, done, delivery))
        return delivery

    async def send_tombstone(self, topic: Topic, key: bytes, headers: Headers) -> Delivery:
        """Enqueue a record without a value, signed like a message, so that compaction forgets the key. Raises as
        ``send`` does."""
        if self._sign is not None and topic in INTAKE:
            headers = self._sign(self._prefix + topic.name, key, None, headers)
        return await self.send_raw(topic, key, None, headers)

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until all records sent so far are stored. Raises DeliveryUnknown after the timeout (the records stay in
        flight), or the failure of a record that was in flight; earlier failures are only in their futures."""
        if not self._under_way:
            return
        done, late = await asyncio.wait(set(self._under_way), timeout=timeout_seconds)
        for delivery in done:
            delivery.result()
        if late:
            raise DeliveryUnknown(
                f"Kafka at {self._bootstrap} has not acknowledged {len(late)} records within {timeout_seconds:g} s:"
                " whether it has them is unknown, so they have to be sent again"
            )

    def _settle(self, kafka: AIOKafkaProducer, topic: str, sent: asyncio.Future[Any], delivery: Delivery) -> None:
        self._under_way.discard(delivery)
        error = None if sent.cancelled() else sent.exception()
        if sent.cancelled() or error is not None:
            self._retire(kafka)
            if not delivery.done():
                delivery.set_exception(self._explained(error, topic))
                delivery.exception()  # marks it as retrieved: a caller that only flushes never reads it
        elif not delivery.done():
            delivery.set_result(Stored(sent.result().partition, sent.result().offset))

    def _retire(self, kafka: AIOKafkaProducer) -> None:
        """Close this connection, so that the next send begins with a new one."""
        if kafka is self._kafka:
            self._kafka = None
            closing = asyncio.get_running_loop().create_task(_close(kafka))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _connected(self) -> AIOKafkaProducer:
        if self._kafka is not None:
            return self._kafka
        async with self._starting:
            if self._kafka is None:
                if not self._open:
                    raise RuntimeError("the producer is not open: use it as an async context manager")
                self._kafka = await self._start()
        return self._kafka

    async def _start(self) -> AIOKafkaProducer:
        kafka = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            acks="all",
            enable_idempotence=False,  # docs/adr/0077-no-producer-ids.md
            linger_ms=LINGER_MS,
            max_batch_size=256 * 1024,
            max_request_size=MAX_MESSAGE_BYTES + 2**16,  # room for a dead letter's headers
            compression_type="zstd",
            request_timeout_ms=int(REQUEST_SECONDS * 1000),
            **self._security,
        )
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await kafka.start()
        except (KafkaError, TimeoutError, OSError) as error:
            await _close(kafka)
            raise self._explained(error, "") from error
        except BaseException:
            await _close(kafka)
            raise
        return kafka

    def _explained(self, error: BaseException | None, topic: str) -> Exception:
        name = type(error).__name__
        match error:
            case UnknownTopicOrPartitionError():
                return DeliveryRefused(f"Kafka at {self._bootstrap} has no topic {topic}: run `penstock migrate`")
            case TopicAuthorizationFailedError():
                return DeliveryRefused(f"Kafka at {self._bootstrap} does not let this user write to {topic}")
            case KafkaConnectionError() | OSError() if not topic:
                return KafkaUnavailable(f"Kafka at {self._bootstrap} cannot be reached: check that it is running")
            case ProducerClosed() | None:
                return DeliveryUnknown(f"the producer stopped before Kafka at {self._bootstrap} acknowledged a record")
            case KafkaError() if not error.retriable and not isinstance(error, KafkaTimeoutError | IllegalOperation):
                return DeliveryRefused(f"Kafka at {self._bootstrap} refused a record for {topic}: {name}")
            case _:
                return DeliveryUnknown(f"Kafka at {self._bootstrap} did not take a record for {topic} in time ({name})")


async def _close(kafka: AIOKafkaProducer) -> None:
    """Fail the records in flight, then stop: stop() alone would wait for them."""
    accumulator = kafka._message_accumulator
    if accumulator is not None:
        accumulator.fail_all(ProducerClosed())
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await kafka.stop()
    except (TimeoutError, KafkaError):
        await kafka.client.close()
