"""Dead letters: the record byte for byte on dead-letters.v1 under Kafka Connect's header names, mirrored in a table."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import structlog

from pipeline.core.errors import Poison
from pipeline.core.identity import document_id
from pipeline.kafka import deliver
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics
from topics.producer import Producer
from topics.registry import DEAD_LETTERS, MAX_MESSAGE_BYTES

log = structlog.get_logger()


class DeadLetters:
    """Law: after ``bury`` returns, the record is on the dead letter topic, and listed; repeats are listed once. Of a
    value larger than any message of the contract only size and digest are kept."""

    def __init__(self, pool: Pool, producer: Producer, metrics: Metrics) -> None:
        self._pool = pool
        self._producer = producer
        self._metrics = metrics

    async def bury(self, record: Incoming, *, stage: str, error: Exception) -> None:
        """Raises Retryable when Kafka or Postgres cannot be reached."""
        code = error.code if isinstance(error, Poison) else "bug"
        message = str(error) if isinstance(error, Poison) else f"{type(error).__name__} in {stage}"
        now = datetime.now(UTC).isoformat()
        headers = [
            *record.headers,
            ("__connect.errors.topic", record.topic.encode()),
            ("__connect.errors.partition", str(record.partition).encode()),
            ("__connect.errors.offset", str(record.offset).encode()),
            ("__connect.errors.stage", stage.encode()),
            ("__connect.errors.exception.class.name", code.encode()),
            ("__connect.errors.exception.message", message[:500].encode()),
            ("penstock.failed.at", now.encode()),
        ]
        value = record.value
        if len(value or b"") > MAX_MESSAGE_BYTES:  # a broker limits compressed batches: larger records can come in
            value = None
            headers.append(("penstock.value.bytes", str(len(record.value or b"")).encode()))
            headers.append(("penstock.value.sha256", hashlib.sha256(record.value or b"").hexdigest().encode()))
        await deliver([self._producer.send_raw(DEAD_LETTERS, record.key, value, headers)])
        tenant, source, external_id = _named(record.key)
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                await connection.execute(
                    'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, document_id,'
                    " tenant, source, external_id) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
                    " ON CONFLICT (id) DO NOTHING",
                    [
                        f"{record.topic}:{record.partition}:{record.offset}", record.topic, record.partition,
                        record.offset, stage, code, message[:500],
                        document_id(tenant, source, external_id) if tenant and source and external_id else None,
                        tenant, source, external_id,
                    ],
                )  # fmt: skip
        self._metrics.dead_letters.labels(stage, code).inc()
        log.warning(
            "dead_letter",
            stage=stage,
            code=code,
            topic=record.topic,
            offset=record.offset,
            bytes=len(record.value or b""),
        )


def _named(key: bytes) -> tuple[str | None, str | None, str | None]:
    """tenant, source and external id, as far as the key names them."""
    parts = key.decode("utf-8", "replace").replace("\x00", "").split("/", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 and all(parts) else (None, None, None)
