"""Publishes entries of a source: intent to Postgres, events to Kafka, then the rows and the cursor to Postgres."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime

from connectors.runner.compare import Decision, Event, Observation, decide, decide_access, is_storable_id
from connectors.runner.rows import Rows, Withdrawn
from connectors.source import Cursor, Document, Entry, Listed
from pipeline.core.model import Lane
from pipeline.kafka.client import certain, deliver
from pipeline.kafka.producer import Producer
from pipeline.observability import tracing
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic


class DocumentLocks:
    """Law: one task at a time holds an id, and a task waits only for the ids that it requests."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, ids: Collection[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for external_id in sorted(set(ids)):  # always in this order: two tasks cannot deadlock
                await stack.enter_async_context(self._hold_one(external_id))
            yield

    @asynccontextmanager
    async def _hold_one(self, external_id: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(external_id, (asyncio.Lock(), 0))
        self._locks[external_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[external_id]
            if users == 1:
                del self._locks[external_id]
            else:
                self._locks[external_id] = (lock, users - 1)


DELIVERY_SECONDS = 60.0
"""How long Kafka may take to acknowledge the events of one page."""
MAX_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
"""Content of one page that is sent before Kafka has to acknowledge it."""
TURN_CHARACTERS = 1024 * 1024
"""Content that is compared before other tasks have a turn: fifty documents of 4 MiB take seconds."""
MAX_MARKED_DOCUMENTS = 100
"""Documents that are marked as in doubt at once: each waits for the pages of all of them, and a page takes as long as
Kafka does."""


class Publisher:
    """Publishes the documents of one instance; may be shared by any number of tasks.

    Law: a document is in doubt in Postgres before an event of it is handed to Kafka, until Kafka has acknowledged the
    event: rows and cursor are written after that. What two tasks read of one document is published in the order of
    their requests to the source. Methods raise Retryable while Kafka or Postgres cannot be reached, and LeaseLost when
    another runner has taken over (if it has done so by then, before anything is sent).
    """

    def __init__(self, producer: Producer, rows: Rows) -> None:
        self._producer = producer
        self.rows = rows
        self._locks = DocumentLocks()
        self._open_requests: dict[object, tuple[datetime, frozenset[str] | None]] = {}
        """The stamps of requests whose responses are not published yet, and their documents (None: any document)."""
        self.counts: Counter[str] = Counter()
        """Entries by outcome, since the caller last subtracted them."""

    @contextmanager
    def track_request(self, at: datetime, ids: Collection[str] | None = None) -> Iterator[None]:
        """Enclose a request to the source that was stamped ``at``, until its response is published.

        ids: the documents that the response can hold; None for any.
        """
        request = object()
        self._open_requests[request] = at, None if ids is None else frozenset(ids)
        try:
            yield
        finally:
            del self._open_requests[request]

    def requested_before(self, ids: Collection[str], at: datetime) -> set[str]:
        """Return the documents that the response to an earlier open request may still hold.

        A later observation of them has to be written even if it changes nothing: the older response would otherwise
        count as newer.
        """
        named = [names for stamp, names in self._open_requests.values() if stamp < at]
        return set(ids) if None in named else {id_ for id_ in ids for names in named if names and id_ in names}

    async def publish(
        self,
        entries: Sequence[Entry],
        at: datetime,
        lane: Lane,
        *,
        full: Cursor | None = None,
        changes: Cursor | None = None,
    ) -> Counter[str]:
        """Publish the entries that differ from their rows; then store the cursor. Returns the entries by outcome.

        at: the stamp of the request to the source. lane: of upserts; deletes and changes of access are always live.
        """
        by_id = {entry.external_id: entry for entry in entries}  # of two entries with one id the later counts
        at = _read_at(entries, at)
        async with self._locks.hold(by_id):
            while True:
                try:
                    return await self._publish_once(by_id, at, lane, full=full, changes=changes)
                except Withdrawn:  # the rows say so by now
                    await asyncio.sleep(0)

    async def _publish_once(
        self, by_id: Mapping[str, Entry], at: datetime, lane: Lane, *, full: Cursor | None, changes: Cursor | None
    ) -> Counter[str]:
        """Compare the entries with their rows as they are now, and publish. Raises Withdrawn if one was withdrawn
        meanwhile; nothing was sent then."""
        known = await self.rows.find([id_ for id_ in by_id if is_storable_id(id_)]) if by_id else {}
        decisions, characters = list[Decision](), 0
        for id_, entry in by_id.items():
            decisions.append(decide(known.get(id_), entry, self._observation(at)))
            characters += _length(entry)
            if characters > TURN_CHARACTERS:
                characters = 0
                await asyncio.sleep(0)
        return await self._publish_decisions(decisions, at, lane, full=full, changes=changes)

    async def publish_access(self, entries: Mapping[str, Listed], at: datetime) -> Counter[str]:
        """Publish the access that a listing showed for known documents."""
        at = _read_at(entries.values(), at)
        async with self._locks.hold(entries):
            known = await self.rows.find(entries)
            decisions = [decide_access(row, entries[id_], self._observation(at)) for id_, row in known.items()]
            return await self._publish_decisions(decisions, at, "live")

    async def mark_in_doubt(self, differences: Mapping[str, tuple[int, str]], stamp: Callable[[], datetime]) -> None:
        """Mark documents that differ from the ledger as in doubt (``Rows.mark_in_doubt``).

        This waits for pages that have read a row and not written it yet: they would remove the mark without having
        published anything.
        """
        names = sorted(differences)
        for start in range(0, len(names), MAX_MARKED_DOCUMENTS):
            page = names[start : start + MAX_MARKED_DOCUMENTS]
            async with self._locks.hold(page):
                await self.rows.mark_in_doubt({name: differences[name] for name in page}, stamp())

    async def _publish_decisions(
        self,
        decisions: Sequence[Decision],
        at: datetime,
        lane: Lane,
        *,
        full: Cursor | None = None,
        changes: Cursor | None = None,
    ) -> Counter[str]:
        publishing = [decision for decision in decisions if decision.events]
        if publishing:
            events = [event for decision in publishing for event in decision.events]
            with tracing.begin("publish", parent="", gathers=True, attributes=self.span_attributes) as span:
                span.note({"penstock.events": len(events)})
                intended = [decision.row for decision in publishing if decision.row is not None]
                await self.rows.intend(intended, at, events)
                await self._deliver(events, lane)
        rows = [decision.row for decision in decisions if decision.row is not None and decision.outcome != "late"]
        if rows or full is not None or changes is not None:
            await self.rows.save(rows, at, full=full, changes=changes)
        tally = Counter[str](decision.outcome for decision in decisions)
        self.counts.update(tally)
        return tally

    async def _deliver(self, events: Sequence[Event], lane: Lane) -> None:
        async with certain(DELIVERY_SECONDS):
            for batch in _batches(events):
                await deliver(self._producer.send(_topic(event, lane), event) for event in batch)

    @property
    def span_attributes(self) -> tracing.Attributes:
        return {"penstock.tenant": self.rows.holder.tenant, "penstock.source": self.rows.holder.source}

    def _observation(self, at: datetime) -> Observation:
        return Observation(tenant=self.rows.holder.tenant, source=self.rows.holder.source, at=at)


def _length(entry: Entry) -> int:
    return len(entry.content) if isinstance(entry, Document) else 0


def _read_at(entries: Iterable[Entry | Listed], at: datetime) -> datetime:
    """Return when the source began to read the entries, of a request that was stamped ``at``."""
    return min([at, *(entry.read_at for entry in entries if entry.read_at is not None)])


def _topic(event: Event, lane: Lane) -> Topic:
    """Return the topic of an event: a delete or a revocation never waits behind a crawl."""
    return DOCUMENTS_BACKFILL if lane == "backfill" and isinstance(event, DocumentUpserted) else DOCUMENTS_LIVE


def _batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Split events into batches, each of which ends with the event that exceeds MAX_UNACKNOWLEDGED_BYTES."""
    start = size = 0
    for end, event in enumerate(events, 1):
        size += len(event.content) if isinstance(event, DocumentUpserted) else 0
        if size > MAX_UNACKNOWLEDGED_BYTES or end == len(events):
            yield events[start:end]
            start, size = end, 0
