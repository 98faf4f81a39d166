"""Events → Kafka, and only then → checkpoint."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from datetime import datetime

from connectors.checkpoint import Checkpoint, Item
from pipeline.core.errors import Retryable
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.producer import Delivery, NotDelivered, Producer
from topics.registry import Topic

DELIVERY_SECONDS = 60.0
MAX_RECORDS = 1_000
MAX_BYTES = 32 * 1024 * 1024
"""What may be under way at once."""
CHECKPOINT_EVERY = 200

Event = DocumentUpserted | AccessChanged | DocumentDeleted


@dataclass(slots=True)
class _UnderWay:
    delivery: Delivery
    size: int
    observed_at: datetime
    item: Item | str
    """The row to write when it is acknowledged; a string: the external id whose row goes."""


class Publisher:
    """Of one scope of one source. Law: a row says "published" only after Kafka has acknowledged the event.

    Its methods may be called from several tasks. They raise Retryable when Kafka or Postgres is away.
    """

    def __init__(self, producer: Producer, checkpoint: Checkpoint, *, tenant: str, source: str, scope: str) -> None:
        self._producer = producer
        self._checkpoint = checkpoint
        self._tenant, self._source, self._scope = tenant, source, scope
        self._under_way: deque[_UnderWay] = deque()
        self._bytes = 0
        self._rows: dict[str, Item | str] = {}
        self._observed_at: datetime | None = None
        self._lock = asyncio.Lock()

    async def publish(self, topic: Topic, event: Event, item: Item | None) -> None:
        """Enqueue an event; ``item`` becomes the document's row once it is acknowledged (None: its row goes)."""
        size = len(event.content) if isinstance(event, DocumentUpserted) else 0
        async with self._lock:
            await self._make_room(size)
            try:
                delivery = await self._producer.send(topic, event)
            except NotDelivered as error:
                raise Retryable(str(error)) from error
            self._under_way.append(_UnderWay(delivery, size, event.observed_at, item or event.external_id))
            self._bytes += size

    async def note(self, item: Item) -> None:
        """Write a row for which nothing had to be published."""
        async with self._lock:
            self._rows[item.external_id] = item
            if len(self._rows) >= CHECKPOINT_EVERY:
                await self._write()

    async def settle(self) -> None:
        """Wait until everything is acknowledged and written."""
        async with self._lock:
            while self._under_way:
                await self._take_oldest()
            await self._write()

    async def abandon(self) -> None:
        """After an error: write what is acknowledged by now, leave the rest as it was."""
        async with self._lock:
            for one in self._under_way:
                if one.delivery.done() and one.delivery.exception() is None:
                    self._acknowledged(one)
            self._under_way.clear()
            await self._write()

    async def _make_room(self, size: int) -> None:
        while self._under_way and (
            self._under_way[0].delivery.done() or len(self._under_way) >= MAX_RECORDS or self._bytes + size > MAX_BYTES
        ):
            await self._take_oldest()
        if len(self._rows) >= CHECKPOINT_EVERY:
            await self._write()

    async def _take_oldest(self) -> None:
        oldest = self._under_way[0]
        try:
            async with asyncio.timeout(DELIVERY_SECONDS):
                await asyncio.shield(oldest.delivery)
        except TimeoutError as error:
            raise Retryable(
                f"Kafka has not acknowledged an event within {DELIVERY_SECONDS:.0f} s: it is published again next time"
            ) from error
        except NotDelivered as error:
            raise Retryable(str(error)) from error
        self._under_way.popleft()
        self._bytes -= oldest.size
        self._acknowledged(oldest)

    def _acknowledged(self, one: _UnderWay) -> None:
        self._rows[one.item if isinstance(one.item, str) else one.item.external_id] = one.item
        self._observed_at = max(self._observed_at or one.observed_at, one.observed_at)

    async def _write(self) -> None:
        rows, self._rows = self._rows, {}
        items = [row for row in rows.values() if isinstance(row, Item)]
        gone = [row for row in rows.values() if isinstance(row, str)]
        if items:
            await self._checkpoint.save(self._tenant, self._source, self._scope, items)
        if gone:
            await self._checkpoint.remove(self._tenant, self._source, gone)
        if self._observed_at is not None:
            await self._checkpoint.observed(self._tenant, self._source, self._observed_at)
