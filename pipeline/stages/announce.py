"""Announcements: messages for other teams about documents that became searchable, or that somebody may no longer read.
They also measure freshness."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from pipeline.core.canary import is_canary
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.ledger import arrivals as ledger
from pipeline.ledger.documents import Identity
from pipeline.observability.metrics import Metrics
from pipeline.stages.stage import used
from pipeline.stores.postgres import Pool, translated
from topics.messages import DocumentIndexed
from topics.registry import DOCUMENTS_INDEXED

MISSED_PAGE_DOCUMENTS = 5_000
"""How many unannounced documents one call of ``announce_missed`` looks at."""


@dataclass(frozen=True, slots=True)
class AccessLoss:
    """A document that nobody may read any more (retired), or that somebody may no longer read (revoked)."""

    identity: Identity
    seq: int
    version: int | None
    state: Literal["retired", "revoked"]
    generation: str


class Announcer:
    """Publishes announcements, and records them in the ledger (``announced_seq``).

    Law: no announcement is lost, whether a process crashes or both sinks finish at once. One may be made twice, which
    is harmless. Canaries are not announced: they concern only us, and have metrics of their own.
    """

    def __init__(self, pool: Pool, producer: Producer, metrics: Metrics) -> None:
        self._pool = pool
        self._producer = producer
        self._metrics = metrics

    async def announce_access_loss(self, losses: Sequence[AccessLoss]) -> None:
        """Announce losses of access at once, before the stores have followed. Raises Retryable."""
        losses = [loss for loss in losses if not is_canary(loss.identity.source)]
        now = datetime.now(UTC)
        await self._publish([_message(loss, now) for loss in losses])
        for loss in losses:
            self._metrics.announced.labels(state=loss.state).inc()

    async def announce(self, ids: Collection[UUID]) -> int:
        """Announce those of these documents that both stores hold as desired and that are not announced yet; returns
        their number. Raises Retryable."""
        with translated("announce"):
            async with self._pool.connection() as connection:
                ready = await ledger.ready_to_announce(connection, ids)
        return await self._send(ready)

    async def announce_missed(self, after: int) -> int:
        """Make the announcements that a crash has cut off, among the next page of unannounced documents. after: the
        result of the last call, at first 0. Returns where the next page begins (0: from the beginning again). Raises
        Retryable."""
        with translated("announce"):
            async with self._pool.connection() as connection:
                ready, last = await ledger.missed_announcements(connection, after=after, limit=MISSED_PAGE_DOCUMENTS)
        await self._send(ready)
        return last or 0

    async def _send(self, ready: Sequence[ledger.Announcement]) -> int:
        if not ready:
            return 0
        now = datetime.now(UTC)
        announced = [a for a in ready if not is_canary(a.identity.source)]
        await self._publish([_message(a, now, chunks=a.chunks) for a in announced])
        with translated("announce"):
            async with self._pool.connection() as connection:
                await ledger.mark_announced(connection, ready)
        for a in announced:
            self._metrics.announced.labels(state=a.state).inc()
            fresh = (now - (a.changed_at or a.accepted_at)).total_seconds()
            self._metrics.freshness.labels(source=a.identity.source, lane=a.lane).observe(max(0.0, fresh))
        return len(ready)

    async def _publish(self, messages: Sequence[DocumentIndexed]) -> None:
        await deliver(self._producer.send(DOCUMENTS_INDEXED, message) for message in messages)
        if messages:
            used("kafka")


def _message(change: AccessLoss | ledger.Announcement, at: datetime, *, chunks: int = 0) -> DocumentIndexed:
    return DocumentIndexed(
        tenant=change.identity.tenant,
        source=change.identity.source,
        external_id=change.identity.external_id,
        observed_at=at,
        document_id=str(change.identity.id),
        seq=change.seq,
        version=change.version,
        state=change.state,
        generation=change.generation,
        chunks=chunks,
    )
