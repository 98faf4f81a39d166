"""Publishes entries of a source: intent in Postgres, events in Kafka, rows, and only then the cursor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime

from connectors.runner.compare import Decision, Event, Observation, decide, decide_access, is_storable_id
from connectors.runner.rows import Rows
from connectors.source import Cursor, Entry, Listed
from pipeline.core.errors import Retryable
from pipeline.core.model import Lane
from pipeline.kafka.producer import Delivery, NotDelivered, Producer
from pipeline.observability import tracing
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic


class Locks:
    """Law: whoever holds some ids is alone with them, and nobody waits for ids that he did not ask for."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def held(self, ids: Collection[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for one in sorted(set(ids)):  # in one order for everybody: nobody waits in a circle
                await stack.enter_async_context(self._one(one))
            yield

    @asynccontextmanager
    async def _one(self, one: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(one, (asyncio.Lock(), 0))
        self._locks[one] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[one]
            if users == 1:
                del self._locks[one]
            else:
                self._locks[one] = (lock, users - 1)


DELIVERY_SECONDS = 60.0
MAX_BYTES = 16 * 1024 * 1024
"""Of one page, under way at once."""
MARKED_AT_ONCE = 100
"""Documents that wait for each other's pages: a page may take as long as Kafka does."""


class Publisher:
    """Of one instance; for any number of tasks.

    Law: a document is in doubt in Postgres before an event of it is handed to Kafka, and no longer when Kafka has
    acknowledged it: rows and cursor are written after that. What two tasks learn of one document is published in the
    order in which the source was asked. Methods raise Retryable while Kafka or Postgres is away, and LeaseLost (before
    anything was sent, where another runner has taken over by then).
    """

    def __init__(self, producer: Producer, rows: Rows) -> None:
        self._producer = producer
        self.rows = rows
        self._locks = Locks()
        self._asking: dict[object, tuple[datetime, frozenset[str] | None]] = {}
        """Questions under way: when each was stamped, and what it names (None: any document)."""
        self.counts: Counter[str] = Counter()
        """Published since somebody last took them away, by outcome."""
        self.invalid: dict[str, str] = {}
        """Ids that no table takes, as they can be shown, and what is wrong."""

    @contextmanager
    def asking(self, at: datetime, ids: Collection[str] | None = None) -> Iterator[None]:
        """Around a question to the source that was stamped ``at``, until its answer is published. ids: of which alone
        it is answered."""
        question = object()
        self._asking[question] = at, None if ids is None else frozenset(ids)
        try:
            yield
        finally:
            del self._asking[question]

    def awaited(self, ids: Collection[str], at: datetime) -> set[str]:
        """Those of which a question that was asked before may still be answered: what is learned of them now has to be
        written even where it is nothing new, or the older answer would count for more."""
        named = [names for asked, names in self._asking.values() if asked < at]
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
        """Publish what differs, of what the source was asked for at ``at``; then keep the cursor. Returns what became
        of the entries, by outcome. lane: of upserts; whatever takes something away is live."""
        by_id = {entry.external_id: entry for entry in entries}  # of a doubled one the later counts
        async with self._locks.held(by_id):
            known = await self.rows.find([one for one in by_id if is_storable_id(one)]) if by_id else {}
            decisions = [decide(known.get(id_), entry, self._observation(at)) for id_, entry in by_id.items()]
            return await self._carry_out(decisions, at, lane, full=full, changes=changes)

    async def relisted(self, entries: Mapping[str, Listed], at: datetime) -> Counter[str]:
        """Publish the access that a listing showed for documents that are known."""
        async with self._locks.held(entries):
            known = await self.rows.find(entries)
            decisions = [decide_access(row, entries[id_], self._observation(at)) for id_, row in known.items()]
            return await self._carry_out(decisions, at, "live")

    async def mark_in_doubt(self, differences: Mapping[str, tuple[int, str]], stamp: Callable[[], datetime]) -> None:
        """Mark documents that differ from the ledger as in doubt (``Rows.mark_in_doubt``).

        This waits for pages that have read a row and not written it yet: they would remove the mark without having
        published anything.
        """
        names = sorted(differences)
        for start in range(0, len(names), MARKED_AT_ONCE):
            some = names[start : start + MARKED_AT_ONCE]
            async with self._locks.held(some):
                await self.rows.mark_in_doubt({name: differences[name] for name in some}, stamp())

    async def _carry_out(
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
            with tracing.begin("publish", parent="", gathers=True, attributes=self.about) as span:
                span.note({"penstock.events": len(events)})
                await self.rows.intend([decision.row for decision in publishing if decision.row is not None], at)
                await self._deliver(events, lane)
        rows = [one.row for one in decisions if one.row is not None and one.outcome != "late"]
        if rows or full is not None or changes is not None:
            await self.rows.save(rows, at, full=full, changes=changes)
        tally = Counter[str](one.outcome for one in decisions)
        self.counts.update(tally)
        return tally

    async def _deliver(self, events: Sequence[Event], lane: Lane) -> None:
        under_way: list[Delivery] = []
        size = 0
        try:
            async with asyncio.timeout(DELIVERY_SECONDS):
                for event in events:
                    under_way.append(await self._producer.send(_topic(event, lane), event))
                    size += len(event.content) if isinstance(event, DocumentUpserted) else 0
                    if size > MAX_BYTES:
                        await _acknowledged(under_way)
                        under_way, size = [], 0
                await _acknowledged(under_way)
        except TimeoutError as error:
            raise Retryable(f"Kafka did not confirm within {DELIVERY_SECONDS:.0f} s", service="kafka") from error
        except NotDelivered as error:
            raise Retryable(str(error), service="kafka") from error

    @property
    def about(self) -> tracing.Attributes:
        """For spans."""
        return {"penstock.tenant": self.rows.holder.tenant, "penstock.source": self.rows.holder.source}

    def _observation(self, at: datetime) -> Observation:
        return Observation(tenant=self.rows.holder.tenant, source=self.rows.holder.source, at=at)


def _topic(event: Event, lane: Lane) -> Topic:
    """A delete or a revocation never waits behind a crawl."""
    return DOCUMENTS_BACKFILL if lane == "backfill" and isinstance(event, DocumentUpserted) else DOCUMENTS_LIVE


async def _acknowledged(under_way: Sequence[Delivery]) -> None:
    for delivery in under_way:
        await asyncio.shield(delivery)
