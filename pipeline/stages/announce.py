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
        await deliver(
            self._producer.send(
                DOCUMENTS_INDEXED,
                DocumentIndexed(
                    tenant=w.identity.tenant,
                    source=w.identity.source,
                    external_id=w.identity.external_id,
                    observed_at=now,
                    document_id=str(w.identity.id),
                    seq=w.seq,
                    version=w.version,
                    state=w.state,
                    generation=w.generation,
                ),
            )
            for w in gone
        )
        if gone:
            used("kafka")
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
        await deliver(
            self._producer.send(
                DOCUMENTS_INDEXED,
                DocumentIndexed(
                    tenant=a.identity.tenant,
                    source=a.identity.source,
                    external_id=a.identity.external_id,
                    observed_at=now,
                    document_id=str(a.identity.id),
                    seq=a.seq,
                    version=a.version,
                    state=a.state,
                    generation=a.generation,
                    chunks=a.chunks,
                ),
            )
            for a in announced
        )
        if announced:
            used("kafka")
        with translated("announce"):
            async with self._pool.connection() as connection:
                await ledger.mark_announced(connection, ready)
        for a in announced:
            self._metrics.announced.labels(state=a.state).inc()
            fresh = (now - (a.changed_at or a.accepted_at)).total_seconds()
            self._metrics.freshness.labels(source=a.identity.source, lane=a.lane).observe(max(0.0, fresh))
        return len(ready)
