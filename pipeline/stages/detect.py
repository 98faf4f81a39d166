"""The detect stage: order events, compare hashes, chunk changed texts, write the ledger, then send hints.

Each batch is one transaction, which locks its documents' rows in the order of their ids. Chunking is slow, so it is
done before: a read without locks predicts which texts will change. A changed text that it did not predict is chunked
under the locks.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic, thread_time_ns
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError, Poison, Retryable
from pipeline.core.fold import Access, Delete, Upsert
from pipeline.core.identity import source_of
from pipeline.core.model import ChunkParams, CountTokens, Generation, Lane, Manifest
from pipeline.core.throttle import LiveBudget
from pipeline.core.titles import has_titles
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.ledger import documents, generations, work
from pipeline.ledger.documents import Accepted
from pipeline.observability.metrics import Metrics
from pipeline.observability.traced_records import note
from pipeline.stages.admission import UNCHECKED, Unchecked
from pipeline.stages.announce import AccessLoss, Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.events import (
    Arrival,
    DocumentEvent,
    access_arrival,
    cost,
    identity_of,
    read_message,
    to_arrival,
)
from pipeline.stages.folding import Folded, access_loss, decide, fold_batch, outcome, superseded_upserts
from pipeline.stages.hints import send_hints
from pipeline.stages.manifests import Counters, LargeTexts, build_manifest
from pipeline.stages.stage import Flooded, Incoming
from pipeline.stores.postgres import Pool, translated
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

log = structlog.get_logger()

MAX_PENDING_BACKFILL_DOCUMENTS, MAX_PENDING_BACKFILL_DOCUMENTS_WITHOUT_LIVE = 300, 1_000
"""Most backfilled documents that may be pending in a store; the second number holds when no live record has come for
NO_LIVE_SECONDS. At the speed of a first load they are about two and seven seconds of work. With more, accepting
backfill takes processor time from the sinks and from live changes. With fewer, the sinks, which finish about a hundred
documents at a time, are idle in between (5,000 documents took 44 s with 300, and 39 s with 1,000)."""
NO_LIVE_SECONDS = 15.0
STALLED_STORE_SECONDS = 5.0
"""A store whose oldest pending document has stayed the same for this long is stalled, and its backlog does not count:
backfill goes on for the other store."""
MAX_PROMPT_COST = 250
"""Where converting the HTML of a batch costs more (in small documents; a quarter of a second), its other events are
accepted before: a revocation does not wait for somebody's large page."""
MAX_STORED_BYTES = 16 * 1024 * 1024
"""Text that the ledger has of the documents that a batch deletes, and that they may be brought back with. A document
has up to eight such texts of 4 MiB, and a batch of deletes is a kilobyte: where there is more, it is accepted in
parts."""
MAX_PROMPT_STORED_BYTES = 1024 * 1024
"""Where a batch loads more of such text, its other events are accepted before."""
EXCESS_NANOSECONDS = 50_000_000
"""A document that takes so much more of the processor than its size suggests is charged for it afterwards."""
DEFERRED_LOG_SECONDS, DEFERRED_SOURCES_LOGGED = 60.0, 5
BACKLOG_CHECK_SECONDS, BACKLOG_CHECK_PAUSE_FACTOR = 0.3, 20
"""Pause between two counts of the backlog: this many seconds, or this many times the duration of the last count if that
is longer, because counting is slow while much is pending in a stalled store."""


@dataclass(frozen=True, slots=True)
class _Chunked:
    """The manifests of one document, by generation, and what they were built from."""

    source: tuple[bytes, str, str]
    """Content hash, media type, title."""
    manifests: dict[str, Manifest] = field(default_factory=dict)


