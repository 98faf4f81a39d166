"""detect: order events, compare hashes, chunk what changed, write the ledger, then hint.

One transaction a batch, rows locked in id order. Chunking happens before the lock is taken, for the texts that an
unlocked look says will change; a text that turns out to be needed after all is chunked under the lock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

import structlog

from pipeline.core.chunking import chunk
from pipeline.core.errors import Poison
from pipeline.core.fingerprint import content_hash, meta_hash
from pipeline.core.fold import Access, Delete, Event, State, Step, Upsert, fold
from pipeline.core.identity import chunk_ids, document_id, qualify
from pipeline.core.model import CountTokens, Generation, Lane, Manifest
from pipeline.core.normalise import normalise
from pipeline.ledger import documents, generations, superseded
from pipeline.ledger.documents import Accepted, Fields, Happened, Identity, Known
from pipeline.ledger.superseded import Superseded
from pipeline.stages.announce import Announcer, Withdrawal
from pipeline.stages.dead import DeadLetters
from pipeline.stages.hints import send_hints
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import GENERATIONS_LOCK, Pool, translated
from pipeline.telemetry import Metrics
from topics.codec import BadMessage, decode
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted
from topics.producer import Producer
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, Topic

log = structlog.get_logger()

MAX_AHEAD = timedelta(minutes=5)
"""An observed_at further ahead of our clock is refused: it would block every later revocation."""

DocumentEvent = DocumentUpserted | DocumentDeleted | AccessChanged


@dataclass(frozen=True, slots=True)
class Arrival:
    """One valid event, normalised: what the fold needs, and what is written if it wins."""

    identity: Identity
    event: Event
    kind: str
    lane: Lane
    text: str | None = None
    fields: Fields | None = None


def read_event(record: Incoming, *, now: datetime) -> Arrival:
    """Parse, check and normalise one record. Raises Poison; the text never quotes content."""
    try:
        message = decode(record.value, record.headers)
    except BadMessage as error:
        raise Poison(error.code, str(error)) from error
    if not isinstance(message, DocumentEvent):
        raise Poison("wrong_topic", f"{message.kind} does not belong on {record.topic}")
    check_record(record, message, now=now)
    identity = Identity(
        document_id(message.tenant, message.source, message.external_id),
        message.tenant, message.source, message.external_id,
    )  # fmt: skip
    match message:
        case DocumentDeleted():
            event: Event = Delete(message.version, message.observed_at)
            return Arrival(identity, event, message.kind, record.lane)
        case AccessChanged():
            tags = qualify(message.source, message.acl_tags), qualify(message.source, message.required_tags)
            return Arrival(identity, Access(message.observed_at, *tags), message.kind, record.lane)
        case DocumentUpserted():
            return _upsert(identity, message, record.lane)


def check_record(record: Incoming, message: AnyMessage, *, now: datetime) -> None:
    """The record's key and its observed_at keep the order of events. Raises Poison."""
    if record.key != message.key.encode():
        raise Poison("wrong_key", "the record's key is not the one of its message: order would be lost")
    if message.observed_at > now + MAX_AHEAD:
        raise Poison("from_the_future", f"observed_at {message.observed_at.isoformat()} is ahead of our clock")


def _upsert(identity: Identity, message: DocumentUpserted, lane: Lane) -> Arrival:
    text, media_type = normalise(message.content, message.media_type)
    fields = Fields(
        message.title.replace("\x00", ""), message.source_url, message.author, media_type,
        message.source_modified_at, dict(message.metadata),
    )  # fmt: skip
    event = Upsert(
        message.version,
        message.observed_at,
        content_hash(text),
        meta_hash(
            title=fields.title, source_url=fields.source_url, author=fields.author, media_type=media_type,
            source_modified_at=fields.source_modified_at, metadata=fields.metadata,
        ),
        qualify(message.source, message.acl_tags),
        qualify(message.source, message.required_tags),
    )  # fmt: skip
    return Arrival(identity, event, message.kind, lane, text, fields)


@dataclass(slots=True)
class Folded:
    """A document's events of one batch, applied in order to what is known of it."""

    identity: Identity
    before: Known
    state: State
    steps: list[tuple[Arrival, Step]] = field(default_factory=list)
    content: Arrival | None = None
    """The upsert whose content and metadata hold at the end; None when the ledger's own still hold."""
    superseded: list[Arrival] = field(default_factory=list)
    """Lost by version although observed later than what won: kept, because a delete between the two may still come."""
    keeps_old: bool = False
    """The ledger's own content is superseded in that way."""

    @property
    def changes(self) -> set[str]:
        return {change for _, step in self.steps for change in step.changes}

    @property
    def needs_chunking(self) -> bool:
        """Its text, or the way that text is cut, is not what the manifests were made from."""
        if self.content is None or not self.state.alive or self.content.fields is None:
            return False
        return (
            self.state.content_hash != self.before.state.content_hash
            or self.content.fields.media_type != self.before.media_type
        )


