"""The parts of one document's story. ``story`` reads it, ``story_verdict`` judges it, ``penstock why`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pipeline.core.identity import INGESTED
from pipeline.diagnosis.connector_status import State, connector_state, last_success_at, problem
from pipeline.ledger.documents import Identity

StoreState = Literal["settled", "pending", "failed", "partial", "withdrawn"]
MAX_COUNTED_BEFORE = 100_000
"""Documents that precede another in a queue are counted up to this number."""


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
    """How far one store of one generation is. All times are None where no state was ever written for it."""

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
    before: int | None = None
    """While it is pending: documents of this store that have been pending for longer, at most MAX_COUNTED_BEFORE. None:
    not counted."""

    @property
    def reached(self) -> bool:
        return self.state in ("settled", "partial", "withdrawn")


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    name: str
    active: bool
    chunks: int
    """Desired by the ledger."""
    vectors: StoreProgress
    keywords: StoreProgress
    state: str = "active"
    """building, active or previous."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    id: str
    stage: str
    code: str
    message: str
    at: datetime
    attempt: int = 1
    replay_of: str | None = None
    """The letter whose replay failed and produced this one."""
    replayed_at: datetime | None = None
    dismissed_at: datetime | None = None
    dismissed_by: str | None = None
    dismissed_reason: str | None = None

    @property
    def is_open(self) -> bool:
        """Nobody has replayed or dismissed it yet."""
        return self.replayed_at is None and self.dismissed_at is None


@dataclass(frozen=True, slots=True)
class Story:
    document: Document | None
    """None: no event about it was ever accepted; there may be dead letters."""
    access: Access = field(default_factory=Access)
    events: tuple[Event, ...] = ()
    """The newest EVENTS_PER_DOCUMENT, oldest first."""
    generations: tuple[GenerationProgress, ...] = ()
    """The active one first."""
    dead: tuple[DeadLetter, ...] = ()

    @property
    def active(self) -> GenerationProgress | None:
        return next((g for g in self.generations if g.active), None)


@dataclass(frozen=True, slots=True)
class Published:
    """The document's row in the connector's own table."""

    external_id: str
    version: int | None
    """The last one published; None: never."""
    gone: bool
    """Its delete was published."""
    problem_code: str | None
    problem_message: str | None
    """Why it cannot be published as it is now."""
    content_at: datetime | None
    """When its content was last requested from the source."""
    access_at: datetime | None
    seen_at: datetime
    """When a read, or a listing that showed a change, last wrote this; 1970: never. Sweeps that find it unchanged do
    not."""
    difference: str | None = None
    """The kind of the last difference between what was published and what the ledger had accepted; None: there never
    was any."""
    difference_at: datetime | None = None
    """When that difference was detected."""
    in_doubt_since: datetime | None = None
    """Set: it is published again when its source is read next."""
    unlisted_since: datetime | None = None
    """Start of the first of the newest sweeps that did not list it and were prevented from deleting it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The connector that a document comes from, as its runner describes it; or `penstock ingest`, which has no runner
    and records documents only."""

    tenant: str
    name: str
    kind: str
    paused: bool
    loaded: bool
    """Its first load is complete."""
    guard: Mapping[str, Any] | None
    """A sweep that would have deleted too much: missing, published, at."""
    activities: Mapping[str, Mapping[str, Any]]
    """By name: state, reason, since, succeeded_at (RFC 3339)."""
    silent_seconds: float | None
    """Since its runner's last sign of life; None: none runs it."""
    removed: bool = False
    """No file declares the connector any more."""
    cursor: object | None = None
    """How far changes were read; None: never started, or not visible to this role."""
    item: Published | None = None

    @property
    def by_hand(self) -> bool:
        """Somebody runs `penstock ingest` or `watch`: nothing follows it by itself."""
        return self.name == INGESTED

    @property
    def speaker(self) -> str:
        """The publisher of its documents, as the subject of a sentence."""
        return "`penstock ingest`" if self.by_hand else f"connector {self.name}"

    @property
    def state(self) -> State | Literal["by hand"]:
        """The state that `status` and the page show, too; "by hand": no connector follows this source."""
        if self.by_hand:
            return "by hand"
        state, _ = connector_state(
            paused=self.paused,
            removed=self.removed,
            loaded=self.loaded,
            guard=self.guard,
            activities=self.activities,
            silent_seconds=self.silent_seconds,
        )
        return state

    @property
    def problem(self) -> str | None:
        """The name of its worst activity, and the reason why that does not work."""
        worst = problem(self.activities)
        return worst[1] if worst is not None else None

    @property
    def last_success_at(self) -> str | None:
        """When the source last answered as it should, RFC 3339."""
        return last_success_at(self.activities)

    @property
    def held_back(self) -> bool:
        """A sweep no longer listed the document, and deleted nothing because it would have been too much at once."""
        return (
            self.guard is not None
            and self.item is not None
            and not self.item.gone
            and self.item.version is not None
            and self.item.unlisted_since is not None
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """The partition of a stage's topic that the document's key goes to, and the stage's lag there."""

    stage: str
    topic: str
    partition: int
    behind: int
    """Lag in records, including those of other documents."""
    members: int
    """Workers in the stage's consumer group."""


@dataclass(frozen=True, slots=True)
class StoreDifference:
    """A difference between the ledger and a store, as read from the store now."""

    generation: str
    store: str
    kind: str
    """A kind of difference of the audit."""
    meaning: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Person:
    """Whether somebody may read the document, and by what."""

    names: tuple[str, ...]
    """Principals, and tags as typed."""
    may_read: bool
    by: tuple[str, ...]
    """The access tags that allow reading; empty: there is none."""
    lacks: tuple[str, ...]
    """Required tags that they do not hold."""
    memberships: tuple[tuple[str, str, datetime], ...] = ()
    """(source, principal, observed_at) of the group memberships that were used; empty: none is known."""


@dataclass(frozen=True, slots=True)
class QueryRank:
    """Where a query finds the document, for somebody who may read it."""

    query: str
    rank: int | None
    """From 1, in the fused ranking; None: not among the first ``of``."""
    of: int
    ranks: Mapping[str, int | None]
    """By ranker: vector, keyword."""
    reason: str | None = None
    """Why not."""


@dataclass(frozen=True, slots=True)
class Context:
    """The part of a story that other sources than the ledger report. A part that was not requested is absent; one that
    did not answer is absent and named in ``away``."""

    name: str | None = None
    """The document, as requested."""
    source: Source | None = None
    inactive: tuple[Source, ...] = ()
    """For an unknown document: the tenant's connectors that do not follow their source at present."""
    queues: tuple[Queue, ...] = ()
    outages: Mapping[str, str] = field(default_factory=dict)
    """By stage, the service that it is stalled by, and the reason."""
    superseded: tuple[int, ...] = ()
    """Versions that lost although they were observed later than the winner."""
    differences: tuple[StoreDifference, ...] | None = None
    """Differences between ledger and stores; None: the stores were not read."""
    person: Person | None = None
    query_rank: QueryRank | None = None
    away: tuple[str, ...] = ()

    def queue(self, stage: str) -> Queue | None:
        """The partition with the greatest lag among the stage's topics."""
        return max((q for q in self.queues if q.stage == stage), key=lambda q: q.behind, default=None)
