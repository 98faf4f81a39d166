"""Publishes a folder's events: the intent in the checkpoint, the events in Kafka, and then their rows."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from datetime import datetime

from connectors.folder.checkpoint import Checkpoint, Intent, Item
from connectors.runner.compare import Event
from connectors.runner.publish import DELIVERY_SECONDS
from pipeline.core.errors import Retryable
from pipeline.kafka.producer import Delivery, NotDelivered, Producer
from topics.messages import AccessChanged, DocumentUpserted
from topics.registry import Topic

MAX_RECORDS = 1_000
MAX_BYTES = 32 * 1024 * 1024
"""At most so many events, and so many bytes of text, wait for their acknowledgement."""
CHECKPOINT_EVERY = 200
"""Documents that one statement marks as in doubt, and about as many that one statement confirms."""


@dataclass(slots=True)
class _Prepared:
    topic: Topic
    event: Event
    item: Item | None

    @property
    def size(self) -> int:
        return len(self.event.content) if isinstance(self.event, DocumentUpserted) else 0


@dataclass(slots=True)
class _UnderWay:
    delivery: Delivery
    prepared: _Prepared


class Publisher:
    """Publishes for one scope of one source.

    Law: before an event is sent, its document is in doubt; a row says "published" only after Kafka has acknowledged the
    event. Its methods may be called from several tasks. They raise Retryable when Kafka or Postgres is away.
    """

    def __init__(self, producer: Producer, checkpoint: Checkpoint, *, tenant: str, source: str, scope: str) -> None:
        self._producer = producer
        self._checkpoint = checkpoint
        self._tenant, self._source, self._scope = tenant, source, scope
        self._prepared: list[_Prepared] = []
        self._prepared_bytes = 0
        self._under_way: deque[_UnderWay] = deque()
        self._bytes = 0
        self._rows: dict[str, tuple[Item | None, datetime | None]] = {}
        """By external id: the row to write (None: it is removed) and the stamp of the event that it confirms."""
        self._lock = asyncio.Lock()

    async def publish(self, topic: Topic, event: Event, item: Item | None) -> None:
        """Publish an event; ``item`` becomes the document's row once it is acknowledged (None: its row is removed)."""
        async with self._lock:
            self._prepared.append(_Prepared(topic, event, item))
            self._prepared_bytes += self._prepared[-1].size
            if len(self._prepared) >= CHECKPOINT_EVERY or self._prepared_bytes > MAX_BYTES:
                await self._send_prepared()

    async def note(self, item: Item) -> None:
        """Write a row for which nothing had to be published."""
        async with self._lock:
            self._rows[item.row.external_id] = item, None
            if len(self._rows) >= CHECKPOINT_EVERY:
                await self._write()

    async def send(self) -> None:
        """Send what is prepared, without waiting for more."""
        async with self._lock:
            await self._send_prepared()

    async def settle(self) -> None:
        """Wait until everything is acknowledged and written."""
        async with self._lock:
            await self._send_prepared()
            while self._under_way:
                await self._take_oldest()
            await self._write()

    async def abandon(self) -> None:
        """After an error, write the rows of acknowledged events; other events that may have been sent stay in doubt."""
        async with self._lock:
            self._prepared.clear()
            for sent in self._under_way:
                if sent.delivery.done() and sent.delivery.exception() is None:
                    self._acknowledged(sent.prepared)
            self._under_way.clear()
            await self._write()

    async def _send_prepared(self) -> None:
        if not self._prepared:
            return
        prepared, self._prepared, self._prepared_bytes = self._prepared, [], 0
        withdrawn = await self._checkpoint.intend(
            self._tenant, self._source, self._scope, [_intent(p.event) for p in prepared]
        )
        for entry in prepared:
            # Withdrawn since its row was read. Where the operator's clock is behind, its content would be newer than
            # the delete.
            if isinstance(entry.event, DocumentUpserted) and entry.event.external_id in withdrawn:
                continue
            await self._make_room(entry.size)
            try:
                delivery = await self._producer.send(entry.topic, entry.event)
            except NotDelivered as error:
                raise Retryable(str(error)) from error
            self._under_way.append(_UnderWay(delivery, entry))
            self._bytes += entry.size

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
                f"Kafka has not acknowledged an event within {DELIVERY_SECONDS:.0f} s: the next scan publishes it"
            ) from error
        except NotDelivered as error:
            raise Retryable(str(error)) from error
        self._under_way.popleft()
        self._bytes -= oldest.prepared.size
        self._acknowledged(oldest.prepared)

    def _acknowledged(self, prepared: _Prepared) -> None:
        self._rows[prepared.event.external_id] = prepared.item, prepared.event.observed_at

    async def _write(self) -> None:
        rows, self._rows = self._rows, {}
        items = [(item, observed_at) for item, observed_at in rows.values() if item is not None]
        gone = [
            (external_id, observed_at)
            for external_id, (item, observed_at) in rows.items()
            if item is None and observed_at is not None
        ]
        if items:
            await self._checkpoint.save(self._tenant, self._source, self._scope, items)
        if gone:
            await self._checkpoint.remove(self._tenant, self._source, gone)


def _intent(event: Event) -> Intent:
    version = None if isinstance(event, AccessChanged) else event.version
    return Intent(event.external_id, version, event.observed_at)
