"""The keywords protocol as a finite model: accept, load, claim, bulk, refresh, confirm, reopen, and what may go wrong.

One document with one chunk, two workers, bulks that land at any time, workers that die at any moment, an Elasticsearch
that forgets what it deleted, and the records of bulks whose outcome is unknown (docs/adr/0039-open-bulks.md). Each fix
is a switch; without it the explorer has to find a violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.core.diff import diff_keywords

CHUNK = "chunk"
CONTENTS = (1, 2)
"""Two hashes are enough for a document that changes and changes back."""

At = Literal["idle", "loaded", "claimed", "sent", "unknown", "answered"]


class Worker(NamedTuple):
    """One keywords worker and where it stands in its work on the document."""

    at: At = "idle"
    seq: int = 0
    content: int | None = None
    """The content of the desired entry; None if there must be none."""
    touches: bool = False
    """There is something to write or to delete."""
    stale: int = 0
    """The version that the index named when it refused ours as too old."""


class Bulk(NamedTuple):
    """A request on its way to Elasticsearch. ``sender`` None: nobody waits for the answer."""

    sender: int | None
    seq: int
    content: int | None


class OpenBulk(NamedTuple):
    """The record of a bulk that writes an entry."""

    seq: int
    content: int
    unanswered: int = 1
    """How often it was sent without a certain answer."""
    old: bool = False
    """A delete that was accepted after its claim has been forgotten since: the claim is older than gc_deletes."""


class State(NamedTuple):
    """Ledger, index, workers and network."""

    want: int = 0
    content: int | None = None
    """The state that the ledger desires: an entry of this content, or none."""
    seq: int = 0
    claimed: bool = False
    confirmed: int | None = None
    open_bulks: tuple[OpenBulk, ...] = ()
    entry: tuple[int, int | None] | None = None
    """(version, content) in the index; content None: a tombstone. None: never heard of, or forgotten."""
    workers: tuple[Worker, ...] = (Worker(), Worker())
    bulks: tuple[Bulk, ...] = ()
    kills: int = 0
    timeouts: int = 0
    forgotten: int = 0


@dataclass(frozen=True)
class KeywordsModel:
    """The switches are the fixes; all are on in the product."""

    claims: bool = True
    """Entries that may come into the index are recorded before they are sent."""
    checks_want: bool = True
    """Nothing is confirmed that something newer has overtaken."""
    records_bulks: bool = True
    """A bulk is recorded with its claim, and what it wrote and nobody wants is deleted for as long as it may land."""
    keeps_old_records: bool = True
    """The record of a bulk stays although it was answered, when its claim is older than deletes are remembered."""
    doubts_deletes: bool = True
    """An entry that is deleted because a late bulk may have written it no longer counts as confirmed. It is assumed
    that no worker is paused for a whole day between its bulk and its confirmation."""
    accepts: int = 2
    kills: int = 1
    timeouts: int = 1

    def initial(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.want < self.accepts:
            yield "the ledger accepts a delete", state._replace(want=state.want + 1, content=None)
            for content in CONTENTS:
                yield f"the ledger accepts content {content}", state._replace(want=state.want + 1, content=content)
        for n, worker in enumerate(state.workers):
            yield from self._works(state, n, worker)
        yield from _lands(state)
        if state.entry is not None and state.entry[1] is None and state.forgotten < 1:
            yield "Elasticsearch forgets the tombstone", _forgets(state, state.entry[0])
        for bulk in state.open_bulks:
            yield from self._checks(state, bulk)

    def violation(self, state: State) -> str | None:
        quiet = not state.bulks and all(w.at == "idle" for w in state.workers)
        if not quiet or state.seq < state.want or state.open_bulks:
            return None
        stands = state.entry[1] if state.entry else None
        if stands == state.content:
            return None
        return f"settled at seq {state.seq}, but the index holds {stands} and the ledger wants {state.content}"

    def _works(self, state: State, n: int, w: Worker) -> Iterator[tuple[str, State]]:
        name = f"worker {n}"
        if w.at != "idle" and state.kills < self.kills:
            orphans = tuple(b._replace(sender=None) if b.sender == n else b for b in state.bulks)
            yield f"{name} dies", _with(state, n, Worker())._replace(bulks=orphans, kills=state.kills + 1)
        match w.at:
            case "idle" if state.seq < state.want:
                yield f"{name} loads seq {state.want}", _with(state, n, Worker("loaded", state.want, state.content))
            case "loaded":
                yield f"{name} claims", self._claims(state, n, w)
            case "claimed":
                bulks = (*state.bulks, Bulk(n, w.seq, w.content))
                yield f"{name} sends its bulk", _with(state, n, w._replace(at="sent"))._replace(bulks=_sorted(bulks))
            case "sent" if state.timeouts < self.timeouts:
                orphans = tuple(b._replace(sender=None) if b.sender == n else b for b in state.bulks)
                after = _with(state, n, w._replace(at="unknown"))
                yield f"{name} has no answer in time", after._replace(bulks=orphans, timeouts=state.timeouts + 1)
            case "unknown":
                yield f"{name} begins again", _with(state, n, Worker())
            case "answered":
                yield f"{name} confirms", _with(self._confirms(state, w), n, Worker())

    def _claims(self, state: State, n: int, w: Worker) -> State:
        if w.seq != state.want:
            return _with(state, n, Worker())
        expected = {} if w.content is None else {CHUNK: w.content}
        confirmed = {} if state.confirmed is None else {CHUNK: state.confirmed}
        diff = diff_keywords(expected, confirmed, {CHUNK} if state.claimed else ())
        if not (diff.write or diff.delete):
            return _with(state, n, w._replace(at="answered"))
        after = _with(state, n, w._replace(at="claimed", touches=True))
        if self.records_bulks and w.content is not None:
            after = _opened(after, w.seq, w.content)
        return after._replace(claimed=True, confirmed=None) if self.claims else after

    def _confirms(self, state: State, w: Worker) -> State:
        if w.touches and w.content is not None:
            state = self._answered(state, w.seq, w.content)
        if w.seq != state.want and self.checks_want:
            return _reopened(state, w) if w.touches else state
        if w.stale:  # the index is ahead of the ledger: catch up and write again
            return state._replace(want=max(state.want, w.stale) + 1)
        return state._replace(seq=w.seq, claimed=w.content is not None, confirmed=w.content)

    def _checks(self, state: State, bulk: OpenBulk) -> Iterator[tuple[str, State]]:
        """Entries of a late bulk that are not desired are deleted, at a version at which they are not desired; that may
        take time. When the bulk can no longer arrive, it is forgotten after a last check."""
        name = f"the check of the bulk of content {bulk.content} at version {bulk.seq}"
        delete = Bulk(None, max(bulk.seq, state.want), None)
        reopened = state
        if state.content is None and state.confirmed is not None and self.doubts_deletes:
            reopened = state._replace(claimed=True, confirmed=None)
        if state.content is None and delete not in state.bulks:
            yield f"{name} deletes", reopened._replace(bulks=_sorted((*state.bulks, delete)))
        mine = (bulk.seq, bulk.content)
        under_way = any((b.seq, b.content) == mine for b in state.bulks) or any(
            w.at in ("claimed", "sent", "answered") and (w.seq, w.content) == mine for w in state.workers
        )
        if not under_way:
            after = reopened._replace(open_bulks=tuple(b for b in state.open_bulks if b != bulk))
            if state.content is None and not _is_stale(state, delete):
                after = after._replace(entry=(delete.seq, None))
            yield f"{name} is the last one", after

    def _answered(self, state: State, seq: int, content: int) -> State:
        bulks = []
        for bulk in state.open_bulks:
            if (bulk.seq, bulk.content) == (seq, content) and not (bulk.old and self.keeps_old_records):
                bulk = bulk._replace(unanswered=bulk.unanswered - 1)
            if bulk.unanswered:
                bulks.append(bulk)
        return state._replace(open_bulks=tuple(bulks))


def _opened(state: State, seq: int, content: int) -> State:
    known = [b for b in state.open_bulks if (b.seq, b.content) == (seq, content)]
    others = [b for b in state.open_bulks if (b.seq, b.content) != (seq, content)]
    bulk = OpenBulk(seq, content, known[0].unanswered + 1 if known else 1)  # the claim is a new one, and young
    return state._replace(open_bulks=tuple(sorted([*others, bulk])))


def _forgets(state: State, version: int) -> State:
    """A delete at this version was accepted after every claim below it, so those are older than it was remembered."""
    bulks = tuple(b._replace(old=b.old or b.seq < version) for b in state.open_bulks)
    return state._replace(entry=None, forgotten=state.forgotten + 1, open_bulks=bulks)


def _is_stale(state: State, bulk: Bulk) -> bool:
    return state.entry is not None and bulk.seq < state.entry[0]


def _reopened(state: State, w: Worker) -> State:
    return state._replace(claimed=True, confirmed=None, seq=min(state.seq, w.seq))


def _lands(state: State) -> Iterator[tuple[str, State]]:
    for bulk in dict.fromkeys(state.bulks):
        rest = list(state.bulks)
        rest.remove(bulk)
        after = state._replace(bulks=tuple(rest))
        stale = _is_stale(state, bulk)
        if not stale:
            after = after._replace(entry=(bulk.seq, bulk.content))
        if bulk.sender is not None:
            w = state.workers[bulk.sender]
            named = state.entry[0] if stale and state.entry else 0
            after = _with(after, bulk.sender, w._replace(at="answered", stale=named))
        whose = "a bulk of nobody" if bulk.sender is None else f"the bulk of worker {bulk.sender}"
        what = "delete" if bulk.content is None else f"content {bulk.content}"
        yield f"{whose} lands: {what} at version {bulk.seq}{', refused as stale' if stale else ''}", after


def _with(state: State, n: int, worker: Worker) -> State:
    workers = list(state.workers)
    workers[n] = worker
    return state._replace(workers=tuple(workers))


def _sorted(bulks: tuple[Bulk, ...]) -> tuple[Bulk, ...]:
    return tuple(sorted(bulks, key=lambda b: (-1 if b.sender is None else b.sender, b.seq, b.content or 0)))