def fold_batch(
    arrivals: Sequence[Arrival],
    known: Mapping[UUID, Known],
    kept: Mapping[UUID, Sequence[Superseded]] | None = None,
) -> dict[UUID, Folded]:
    """Fold every event of the batch, in order; never keep only the newest. ``kept``: what earlier batches superseded
    of the documents that this one deletes.

    Law: the order of arrival does not matter. Content is the greatest (version, observed_at, hash) among the upserts
    observed after the newest delete, access that of the newest observation.
    """
    folded: dict[UUID, Folded] = {}
    for arrival in arrivals:
        id_ = arrival.identity.id
        if id_ not in folded:
            before = known.get(id_, Known(State()))
            earlier = [_revived(arrival.identity, s) for s in (kept or {}).get(id_, ())]
            folded[id_] = Folded(arrival.identity, before, before.state, superseded=earlier)
        document = folded[id_]
        _apply(document, arrival)
        if isinstance(arrival.event, Delete) and not document.state.alive:
            for superseded_by_version in tuple(document.superseded):
                _revive(document, superseded_by_version)
    return folded


def _apply(document: Folded, arrival: Arrival) -> None:
    before = document.state
    step = fold(before, arrival.event)
    if isinstance(arrival.event, Upsert):
        if _content_taken(before, step.state):
            if before.alive and before.observed_at is not None and arrival.event.observed_at < before.observed_at:
                if document.content is not None:
                    document.superseded.append(document.content)
                else:
                    document.keeps_old = True
            document.content = arrival
        elif _superseded(before, arrival.event):
            document.superseded.append(arrival)
    document.state = step.state
    document.steps.append((arrival, step))


def _superseded(state: State, event: Upsert) -> bool:
    """It lost by version alone: had a delete come in between, it would stand."""
    return state.alive and state.observed_at is not None and event.observed_at > state.observed_at


def _revive(document: Folded, arrival: Arrival) -> None:
    """Once more, now that a delete is known: its access was applied when it came."""
    event, floor = arrival.event, document.state.deleted_floor
    if isinstance(event, Upsert) and floor is not None and event.observed_at > floor:
        known = document.state
        again = replace(event, acl_tags=known.acl_tags, required_tags=known.required_tags)
        _apply(document, replace(arrival, event=again))


def _kept(document: Folded) -> list[Superseded]:
    return [
        Superseded(e.version, e.observed_at, e.content_hash, e.meta_hash, a.fields, a.text)
        for a in document.superseded
        if isinstance(e := a.event, Upsert) and a.fields is not None and a.text is not None
    ]


def _revived(identity: Identity, kept: Superseded) -> Arrival:
    event = Upsert(kept.version, kept.observed_at, kept.content_hash, kept.meta_hash, (), ())
    return Arrival(identity, event, DocumentUpserted.kind, "live", kept.text, kept.fields)


def withdrawal(before: State, after: State) -> Literal["retired", "revoked"] | None:
    """Whether somebody who could read the document may no longer."""
    if not before.wanted:
        return None
    if not after.wanted:
        return "retired"
    lost = set(before.acl_tags) - set(after.acl_tags) or set(after.required_tags) - set(before.required_tags)
    return "revoked" if lost else None


def _content_taken(before: State, after: State) -> bool:
    """The upsert's version stands now (also when its content is the same as before)."""
    return (before.version, before.observed_at, before.content_hash, before.meta_hash, before.deleted_at) != (
        after.version, after.observed_at, after.content_hash, after.meta_hash, after.deleted_at,
    )  # fmt: skip


def build_manifest(
    document: UUID, text: str, media_type: str, digest: bytes, generation: Generation, count_tokens: CountTokens
) -> Manifest:
    """Cut a text as a generation wants it."""
    chunks = chunk(text, media_type, params=generation.params, count_tokens=count_tokens)
    return Manifest(
        digest,
        chunk_ids(document, [c.text for c in chunks]),
        tuple(c.spans for c in chunks),
        tuple(c.token_count for c in chunks),
        tuple(c.headings for c in chunks),
    )


