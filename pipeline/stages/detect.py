"""detect: order events, compare hashes, chunk what changed, write the ledger, then hint.

One transaction a batch, rows locked in id order. Chunking happens before the lock is taken, for the texts that an
unlocked look says will change; a text that turns out to be needed after all is chunked under the lock.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.fold import Access, Delete, Upsert
from pipeline.core.identity import source_of
from pipeline.core.model import ChunkParams, CountTokens, Generation, Lane, Manifest
from pipeline.core.throttle import LiveBudget
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.ledger import documents, generations, work
from pipeline.observability.metrics import Metrics
from pipeline.observability.traced_records import note
from pipeline.stages.admission import UNCHECKED, Unchecked
from pipeline.stages.announce import Announcer, Withdrawal
from pipeline.stages.dead import DeadLetters
from pipeline.stages.events import Arrival, read_event
from pipeline.stages.folding import Folded, decision, fold_batch, outcome, to_keep, withdrawal
from pipeline.stages.hints import send_hints
from pipeline.stages.manifests import Counters, build_manifest
from pipeline.stages.stage import Flooded, Incoming
from pipeline.stores.postgres import GENERATIONS_LOCK, Pool, translated
from topics.messages import AccessChanged
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

log = structlog.get_logger()

MAX_PENDING_BACKFILL, MAX_PENDING_BACKFILL_ALONE = 300, 1_000
"""Backfilled documents that may wait for a store: at a first load's pace, about two seconds' work, and seven where
nothing has come live for ALONE_SECONDS. Accepting more takes processor time from the stores and from live changes. With
fewer the stores, which finish some hundred at a time, idle in between (5,000 documents: 44 s with 300, 39 with
1,000), and look as if the load were over."""
ALONE_SECONDS = 15.0
STALLED_STORE_SECONDS = 5.0
"""A store whose oldest pending document has not moved for so long is away: the other store's backfill goes on."""
DEFERRED_LOG_SECONDS, DEFERRED_SOURCES_LOGGED = 60.0, 5
LOOK_SECONDS, LOOK_PAUSE = 0.3, 20
"""Between two looks; or so many times as long as the last one took: much may wait for a store that is away."""


