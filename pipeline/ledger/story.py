"""One document's story: what was heard of it, what was decided, how far each store is. For ``why``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from uuid import UUID

from pipeline.ledger.documents import EVENTS_KEPT, Identity
from pipeline.stores.postgres import Connection

StoreState = Literal["settled", "pending", "failed", "partial", "withdrawn"]
CANDIDATES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Document:
    identity: Identity
    seq: int
    announced_seq: int
    version: int | None
    """None: no content was ever seen, only a delete or a change of access."""
    observed_at: datetime | None
    content_hash: bytes | None
    title: str | None
    source_url: str | None
    author: str | None
    media_type: str | None
    source_modified_at: datetime | None
    received_at: datetime
    changed_at: datetime | None
    deleted_at: datetime | None
    lane: str

    @property
    def alive(self) -> bool:
        return self.version is not None and self.deleted_at is None


@dataclass(frozen=True, slots=True)
class Access:
    acl_tags: tuple[str, ...] = ()
    required_tags: tuple[str, ...] = ()
    observed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Event:
    at: datetime
    kind: str
    outcome: str
    version: int | None
    observed_at: datetime | None
    seq: int | None
    lane: str


@dataclass(frozen=True, slots=True)
class StoreProgress:
    """One store of one generation. All times None: no state was ever written for it."""

    state: StoreState
    seq: int = 0
    want_seq: int = 0
    at: datetime | None = None
    """When it last became equal to the ledger."""
    pending_since: datetime | None = None
    next_retry: datetime | None = None
    attempts: int = 0
    error: str | None = None
    refused: int = 0
    """Chunks that can never be embedded."""

    @property
    def reached(self) -> bool:
        return self.state in ("settled", "partial", "withdrawn")


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    name: str
    active: bool
    chunks: int
    vectors: StoreProgress
    keywords: StoreProgress


@dataclass(frozen=True, slots=True)
class DeadLetter:
    id: str
    stage: str
    code: str
    message: str
    at: datetime
    attempt: int = 1
    replay_of: str | None = None
    """The letter whose replay failed again and is this one."""
    replayed_at: datetime | None = None
    """None: it waits for somebody."""


@dataclass(frozen=True, slots=True)
class Story:
    document: Document | None
    """None: never heard of, but for its dead letters."""
    access: Access = field(default_factory=Access)
    events: tuple[Event, ...] = ()
    """The newest EVENTS_KEPT, oldest first."""
    generations: tuple[GenerationProgress, ...] = ()
    """The active one first."""
    dead: tuple[DeadLetter, ...] = ()

    @property
    def active(self) -> GenerationProgress | None:
        return next((g for g in self.generations if g.active), None)


async def find(connection: Connection, tenant: str, names: Sequence[str]) -> list[tuple[Identity, str | None]]:
    """The documents that one of these names means, with their titles; at most CANDIDATES_SHOWN.

    A name is an id or an external id (``source/external_id`` too). Where none is one: a URL, a title, or the end of an
    external id.
    """
    qualified = [tuple(name.split("/", 1)) for name in names if "/" in name]
    values = {
        "tenant": tenant, "names": list(names), "lower": [n.lower() for n in names], "limit": CANDIDATES_SHOWN,
        "ids": [id_ for id_ in map(_uuid, names) if id_ is not None],
        "sources": [source for source, _ in qualified], "rests": [rest for _, rest in qualified],
    }  # fmt: skip
    for condition in (_INDEXED, _SCANNED):
        cursor = await connection.execute(
            "SELECT id, tenant, source, external_id, title FROM documents"
            f" WHERE tenant = %(tenant)s AND ({condition}) ORDER BY source, external_id LIMIT %(limit)s".encode(),
            values,
        )
        if rows := await cursor.fetchall():
            return [(Identity(*identity), title) for *identity, title in rows]
    return []


_INDEXED = """
    id = ANY(%(ids)s::uuid[]) OR external_id = ANY(%(names)s) OR (external_id = ANY(%(rests)s)
        AND EXISTS (SELECT FROM unnest(%(sources)s::text[], %(rests)s::text[]) n (source, rest)
                    WHERE n.source = documents.source AND n.rest = external_id))