Counters = Callable[[Generation], CountTokens]


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
    ) -> None:
        self._pool = pool
        self._producer = producer
        self._dead = dead
        self._announcer = announcer
        self._counters = counters
        self._metrics = metrics
        self.batch_size = batch_size
        self._grace = grace_seconds

    async def handle(self, batch: Sequence[Incoming]) -> None:
        arrivals, poison = [], []
        now = datetime.now(UTC)
        for record in batch:
            try:
                arrivals.append(await asyncio.to_thread(read_event, record, now=now))
            except Poison as error:  # an invalid event never hides the valid one before it
                poison.append((record, error))
        if arrivals:
            await self._accept(arrivals)
        for record, why in poison:  # last: a batch that is tried again must not bury again, nor wait for a flood
            await self.set_aside(record, why)

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        await self._dead.bury(record, stage=self.name, error=error)

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
                folded = fold_batch(arrivals, known, await superseded.load(connection, deleted))
                manifests = await self._chunk(folded, writable, foreseen)
                accepted = [_accepted(f, manifests.get(f.identity.id, {})) for f in folded.values()]
                await superseded.keep_current(connection, [f.identity.id for f in folded.values() if f.keeps_old])
                await superseded.keep(connection, {i: _kept(f) for i, f in folded.items() if f.superseded})
                seqs = await documents.write(connection, accepted, writable, grace_seconds=self._grace)
                await superseded.prune(connection, list(folded))
        active = next((g.name for g in writable if g.state == "active"), "")
        await self._announcer.withdrawn(
            [
                Withdrawal(a.identity, seqs[a.identity.id], a.state.version, state, active)
                for a in accepted
                if a.identity.id in seqs and (state := withdrawal(a.before.state, a.state))
            ]
        )
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
        made: dict[UUID, dict[str, Manifest]] = defaultdict(dict)
        for id_, document in folded.items():
            if not document.needs_chunking:
                continue
            assert document.content is not None
            text, fields, digest = document.content.text, document.content.fields, document.state.content_hash
            assert text is not None
            assert fields is not None
            assert digest is not None
            for generation in writable:
                known = foreseen.get(id_, {}).get(generation.name)
                if known is None or known.content_hash != digest:
                    known = await asyncio.to_thread(
                        build_manifest, id_, text, fields.media_type, digest, generation, self._counters(generation)
                    )
                made[id_][generation.name] = known
        return made

    def _count(self, folded: Mapping[UUID, Folded]) -> None:
        for document in folded.values():
            for arrival, step in document.steps:
                self._metrics.events.labels(_outcome(step), arrival.lane).inc()
            if document.state.alive and not document.state.acl_tags:
                log.warning("nobody_may_read", document=str(document.identity.id), tenant=document.identity.tenant)


def _outcome(step: Step) -> str:
    """As history and metrics name it: accepting what nobody may read is an outcome of its own."""
    return "nobody" if step.changes and step.state.alive and not step.state.acl_tags else step.outcome


def _accepted(folded: Folded, manifests: Mapping[str, Manifest]) -> Accepted:
    state, before = folded.state, folded.before
    changes = folded.changes
    effective = [arrival for arrival, step in folded.steps if step.changes]
    content = folded.content if state.alive else None
    text_changed = content is not None and state.content_hash != before.state.content_hash
    meta_changed = content is not None and state.meta_hash != before.state.meta_hash
    history = tuple(
        Happened(
            arrival.kind,
            _outcome(step),
            getattr(arrival.event, "version", None),
            arrival.event.observed_at,
            None if step.changes else before.seq,
            arrival.lane,
        )
        for arrival, step in folded.steps
        if step.outcome != "duplicate"  # a retry is no event
    )
    return Accepted(
        folded.identity,
        before,
        state,
        lane="live" if any(a.lane == "live" for a in effective or [a for a, _ in folded.steps]) else "backfill",
        draws_seq=bool(changes),
        history=history,
        changed_at=_changed_at(effective[-1], before) if effective else None,
        fields=content.fields if content and (meta_changed or text_changed) else None,
        text=content.text if content and text_changed else None,
        manifests=manifests,
        erased=not state.alive and bool(changes),
    )


def _changed_at(arrival: Arrival, before: Known) -> datetime:
    """When the source changed, for freshness: what the source says, but not before we last looked (an old file copied
    in place is not years late) and not after we saw it."""
    seen = arrival.event.observed_at
    said = arrival.fields.source_modified_at if arrival.fields else None
    looked = before.state.observed_at
    return max(min(said, seen), looked) if said and looked else seen