class Detect:
    """Writes what the sources' events ask for to the ledger, and hints the sinks.

    Law (that of ``Stage``): ``handle`` may be called again with the same records, at any time, in any process. A
    repeated event changes nothing in the ledger; it sends the hints again that may have been lost.
    """

    name = "detect"
    topics: dict[Lane, Topic] = {"live": DOCUMENTS_LIVE, "backfill": DOCUMENTS_BACKFILL}  # noqa: RUF012

    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        dead: DeadLetters,
        announcer: Announcer,
        counters: Counters,
        metrics: Metrics,
        *,
        batch_size: int,
        grace_seconds: float,
        live_per_second: float = 0,
        admission: Unchecked = UNCHECKED,
    ) -> None:
        """grace_seconds: how long the sweeper leaves new work to the hints. live_per_second: documents that one source
        may send live; the excess is moved to the backfill topic. 0: no limit."""
        self._pool = pool
        self._producer = producer
        self._dead = dead
        self._announcer = announcer
        self._counters = counters
        self._metrics = metrics
        self.batch_size = batch_size
        self._grace_seconds = grace_seconds
        self._budget = LiveBudget(live_per_second)
        self._large, self._stored = LargeTexts(), LargeTexts()
        """Places for texts that arrive, and for texts that the ledger has: nobody's deletes wait for conversions."""
        self._deferred: Counter[bytes] = Counter()
        """Documents moved to the backfill topic since the last log line, by source."""
        self._log_deferred_at = -math.inf
        self._admission = admission
        self._unannounced: dict[UUID, AccessLoss] = {}
        """Losses of access that are in the ledger and not announced yet. When announcing fails, the batch is tried
        again, and then its events are duplicates, from which they could not be derived any more."""
        self._is_backlogged = False
        self._check_backlog_at = 0.0
        self._live_at = -math.inf
        """When the last batch with a live record came, on time.monotonic()."""
        self._oldest_pending: dict[str, tuple[datetime, float]] = {}
        """By store: since when its oldest pending document has been pending, and when that last changed, on
        time.monotonic()."""

    async def handle(self, batch: Sequence[Incoming]) -> None:
        if any(record.lane == "live" for record in batch):
            self._live_at = monotonic()
        read_at, now = datetime.now(UTC), monotonic()
        sorted_batch = await self._admission.sort(
            batch, lambda record: read_message(record, now=read_at), lambda message: message, stage=self.name
        )
        accepted: list[tuple[DocumentEvent, Incoming]] = []
        excess: list[tuple[DocumentEvent, Incoming]] = []
        live: dict[UUID, tuple[DocumentUpserted, Incoming, str | None]] = {}
        spent: Counter[UUID] = Counter()
        for message, record, producer in zip(
            sorted_batch.accepted, sorted_batch.valid, sorted_batch.producers, strict=True
        ):
            exceeds = self._exceeds_live_budget(message, record, producer, now)
            (excess if exceeds else accepted).append((message, record))
            if not exceeds and record.lane == "live" and isinstance(message, DocumentUpserted):
                live[identity_of(message).id] = message, record, producer
        urgent = await self._urgent_access_changes(
            [message for message, _ in excess if isinstance(message, DocumentUpserted)],
            {identity_of(message).id for message, _ in accepted},
        )
        poison = sorted_batch.poison
        for part in _prompt_first(accepted):
            async with self._large.place([m.content for m, _ in part if isinstance(m, DocumentUpserted)]):
                arrivals, unusable = await asyncio.to_thread(_normalise, part, spent)
            if arrivals or urgent:
                await self._accept([*arrivals, *urgent], spent)
            poison, urgent = [*poison, *unusable], []
        for id_, (message, record, producer) in live.items():
            if (excess_cost := spent[id_] - 1_000_000 * cost(message)) > EXCESS_NANOSECONDS:
                groups = _groups(message, producer)
                self._budget.charge(source_of(record.key), monotonic(), cost=excess_cost / 1_000_000, groups=groups)
        refused = {_place(record) for record, _ in poison}
        self._dead.count_accepted(
            (record for record in sorted_batch.valid if _place(record) not in refused), stage=self.name
        )
        await self._defer([record for _, record in excess])
        await self._dead_letter(poison)  # last: valid records must not wait for a flood of poison to end

    def _exceeds_live_budget(self, message: DocumentEvent, record: Incoming, producer: str | None, now: float) -> bool:
        """Whether this record exceeds the live budget of its source, tenant or producer. now: on time.monotonic().
        Deletes and access changes never do."""
        if record.lane != "live" or not isinstance(message, DocumentUpserted):
            return False
        return not self._budget.admit(
            source_of(record.key),
            now,
            cost=cost(message),
            groups=_groups(message, producer),
            record=_place(record),
        )

    async def _urgent_access_changes(self, excess: Sequence[DocumentUpserted], accepted: Set[UUID]) -> list[Arrival]:
        """The access changes of deferred upserts by which somebody loses access, because losing access never waits.

        excess: the upserts that will be deferred. accepted: the documents with other events in this batch, which may
        grant what the upsert revokes; their access changes are always returned. The upsert may follow at any time,
        because the order of arrival does not matter.
        """
        if not excess:
            return []
        changes = [access_arrival(message, "live") for message in excess]
        with translated("ledger"):
            async with self._pool.connection() as connection:
                known = await documents.peek(connection, [change.identity.id for change in changes])
        urgent = []
        for change in changes:
            event, before = change.event, known.get(change.identity.id)
            assert isinstance(event, Access)
            loses_access = before is not None and access_loss(
                before.state, replace(before.state, acl_tags=event.acl_tags, required_tags=event.required_tags)
            )
            if loses_access or change.identity.id in accepted:
                urgent.append(change)
        return urgent

    async def _defer(self, records: Sequence[Incoming]) -> None:
        """Move live records to the backfill topic, unchanged. Raises Retryable when Kafka does not store them."""
        if not records:
            return
        await deliver(
            self._producer.send_raw(DOCUMENTS_BACKFILL, record.key, record.value, record.headers) for record in records
        )
        self._metrics.live_deferred.inc(len(records))
        self._deferred.update(source_of(record.key) for record in records)
        if (now := monotonic()) >= self._log_deferred_at:
            for source, count in self._deferred.most_common(DEFERRED_SOURCES_LOGGED):
                log.warning("live_documents_deferred", source=source.decode(errors="replace"), count=count)
            self._deferred.clear()
            self._log_deferred_at = now + DEFERRED_LOG_SECONDS

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        await self._dead_letter([(record, error)])

    async def _dead_letter(self, poison: Sequence[tuple[Incoming, Exception]]) -> None:
        """Send poison records to the dead-letter topic. Where their number exceeds the limit on dead letters, live ones
        are moved to the backfill topic and wait there, so that one tenant's flood does not block other tenants' live
        changes. Raises Flooded when backfill records exceed it, or Kafka does not store the moved ones."""
        try:
            await self._dead.add_all(poison, stage=self.name)
        except Flooded as flood:
            if any(record.lane != "live" for record in flood.records):
                raise
            try:
                moved = await deliver(
                    self._producer.send_raw(DOCUMENTS_BACKFILL, record.key, record.value, record.headers)
                    for record in flood.records
                )
            except Retryable as error:
                raise flood from error  # so that only these records are tried again
            self._metrics.poison_moved.inc(moved)
            log.warning("poison_moved_to_backfill", count=moved)

    async def put_off(self, record: Incoming, error: Retryable) -> bool:
        return False  # nobody sends the event again

    async def is_backlogged(self) -> bool:
        if (began := monotonic()) < self._check_backlog_at:
            return self._is_backlogged
        self._check_backlog_at = math.inf  # one count at a time; until it ends, the last result holds
        try:
            with translated("ledger"):
                async with self._pool.connection() as connection:
                    pending = await work.pending_backfill(connection)
            counts = [count for store, (count, oldest) in pending.items() if self._makes_progress(store, oldest)]
            without_live = monotonic() - self._live_at > NO_LIVE_SECONDS
            limit = MAX_PENDING_BACKFILL_DOCUMENTS_WITHOUT_LIVE if without_live else MAX_PENDING_BACKFILL_DOCUMENTS
            self._is_backlogged = max(counts, default=0) >= limit
        except PenstockError as error:  # the next batch will fail as well, and is tried again until the ledger answers
            self._is_backlogged = False
            log.warning("backlog_not_measured", reason=str(error)[:200])
        finally:
            now = monotonic()
            self._check_backlog_at = now + max(BACKLOG_CHECK_SECONDS, BACKLOG_CHECK_PAUSE_FACTOR * (now - began))
        return self._is_backlogged

    def _makes_progress(self, store: str, oldest: datetime) -> bool:
        """Whether this store is not stalled. oldest: since when its oldest pending document has been pending."""
        before, changed_at = self._oldest_pending.get(store, (None, 0.0))
        if oldest != before:
            changed_at = monotonic()
            self._oldest_pending[store] = oldest, changed_at
        return monotonic() - changed_at < STALLED_STORE_SECONDS

    async def _accept(self, arrivals: Sequence[Arrival], spent: Counter[UUID]) -> None:
        """Write what these events change to the ledger, announce losses of access, and send hints. Adds to ``spent``
        the nanoseconds of processor that each document took. Raises Retryable; the ledger may hold the changes by
        then."""
        stored = dict[UUID, int]()
        if deleted := {arrival.identity.id for arrival in arrivals if isinstance(arrival.event, Delete)}:
            upserted = {arrival.identity.id for arrival in arrivals if isinstance(arrival.event, Upsert)}
            with translated("ledger"):
                async with self._pool.connection() as connection:
                    stored = await documents.stored_bytes(connection, deleted, deleted & upserted)
        for part, size in parted(arrivals, stored):
            await self._accept_part(part, size, spent)

    async def _accept_part(self, arrivals: Sequence[Arrival], stored: int, spent: Counter[UUID]) -> None:
        """As ``_accept``, in one transaction. stored: the bytes of text that it loads of deleted documents."""
        identities = [arrival.identity for arrival in arrivals]
        with translated("ledger"):
            async with self._pool.connection() as connection:
                known = await documents.peek(connection, [identity.id for identity in identities])
                writable = await generations.writable(connection)
            async with self._large.place([arrival.text or "" for arrival in arrivals]):
                predicted = await self._chunk(fold_batch(arrivals, known), writable, {}, spent)
            async with (
                self._stored.place_for(stored),
                self._pool.connection() as connection,
                connection.transaction(),
            ):
                await generations.keep_unchanged(connection)
                writable = await generations.writable(connection)
                known = await documents.lock(connection, identities)
                deleted = {arrival.identity.id for arrival in arrivals if isinstance(arrival.event, Delete)}
                upserted = {arrival.identity.id for arrival in arrivals if isinstance(arrival.event, Upsert)}
                superseded_before = await documents.load_superseded(connection, deleted)
                folded = fold_batch(
                    arrivals, known, superseded_before, await documents.load_current(connection, deleted & upserted)
                )
                manifests = await self._chunk(folded, writable, predicted, spent)
                accepted = [
                    decide(document, manifests[id_].manifests if id_ in manifests else {})
                    for id_, document in folded.items()
                ]
                await documents.keep_current(
                    connection, [id_ for id_, document in folded.items() if document.stored_content_superseded]
                )
                await documents.keep_superseded(
                    connection,
                    {id_: superseded_upserts(document) for id_, document in folded.items() if document.superseded},
                )
                seqs = await documents.write(connection, accepted, writable, grace_seconds=self._grace_seconds)
                forgotten = await documents.prune_superseded(connection, list(folded))
        if forgotten:
            self._metrics.forgotten_versions.inc(forgotten)
            log.warning("superseded_versions_forgotten", count=forgotten, documents=len(folded))
        active = next((generation.name for generation in writable if generation.state == "active"), "")
        await self._announce_access_losses(accepted, seqs, active)
        await send_hints(
            self._producer,
            [
                (document.identity, generation.name, document.lane)
                for document in accepted
                if document.draws_seq or document.before.pending
                for generation in writable
            ],
        )
        self._count(folded)

    async def _announce_access_losses(
        self, accepted: Sequence[Accepted], seqs: Mapping[UUID, int], active: str
    ) -> None:
        """Announce the losses of access in this batch, and those of an earlier try that could not be announced. seqs:
        the new sequence numbers by document. active: the name of the active generation. Raises Retryable."""
        for document in accepted:
            id_ = document.identity.id
            if id_ in seqs and (state := access_loss(document.before.state, document.state)):
                self._unannounced[id_] = AccessLoss(document.identity, seqs[id_], document.state.version, state, active)
        ids = [document.identity.id for document in accepted]
        await self._announcer.announce_access_loss([self._unannounced[i] for i in ids if i in self._unannounced])
        for id_ in ids:
            self._unannounced.pop(id_, None)

    async def _chunk(
        self,
        folded: Mapping[UUID, Folded],
        writable: Sequence[Generation],
        predicted: Mapping[UUID, _Chunked],
        spent: Counter[UUID],
    ) -> dict[UUID, _Chunked]:
        """The manifests of the documents whose text, or the title with which it is embedded, changed. predicted:
        manifests that were built before the locks; each is used if it was built from the same."""
        titled = any(has_titles(generation.params) for generation in writable)
        changed = [document for document in folded.values() if document.needs_chunking(titled=titled)]
        if not changed:
            return {}
        counters = [(generation, self._counters(generation)) for generation in writable]
        return await asyncio.to_thread(_build_manifests, changed, counters, predicted, spent)

    def _count(self, folded: Mapping[UUID, Folded]) -> None:
        """Count and trace the outcomes of all events, and log the documents that nobody may read."""
        for document in folded.values():
            for arrival, step in document.steps:
                self._metrics.events.labels(outcome=outcome(step), lane=arrival.lane).inc()
                if arrival.has_lost_its_address:
                    self._metrics.lost_addresses.labels(lane=arrival.lane).inc()
                note(document.identity.id, {"penstock.outcome": outcome(step)})
            if document.state.alive and not document.state.acl_tags:
                log.warning("readers_missing", document=str(document.identity.id), tenant=document.identity.tenant)


