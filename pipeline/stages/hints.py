"""Hints tell the sinks that the ledger holds something newer.

A lost, repeated or late hint does no harm: the sweeper hints again for documents that stay pending, and makes the
announcements that a crash has cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError, Poison
from pipeline.core.model import Lane
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.ledger import work
from pipeline.ledger.documents import Identity
from pipeline.observability import tracing
from pipeline.observability.metrics import Metrics
from pipeline.stages.announce import Announcer
from pipeline.stages.stage import Incoming, used
from pipeline.stores.leader import lead_transaction
from pipeline.stores.postgres import SWEEPER_LOCK, Pool, translated
from topics.codec import BadMessage, decode
from topics.messages import IndexHint
from topics.registry import INDEX_BACKFILL, INDEX_LIVE


async def send_hints(producer: Producer, hints: Iterable[tuple[Identity, str, Lane]]) -> int:
    """Send one hint for each (document, generation, lane) and wait until Kafka has them all. Raises Retryable."""
    now = datetime.now(UTC)
    sent = await deliver(
        producer.send(
            INDEX_LIVE if lane == "live" else INDEX_BACKFILL,
            IndexHint(
                tenant=identity.tenant,
                source=identity.source,
                external_id=identity.external_id,
                observed_at=now,
                document_id=str(identity.id),
                generation=generation,
            ),
        )
        for identity, generation, lane in hints
    )
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


log = structlog.get_logger()

SWEEP_LIMIT = 500
"""The most pending pieces of work that one round hints again."""
ANNOUNCE_EVERY = 5
"""Every fifth round also looks through a page of documents for announcements that a crash has cut off."""


class Sweeper:
    """Hints pending documents again, and announces what was missed.

    It runs in every detect worker. An advisory lock lets one of them sweep at a time, and work that one of them takes
    is not due for the others until ``again_in_seconds`` later.
    """

    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        announcer: Announcer,
        metrics: Metrics,
        *,
        interval_seconds: float,
        again_in_seconds: float,
    ) -> None:
        self._pool = pool
        self._producer = producer
        self._announcer = announcer
        self._metrics = metrics
        self._interval = interval_seconds
        self._again = again_in_seconds

    async def run(self) -> BaseException:
        """Sweep until cancelled. A round that fails is logged, and the next one follows as usual."""
        position = 0
        for round_ in count():
            try:
                await self.sweep()
                if round_ % ANNOUNCE_EVERY == 0:
                    position = await self._announcer.announce_missed(position)
            except PenstockError as error:
                log.warning("sweep_failed", reason=str(error)[:200])
            await asyncio.sleep(self._interval)
        raise AssertionError("unreachable: the count has no end")

    async def sweep(self) -> int:
        """Make one round; returns the number of hints sent. Does nothing while another worker sweeps. Raises
        Retryable."""
        with translated("sweeper"):
            async with self._pool.connection() as connection, connection.transaction():
                if not await lead_transaction(connection, SWEEPER_LOCK):
                    return 0
                due = await work.due(connection, limit=SWEEP_LIMIT, again_in_seconds=self._again)
        if not due:
            return 0
        # A new trace begins here: the ledger does not store the trace context of the event that it accepted.
        with tracing.begin("sweep", parent="", gathers=True, attributes={"penstock.documents": len(due)}):
            sent = await send_hints(self._producer, [(d.identity, d.generation, d.lane) for d in due])
        if sent:
            self._metrics.rescued.inc(sent)
            log.warning("hints_rescued", hints=sent)
        return sent
