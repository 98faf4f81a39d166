"""announce: tell other teams what both stores now return, and measure how fresh that is."""

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

MISSED_PAGE = 5_000
"""Unannounced documents looked at in one sweep."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    identity: Identity
    seq: int
    version: int | None
    state: Literal["retired", "revoked"]
    generation: str


class Announcer:
    """Follows announced_seq: a crash, or two sinks that finish together, neither lose an announcement nor skip one
    (a doubled one is harmless). Of canaries nobody is told: they are ours alone, and have numbers of their own."""

    def __init__(self, pool: Pool, producer: Producer, metrics: Metrics) -> None:
        self._pool = pool
        self._producer = producer
        self._metrics = metrics

    async def withdrawn(self, gone: Sequence[Withdrawal]) -> None:
        """Say at once, before the stores follow, that somebody may no longer read these. Raises Retryable."""
        gone = [w for w in gone if not is_canary(w.identity.source)]
        now = datetime.now(UTC)
        await self._publish([_message(w, now) for w in gone])
        for w in gone:
            self._metrics.announced.labels(state=w.state).inc()

    async def announce(self, ids: Collection[UUID]) -> int:
        """Announce what is ready among these documents. Raises Retryable."""
        with translated("announce"):
            async with self._pool.connection() as connection:
                ready = await ledger.ready_to_announce(connection, ids)
        return await self._send(ready)

    async def announce_missed(self, after: int) -> int:
        """Announce what a crash cut off, a page at a time; returns where to go on (0: from the beginning)."""
        with translated("announce"):
            async with self._pool.connection() as connection:
                ready, last = await ledger.missed_announcements(connection, after=after, limit=MISSED_PAGE)
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


def _message(change: Withdrawal | ledger.Announcement, at: datetime, *, chunks: int = 0) -> DocumentIndexed:
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
