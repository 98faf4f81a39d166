"""What one document's story is made of. ``story`` reads it, ``story_verdict`` says what follows, ``why`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pipeline.ledger.documents import Identity
from pipeline.ledger.story_origin import Source

StoreState = Literal["settled", "pending", "failed", "partial", "withdrawn"]
MOST_BEFORE = 100_000
"""Documents before one in a queue are counted no further."""


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
    before: int | None = None
    """While it is pending: documents of this store that wait for longer, at most MOST_BEFORE. None: not counted."""

    @property
    def reached(self) -> bool:
        return self.state in ("settled", "partial", "withdrawn")


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    name: str
    active: bool
    chunks: int
    """That the ledger wants."""
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
    """The letter whose replay failed again and is this one."""
    replayed_at: datetime | None = None
    dismissed_at: datetime | None = None
    """Somebody judged that it needs no replay …"""
    dismissed_by: str | None = None
    dismissed_reason: str | None = None
    """… and why."""

    @property
    def waits(self) -> bool:
        """For somebody to replay or dismiss it."""
        return self.replayed_at is None and self.dismissed_at is None


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


@dataclass(frozen=True, slots=True)
class Queue:
    """The partition that the document's key goes to, of one stage's topic: what the stage has yet to take of it."""

    stage: str
    topic: str
    partition: int
    behind: int
    """Records, those of other documents among them."""
    members: int
    """Workers that are in the stage's group."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a store was found to hold, when it was looked at now."""

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
    """Principals, and tags as they were given."""
    may_read: bool
    by: tuple[str, ...]
    """The access tags that let them in; none: nothing does."""
    lacks: tuple[str, ...]
    """Required tags that they do not hold."""
    memberships: tuple[tuple[str, str, datetime], ...] = ()
    """(source, principal, observed_at): since when the groups that were looked at are known. Empty: none are."""


@dataclass(frozen=True, slots=True)
class Found:
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
class Around:
    """What is known beside the ledger. Whatever was not asked, or did not answer, is absent and named in ``away``."""

    name: str | None = None
    """The document, as it was asked for."""
    source: Source | None = None
    others: tuple[Source, ...] = ()
    """Of a document that nobody knows: the tenant's connectors that do not follow their source."""
    queues: tuple[Queue, ...] = ()
    trouble: Mapping[str, str] = field(default_factory=dict)
    """By stage: the service that it stands still for, and why."""
    superseded: tuple[int, ...] = ()
    """Versions that lost although they were observed later: a delete observed in between would make them right."""
    held: tuple[Held, ...] | None = None
    """Differences between ledger and stores; None: the stores were not looked at."""
    person: Person | None = None
    found: Found | None = None
    away: tuple[str, ...] = ()

    def queue(self, stage: str) -> Queue | None:
        """Of the stage's topics, the one with most records to take."""
        return max((q for q in self.queues if q.stage == stage), key=lambda q: q.behind, default=None)
