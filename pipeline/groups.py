"""The workers' consumer groups, as our errors and settings have them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pipeline.core.errors import Retryable
from pipeline.kafka_security import refusal, security
from pipeline.settings import KafkaSettings
from topics.offsets import Groups, OffsetsUnavailable


def group(stage: str) -> str:
    """The consumer group of a stage, without the prefix that settings may put before it."""
    return f"penstock-{stage}"


@asynccontextmanager
async def groups(kafka: KafkaSettings) -> AsyncIterator[Groups]:
    """Raises Retryable when Kafka is away, Misconfigured when it does not let us in."""
    found = Groups(kafka.bootstrap, kafka.topic_prefix, security(kafka))
    try:
        await found.__aenter__()
    except OffsetsUnavailable as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error
    try:
        yield found
    finally:
        await found.__aexit__(None, None, None)


@contextmanager
def kafka_translated() -> Iterator[None]:
    try:
        yield
    except OffsetsUnavailable as error:
        raise Retryable(str(error), service="kafka") from error