"""
_SCANNED = """
    source_url = ANY(%(names)s) OR lower(title) = ANY(%(lower)s)
        OR EXISTS (SELECT FROM unnest(%(names)s::text[]) n WHERE right(external_id, length(n)) = n)
"""
"""A second on two million documents: people ask this one at a time."""


def _uuid(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


async def tell(connection: Connection, document: UUID) -> Story:
    """Everything that is known of a document."""
    cursor = await connection.execute(
        "SELECT d.id, d.tenant, d.source, d.external_id, d.seq, d.announced_seq, d.version, d.observed_at,"
        " d.content_hash, d.title, d.source_url, d.author, d.media_type, d.source_modified_at, d.received_at,"
        " d.changed_at, d.deleted_at, d.lane, d.event_count, a.acl_tags, a.required_tags, d.access_observed_at"
        " FROM documents d LEFT JOIN access_sets a ON a.id = d.access_id WHERE d.id = %s",
        [document],
    )
    row = await cursor.fetchone()
    if row is None:
        return Story(None, dead=await _dead(connection, "document_id = %s", [document]))
    known = Document(Identity(*row[:4]), *row[4:18])
    event_count, acl, required, access_observed_at = row[18:]
    return Story(
        known,
        Access(tuple(acl or ()), tuple(required or ()), access_observed_at),
        await _events(connection, document, event_count),
        await _generations(connection, document, wanted=known.alive and bool(acl)),
        await _dead(connection, "document_id = %s", [document]),
    )


async def dead_letters(connection: Connection, tenant: str, names: Sequence[str]) -> Story:
    """What is known of a document that was never accepted."""
    where = (
        "tenant = %s AND (external_id = ANY(%s) OR document_id::text = ANY(%s)"
        " OR EXISTS (SELECT FROM unnest(%s::text[]) n WHERE right(external_id, length(n)) = n))"
    )
    return Story(None, dead=await _dead(connection, where, [tenant, list(names), list(names), list(names)]))


async def _events(connection: Connection, document: UUID, event_count: int) -> tuple[Event, ...]:
    cursor = await connection.execute(
        "SELECT at, kind, outcome, version, observed_at, seq, lane FROM document_events WHERE document_id = %s"
        " ORDER BY (slot - %s + %s) %% %s",  # a ring: the slot after the newest one's is the oldest
        [document, event_count % EVENTS_KEPT, EVENTS_KEPT, EVENTS_KEPT],
    )
    return tuple(Event(*row) for row in await cursor.fetchall())


async def _generations(connection: Connection, document: UUID, *, wanted: bool) -> tuple[GenerationProgress, ...]:
    cursor = await connection.execute(
        """
        SELECT g.name, g.state = 'active', coalesce(cardinality(m.chunk_ids), 0), s.store, s.seq, s.want_seq,
            s.settled_at, s.pending_since, s.next_at, s.attempts, s.error, cardinality(s.refused)
        FROM generations g
        LEFT JOIN manifests m ON (m.document_id, m.generation) = (%(id)s, g.name)
        LEFT JOIN index_state s ON (s.document_id, s.generation) = (%(id)s, g.name)
        WHERE g.state <> 'retired'
        ORDER BY (g.state = 'active') DESC, g.created_at DESC
        """,
        {"id": document},
    )
    found: dict[str, tuple[bool, int, dict[str, StoreProgress]]] = {}
    for name, active, chunks, store, *progress in await cursor.fetchall():
        _, _, stores = found.setdefault(name, (active, chunks, {}))
        if store is not None:
            stores[store] = _progress(wanted, *progress)
    missing = StoreProgress("pending" if wanted else "withdrawn")
    return tuple(
        GenerationProgress(
            name, active, chunks if wanted else 0, stores.get("vectors", missing), stores.get("keywords", missing)
        )
        for name, (active, chunks, stores) in found.items()
    )


def _progress(
    wanted: bool,
    seq: int,
    want_seq: int,
    settled_at: datetime | None,
    pending_since: datetime,
    next_at: datetime,
    attempts: int,
    error: str | None,
    refused: int,
) -> StoreProgress:
    if seq < want_seq:
        state: StoreState = "failed" if attempts else "pending"
        return StoreProgress(
            state, seq, want_seq, settled_at, pending_since, next_at if attempts else None, attempts, error
        )
    state = "withdrawn" if not wanted else "partial" if refused else "settled"
    return StoreProgress(state, seq, want_seq, settled_at, error=error, refused=refused)


async def _dead(connection: Connection, where: str, values: Sequence[object]) -> tuple[DeadLetter, ...]:
    cursor = await connection.execute(
        "SELECT id, stage, code, message, at, attempt, replay_of, replayed_at FROM dead_letters"
        f" WHERE {where} ORDER BY at".encode(),
        values,
    )
    return tuple(DeadLetter(*row) for row in await cursor.fetchall())


def verdict(story: Story) -> tuple[bool, str]:
    """Whether both stores return the document as it is now, and one sentence: why, or what would make it so."""
    document, active = story.document, story.active
    if document is None:
        return False, _never_accepted(story)
    if document.deleted_at is not None:
        return False, (f"it was deleted on {_moment(document.deleted_at)}: an event observed after that brings it back")
    if document.version is None:
        return False, "only a change of access has arrived so far: its content has yet to be published"
    if not story.access.acl_tags:
        return False, "nobody may read it: it has no access tags, so nothing of it is indexed until it gets one"
    if active is None:
        return False, "there is no active generation: run `penstock migrate`"
    waiting = [
        (name, progress)
        for name, progress in (("vectors", active.vectors), ("keywords", active.keywords))
        if not progress.reached
    ]
    if waiting:
        reason = " and ".join(_waiting(name, progress) for name, progress in waiting)
        if len(waiting) == 1 and active.chunks:
            reason += f"; it is found by {'keyword' if waiting[0][0] == 'vectors' else 'meaning'} only"
        return False, reason + _later_dead(story)
    if not active.chunks:
        return False, "its text is empty: there is nothing to find"
    if active.vectors.state == "partial":
        return True, (
            f"{active.vectors.refused} of its {active.chunks} chunks can never be embedded"
            f" and are found by keyword only{_later_dead(story)}"
        )
    return True, f"both stores hold its {active.chunks} chunks{_later_dead(story)}"


def _waiting(name: str, progress: StoreProgress) -> str:
    since = f" since {_moment(progress.pending_since)}" if progress.pending_since else ""
    if progress.state == "failed":
        retry = f", next try at {_moment(progress.next_retry)}" if progress.next_retry else ""
        return f"{name} failed {progress.attempts} times{since} ({progress.error}){retry}"
    why = f" ({progress.error})" if progress.error else ""
    return f"waiting for {name}{since}{why}: is the {name} worker running?"


def _never_accepted(story: Story) -> str:
    if not story.dead:
        return "no event about it has ever arrived"
    waiting = [d for d in story.dead if d.replayed_at is None]
    if not waiting:
        replayed = max(d.replayed_at for d in story.dead if d.replayed_at)
        return f"its dead letter was replayed at {_moment(replayed)} and has not arrived: is the detect worker running?"
    last = waiting[-1]
    return (
        f"its only events are dead letters, the last one at {_moment(last.at)} ({last.code}: {last.message}):"
        f" mend and publish it again, or `penstock dead replay {last.id}`"
    )


def _later_dead(story: Story) -> str:
    """A newer event that was refused means that what is found is not the newest version. One that was replayed since
    is no dead letter any more: had it failed again, it would be another letter."""
    last_event = max((e.at for e in story.events), default=None)
    later = [d for d in story.dead if d.replayed_at is None and (last_event is None or d.at > last_event)]
    return f"; a later event is a dead letter ({later[-1].code}), so this is not its newest version" if later else ""


def _moment(at: datetime | None) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S %Z").strip() if at else "?"