class Detect:
    """The stage. See pipeline.stages.stage.Stage for its law."""

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
        """live_per_second: documents of one source; what a source sends live beyond that waits with the backfill. 0: no
        limit."""
        self._pool = pool
        self._producer = producer
        self._dead = dead
        self._announcer = announcer
        self._counters = counters
        self._metrics = metrics
        self.batch_size = batch_size
        self._grace = grace_seconds
        self._budget = LiveBudget(live_per_second)
        self._deferred: Counter[bytes] = Counter()
        """Documents moved to the backfill topic since the last log line, by source."""
        self._log_deferred_at = -math.inf
        self._admission = admission
        self._unsaid: dict[UUID, Withdrawal] = {}
        """Accepted, and not announced because Kafka was away: at the next try the event is a mere duplicate."""
        self._crowded = False
        self._look_at = 0.0
        self._live_at = -math.inf
        """When the last live batch came, on time.monotonic()."""
        self._first: dict[str, tuple[datetime, float]] = {}
        """store → since when the first document waits for it, and when that was another one, on time.monotonic()."""

    async def handle(self, batch: Sequence[Incoming]) -> None:
        if any(record.lane == "live" for record in batch):
            self._live_at = monotonic()
        read_at, now = datetime.now(UTC), monotonic()
        sorted_batch = await self._admission.sort(
            batch, lambda record: read_event(record, now=read_at), lambda arrival: arrival.identity, stage=self.name
        )
        arrivals, valid = sorted_batch.accepted, sorted_batch.valid
        excess = [
            n for n, record in enumerate(valid) if self._exceeds(arrivals[n], record, sorted_batch.producers[n], now)
        ]
        accepted = [arrival for n, arrival in enumerate(arrivals) if n not in excess]
        accepted += await self._withdrawn([arrivals[n] for n in excess], {arrival.identity.id for arrival in accepted})
        if accepted:
            await self._accept(accepted)
        self._dead.passed(valid, stage=self.name)
        await self._defer([valid[n] for n in excess])
        await self._bury(sorted_batch.poison)  # last: what is valid must not wait for a flood

    def _exceeds(self, arrival: Arrival, record: Incoming, producer: str | None, now: float) -> bool:
        """Whether the source, its tenant or its producer sends more live content than its budget. Deletes and access
        changes are always live."""
        if record.lane != "live" or not isinstance(arrival.event, Upsert):
            return False
        groups = [("tenant", arrival.identity.tenant)] + ([("producer", producer)] if producer is not None else [])
        place = (record.topic, record.partition, record.offset)
        return not self._budget.admit(source_of(record.key), now, groups=groups, record=place)

    async def _withdrawn(self, excess: Sequence[Arrival], accepted: Set[UUID]) -> list[Arrival]:
        """The access changes of upserts that will wait, where somebody loses access: that never waits. The order of
        arrival does not matter: the upsert may follow at any time. accepted: documents with other events in the
        batch, which may open what the upsert closes."""
        if not excess:
            return []
        with translated("ledger"):
            async with self._pool.connection() as connection:
                known = await documents.peek(connection, [arrival.identity.id for arrival in excess])
        narrower = []
        for arrival in excess:
            event, before = arrival.event, known.get(arrival.identity.id)
            assert isinstance(event, Upsert)
            narrows = before is not None and withdrawal(
                before.state, replace(before.state, acl_tags=event.acl_tags, required_tags=event.required_tags)
            )
            if narrows or arrival.identity.id in accepted:
                access = Access(event.observed_at, event.acl_tags, event.required_tags)
                narrower.append(Arrival(arrival.identity, access, AccessChanged.kind, "live"))
        return narrower

    async def _defer(self, records: Sequence[Incoming]) -> None:
        """Move live records to the backfill topic, as they are. Raises Retryable when Kafka does not take them."""
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
        await self._bury([(record, error)])

    async def _bury(self, poison: Sequence[tuple[Incoming, Exception]]) -> None:
        """Beyond the limit on dead letters, what came live goes to the backfill topic, where it may stand as long as it
        must: a flood of one tenant stops no other one's live changes."""
        try:
            await self._dead.bury_all(poison, stage=self.name)
        except Flooded as flood:
            if any(record.lane != "live" for record in flood.records):
                raise
            try:
                moved = await deliver(
                    self._producer.send_raw(DOCUMENTS_BACKFILL, record.key, record.value, record.headers)
                    for record in flood.records
                )
            except Retryable as error:
                raise flood from error  # these records wait, and nobody else does
            self._metrics.poison_moved.inc(moved)
            log.warning("poison_moved_to_backfill", count=moved)

    async def crowded(self) -> bool:
        if (began := monotonic()) < self._look_at:
            return self._crowded
        self._look_at = math.inf  # one look at a time; meanwhile what was seen last holds
        try:
            with translated("ledger"):
                async with self._pool.connection() as connection:
                    waiting = await work.pending_backfill(connection)
            following = [count for store, (count, first) in waiting.items() if self._follows(store, first)]
            alone = monotonic() - self._live_at > ALONE_SECONDS
            self._crowded = max(following, default=0) >= (MAX_PENDING_BACKFILL_ALONE if alone else MAX_PENDING_BACKFILL)
        except PenstockError as error:  # the next batch meets it, and waits for the ledger as it should
            self._crowded = False
            log.warning("backlog_not_measured", reason=str(error)[:200])
        finally:
            now = monotonic()
            self._look_at = now + max(LOOK_SECONDS, LOOK_PAUSE * (now - began))
        return self._crowded

    def _follows(self, store: str, first: datetime) -> bool:
        """Whether that store comes any further. first: since when the first document in its queue waits."""
        before, at = self._first.get(store, (None, 0.0))
        if first != before:
            at = monotonic()
            self._first[store] = first, at
        return monotonic() - at < STALLED_STORE_SECONDS

    async def _accept(self, arrivals: Sequence[Arrival]) -> None:
        identities = [a.identity for a in arrivals]
        with translated("ledger"):
            async with self._pool.connection() as connection:
                known = await documents.peek(connection, [i.id for i in identities])
                writable = await generations.writable(connection)
            foreseen = await self._chunk(fold_batch(arrivals, known), writable, {})
            async with self._pool.connection() as connection, connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", [GENERATIONS_LOCK])
                writable = await generations.writable(connection)
                known = await documents.lock(connection, identities)
                deleted = {a.identity.id for a in arrivals if isinstance(a.event, Delete)}
                upserted = {a.identity.id for a in arrivals if isinstance(a.event, Upsert)}
                superseded_before = await documents.load_superseded(connection, deleted)
                folded = fold_batch(
                    arrivals, known, superseded_before, await documents.load_current(connection, deleted & upserted)
                )
                manifests = await self._chunk(folded, writable, foreseen)
                accepted = [decision(f, manifests.get(f.identity.id, {})) for f in folded.values()]
                await documents.keep_current(connection, [f.identity.id for f in folded.values() if f.keeps_old])
                await documents.keep_superseded(connection, {i: to_keep(f) for i, f in folded.items() if f.superseded})
                seqs = await documents.write(connection, accepted, writable, grace_seconds=self._grace)
                forgotten = await documents.prune_superseded(connection, list(folded))
        if forgotten:
            self._metrics.forgotten_versions.inc(forgotten)
            log.warning("superseded_versions_forgotten", count=forgotten, documents=len(folded))
        active = next((g.name for g in writable if g.state == "active"), "")
        for a in accepted:
            if a.identity.id in seqs and (state := withdrawal(a.before.state, a.state)):
                self._unsaid[a.identity.id] = Withdrawal(
                    a.identity, seqs[a.identity.id], a.state.version, state, active
                )
        await self._announcer.withdrawn([self._unsaid[i] for i in folded if i in self._unsaid])
        for id_ in folded:
            self._unsaid.pop(id_, None)
        await send_hints(
            self._producer,
            [
                (a.identity, generation.name, a.lane)
                for a in accepted
                if a.draws_seq or a.before.pending
                for generation in writable
            ],
        )
        self._count(folded)

    async def _chunk(
        self,
        folded: Mapping[UUID, Folded],
        writable: Sequence[Generation],
        foreseen: Mapping[UUID, Mapping[str, Manifest]],
    ) -> dict[UUID, dict[str, Manifest]]:
        """Manifests for the documents whose text changed; those foreseen from the same text are taken over."""
        changed = [document for document in folded.values() if document.needs_chunking]
        if not changed:
            return {}
        counters = [(generation, self._counters(generation)) for generation in writable]
        return await asyncio.to_thread(_cut, changed, counters, foreseen)

    def _count(self, folded: Mapping[UUID, Folded]) -> None:
        for document in folded.values():
            for arrival, step in document.steps:
                self._metrics.events.labels(outcome=outcome(step), lane=arrival.lane).inc()
                if arrival.has_lost_its_address:
                    self._metrics.lost_addresses.labels(lane=arrival.lane).inc()
                note(document.identity.id, {"penstock.outcome": outcome(step)})
            if document.state.alive and not document.state.acl_tags:
                log.warning("readers_missing", document=str(document.identity.id), tenant=document.identity.tenant)


def _cut(
    changed: Sequence[Folded],
    counters: Sequence[tuple[Generation, CountTokens]],
    foreseen: Mapping[UUID, Mapping[str, Manifest]],
) -> dict[UUID, dict[str, Manifest]]:
    """Runs in a thread."""
    made: dict[UUID, dict[str, Manifest]] = defaultdict(dict)
    for document in changed:
        assert document.content is not None
        id_ = document.identity.id
        text, fields, digest = document.content.text, document.content.fields, document.state.content_hash
        assert text is not None
        assert fields is not None
        assert digest is not None
        alike: dict[tuple[str, ChunkParams], Manifest] = {}  # a rebuild's generation cuts as its origin does
        for generation, count_tokens in counters:
            way = generation.model, generation.params
            known = alike.get(way) or foreseen.get(id_, {}).get(generation.name)
            if known is None or known.content_hash != digest:
                known = build_manifest(id_, text, fields.media_type, digest, generation, count_tokens)
            made[id_][generation.name] = alike[way] = known
    return made