def _place(record: Incoming) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _prompt_first(accepted: Sequence[tuple[DocumentEvent, Incoming]]) -> list[list[tuple[DocumentEvent, Incoming]]]:
    """The batch in one part, or, where large documents would delay the other events of the batch, in two."""
    if sum(cost(message) for message, _ in accepted) <= MAX_PROMPT_COST:
        return [list(accepted)]
    slow = [(message, record) for message, record in accepted if cost(message) > 1]
    return [[(message, record) for message, record in accepted if cost(message) == 1], slow]


def parted(arrivals: Sequence[Arrival], stored: Mapping[UUID, int]) -> list[tuple[list[Arrival], int]]:
    """The batch in parts of at most MAX_STORED_BYTES or one document, each with its bytes; where there are many, first
    the events that load none: a revocation does not wait for somebody's large texts. All events of a document are in
    one part, in their order. stored: the bytes by document."""
    if (total := sum(stored.values())) <= MAX_PROMPT_STORED_BYTES:
        return [(list(arrivals), total)]
    parts: list[tuple[list[Arrival], int]] = [([], 0)]
    part_of = dict[UUID, int]()
    for arrival in sorted(arrivals, key=lambda arrival: stored.get(arrival.identity.id, 0) > 0):
        id_ = arrival.identity.id
        if id_ not in part_of:
            size, (_, held) = stored.get(id_, 0), parts[-1]
            if (size and not held) or held + size > MAX_STORED_BYTES:
                parts.append(([], 0))
            part_of[id_] = len(parts) - 1
            parts[-1] = parts[-1][0], parts[-1][1] + size
        parts[part_of[id_]][0].append(arrival)
    return [part for part in parts if part[0]]


