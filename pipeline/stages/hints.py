"""Hints: "the ledger holds something newer", sent to the sinks. Lost, doubled or late hints break nothing."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

from pipeline.core.errors import Poison
from pipeline.core.model import Lane
from pipeline.kafka import deliver
from pipeline.ledger.documents import Identity
from pipeline.stages.stage import Incoming, used
from topics.codec import BadMessage, decode
from topics.messages import IndexHint
from topics.producer import Producer
from topics.registry import INDEX_BACKFILL, INDEX_LIVE


async def send_hints(producer: Producer, hints: Iterable[tuple[Identity, str, Lane]]) -> int:
    """Send one hint for each (document, generation, lane) and wait until Kafka has them all. Raises Retryable."""
    now = datetime.now(UTC)
    sent = await deliver(
        producer.send(
            INDEX_LIVE if lane == "live" else INDEX_BACKFILL,
            IndexHint(
                tenant=identity.tenant, source=identity.source, external_id=identity.external_id, observed_at=now,
                document_id=str(identity.id), generation=generation,
            ),
        )
        for identity, generation, lane in hints
    )  # fmt: skip
    if sent:
        used("kafka")
    return sent


def read_hint(record: Incoming) -> tuple[UUID, str]:
    """(document, generation) of a hint. Raises Poison for anything else."""
    try:
        message = decode(record.value, record.headers)
        if isinstance(message, IndexHint):
            return UUID(message.document_id), message.generation
    except (BadMessage, ValueError) as error:
        raise Poison("not_a_hint", str(error)) from error
    raise Poison("not_a_hint", f"{message.kind} does not belong on {record.topic}")
