"""The effect of one event on one document. Pure: detect applies it to what the ledger knows.

The content with the greatest (version, observed_at, content_hash, meta_hash) wins. Upserts that were not observed after
the newest delete (its observed_at is the floor) are ignored. The access set that was observed last wins; two that were
observed at the same time are merged into the narrower one: the tags that both allow, and all that either requires.
docs/wire.md describes this for producers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

MAX_AHEAD = timedelta(minutes=5)
"""An event whose observed_at is further ahead of our clock is poison: it would win over every later revocation."""

Change = Literal["content", "metadata", "access", "deleted"]
Outcome = Literal[
    "created", "updated", "metadata", "access", "unchanged", "stale", "duplicate", "deleted", "recreated", "stub"
]


@dataclass(frozen=True, slots=True)
class Upsert:
    """A revision of a document: hashes of its content and metadata, and its access set."""

    version: int
    observed_at: datetime
    content_hash: bytes
    meta_hash: bytes
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """The document is gone at its source."""

    version: int
    observed_at: datetime


@dataclass(frozen=True, slots=True)
class Access:
    """A document's access set alone."""

    observed_at: datetime
    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...]


Event = Upsert | Delete | Access


@dataclass(frozen=True, slots=True)
class State:
    """A document's state in the ledger. With the defaults: a document that the ledger does not know."""

    version: int | None = None
    observed_at: datetime | None = None
    content_hash: bytes | None = None
    meta_hash: bytes | None = None
    deleted_floor: datetime | None = None
    deleted_at: datetime | None = None
    access_observed_at: datetime | None = None
    acl_tags: tuple[str, ...] = ()
    required_tags: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """True if it has content and is not deleted."""
        return self.version is not None and self.deleted_at is None

    @property
    def searchable(self) -> bool:
        """Whether the stores should hold its chunks: it is alive, and somebody may read it."""
        return self.alive and bool(self.acl_tags)


@dataclass(frozen=True, slots=True)
class Step:
    """The effect of one event: the new state, what to call it, and what has changed."""

    state: State
    outcome: Outcome
    changes: frozenset[Change] = frozenset()
    """The changes that the stores must follow. Empty: no sequence number is drawn (version and observed_at may still
    advance)."""


def fold(state: State, event: Event) -> Step:
    """Apply one event. Applying it again changes nothing, and an older event never overwrites a newer one."""
    match event:
        case Delete():
            return _delete(state, event)
        case Access():
            return _access(state, event)
        case Upsert():
            return _upsert(state, event)


def _delete(state: State, event: Delete) -> Step:
    floor = event.observed_at if state.deleted_floor is None else max(state.deleted_floor, event.observed_at)
    if state.version is None:
        gone = replace(state, deleted_floor=floor, deleted_at=state.deleted_at or event.observed_at)
        return Step(gone, "stub" if state.deleted_floor is None else "duplicate")
    if state.deleted_at is not None:
        return Step(replace(state, deleted_floor=floor), "duplicate")
    if state.observed_at is not None and state.observed_at > event.observed_at:
        return Step(replace(state, deleted_floor=floor), "stale")  # the content was observed after the delete
    gone = replace(state, deleted_floor=floor, deleted_at=event.observed_at, content_hash=None, meta_hash=None)
    return Step(gone, "deleted", frozenset({"deleted"}))


def _access(state: State, event: Access) -> Step:
    after = _with_access(state, event)
    if after is state:
        return Step(state, "stale" if state.access_observed_at != event.observed_at else "duplicate")
    if state.version is None:
        return Step(after, "stub")
    if not state.alive or not _access_differs(state, after):
        return Step(after, "unchanged")
    return Step(after, "access", frozenset({"access"}))


def _upsert(state: State, event: Upsert) -> Step:
    after = _with_access(state, Access(event.observed_at, event.acl_tags, event.required_tags))
    access: frozenset[Change] = frozenset({"access"}) if _access_differs(state, after) else frozenset()
    newer = _is_newer(state, event)
    if newer is not True:
        if access and state.alive:
            return Step(after, "access", access)
        return Step(after, newer)
    written = replace(
        after,
        version=event.version,
        observed_at=event.observed_at,
        content_hash=event.content_hash,
        meta_hash=event.meta_hash,
        deleted_at=None,
    )
    if not state.alive:
        outcome: Outcome = "created" if state.version is None else "recreated"
        return Step(written, outcome, frozenset({"content", "metadata", "access"}))
    if state.content_hash != event.content_hash:
        meta: frozenset[Change] = frozenset({"metadata"}) if state.meta_hash != event.meta_hash else frozenset()
        return Step(written, "updated", access | meta | {"content"})
    if state.meta_hash != event.meta_hash:
        return Step(written, "metadata", access | {"metadata"})
    return Step(written, "access" if access else "unchanged", access)


def _is_newer(state: State, event: Upsert) -> Literal[True, "stale", "duplicate"]:
    if state.deleted_floor is not None and event.observed_at <= state.deleted_floor:
        return "stale"
    if not state.alive:
        return True  # without content or deleted: the first upsert that was observed after the floor wins
    mine = (state.version, state.observed_at, state.content_hash, state.meta_hash)
    theirs = (event.version, event.observed_at, event.content_hash, event.meta_hash)
    if mine == theirs:
        return "duplicate"
    return True if theirs > mine else "stale"


def _with_access(state: State, event: Access) -> State:
    """The state with the newer of two access sets, or the intersection of two of the same time. Returns the same object
    when the event changes nothing."""
    known = state.access_observed_at
    if known is not None and event.observed_at < known:
        return state
    if known == event.observed_at:
        acl = tuple(sorted(set(state.acl_tags) & set(event.acl_tags)))
        required = tuple(sorted(set(state.required_tags) | set(event.required_tags)))
        if (acl, required) == (state.acl_tags, state.required_tags):
            return state
        return replace(state, acl_tags=acl, required_tags=required)
    return replace(
        state, access_observed_at=event.observed_at, acl_tags=event.acl_tags, required_tags=event.required_tags
    )


def _access_differs(before: State, after: State) -> bool:
    return (before.acl_tags, before.required_tags) != (after.acl_tags, after.required_tags)