def _groups(message: DocumentUpserted, producer: str | None) -> list[tuple[str, str]]:
    """The groups of sources that share a budget, to which a message belongs."""
    return [("tenant", message.tenant)] + ([("producer", producer)] if producer is not None else [])


def _normalise(
    part: Sequence[tuple[DocumentEvent, Incoming]], spent: Counter[UUID]
) -> tuple[list[Arrival], list[tuple[Incoming, Poison]]]:
    """The arrivals of these records, and those that cannot be normalised. Runs in a thread."""
    arrivals, unusable = [], []
    for message, record in part:
        began = thread_time_ns()
        try:
            arrivals.append(to_arrival(message, record.lane))
        except Poison as error:
            unusable.append((record, error))
        spent[identity_of(message).id] += thread_time_ns() - began
    return arrivals, unusable


def _build_manifests(
    changed: Sequence[Folded],
    counters: Sequence[tuple[Generation, CountTokens]],
    predicted: Mapping[UUID, _Chunked],
    spent: Counter[UUID],
) -> dict[UUID, _Chunked]:
    """Build the manifests of these documents for each generation (and its token counter). Runs in a thread."""
    made: dict[UUID, _Chunked] = {}
    for document in changed:
        assert document.content is not None
        id_ = document.identity.id
        text, fields, digest = document.content.text, document.content.fields, document.state.content_hash
        assert text is not None
        assert fields is not None
        assert digest is not None
        source = digest, fields.media_type, fields.title
        before = predicted.get(id_)
        foreseen = before.manifests if before is not None and before.source == source else {}
        made[id_] = _Chunked(source)
        built: dict[tuple[str, ChunkParams], Manifest] = {}  # generations with equal chunking share one manifest
        began = thread_time_ns()
        for generation, count_tokens in counters:
            chunking = generation.model, generation.params
            known = built.get(chunking) or foreseen.get(generation.name)
            if known is None:
                known = build_manifest(id_, fields.title, text, fields.media_type, digest, generation, count_tokens)
            made[id_].manifests[generation.name] = built[chunking] = known
        spent[id_] += thread_time_ns() - began
    return made
