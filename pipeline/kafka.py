"""Settings → connections to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka_security import refusal
from pipeline.kafka_security import security as security  # handed on
from pipeline.settings import KafkaSettings, Settings
from pipeline.traced.records import sending
from topics.producer import NotDelivered, Producer, Sign
from topics.reader import Reader, ReadFailed
from topics.registry import Topic


@asynccontextmanager
async def producer(kafka: KafkaSettings) -> AsyncIterator[Producer]:
    """A started producer; leaving waits for what is under way. Raises Retryable when Kafka is away, Misconfigured when
    it does not let us in."""
    sign = signature_of(kafka)
    try:
        async with Producer(kafka.bootstrap, kafka.topic_prefix, security(kafka), trace=sending, sign=sign) as started:
            yield started
    except NotDelivered as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error


def publisher(settings: Settings) -> AbstractAsyncContextManager[Producer]:
    """``producer`` for a process that publishes to the topics of ``registry.INTAKE``. Raises Misconfigured at once
    where everything that it publishes would be refused."""
    if settings.producers == "enforce" and settings.kafka.signing_key_file is None:
        raise Misconfigured(
            "PENSTOCK_PRODUCERS=enforce refuses what is not signed: set PENSTOCK_KAFKA_SIGNING_KEY_FILE to the private"
            " key of an enrolled producer (`penstock producer add`)",
            service="kafka",
        )
    return producer(settings.kafka)


def signature_of(kafka: KafkaSettings) -> Sign | None:
    """How this process signs; None: it does not. Raises Misconfigured when its key cannot be read."""
    if kafka.signing_key_file is None:
        return None
    from topics.signatures import NotAKey, Signer  # cryptography takes 50 ms

    try:
        return Signer(Path(kafka.signing_key_file).read_bytes()).headers
    except (OSError, NotAKey) as error:
        why = str(error) if isinstance(error, NotAKey) else "no such file, or not readable"
        raise Misconfigured(f"PENSTOCK_KAFKA_SIGNING_KEY_FILE: {why}", service="kafka") from error


async def deliver(sends: Iterable[Awaitable[asyncio.Future[Any]]], *, within_seconds: float = 60.0) -> int:
    """Send all of it and wait until Kafka has it all; returns how many. Raises Retryable when that is not certain.

    ``sends`` are calls of Producer.send or send_raw, awaited here one after another (that keeps their order).
    """
    async with certain(within_seconds):
        futures = [await send for send in sends]
        for future in futures:
            await asyncio.shield(future)
    return len(futures)


@asynccontextmanager
async def certain(within_seconds: float = 60.0) -> AsyncIterator[None]:
    """Raises Retryable when what is sent inside is not known to be stored."""
    try:
        async with asyncio.timeout(within_seconds):
            yield
    except TimeoutError as error:
        raise Retryable(f"Kafka did not confirm within {within_seconds:.0f} s", service="kafka") from error
    except NotDelivered as error:
        raise Retryable(str(error), service="kafka") from error


@asynccontextmanager
async def reader(kafka: KafkaSettings, topic: Topic) -> AsyncIterator[Reader]:
    """A reader of single records. Raises Retryable when Kafka is away."""
    try:
        async with Reader(kafka.bootstrap, topic, kafka.topic_prefix, security(kafka)) as started:
            yield started
    except ReadFailed as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error
