"""The keywords protocol as a finite model: accept, load, claim, bulk, refresh, confirm, reopen, and what may go wrong.

One document with one chunk, two workers, bulks that land at any time or never, workers that die at any moment and an
Elasticsearch that forgets what it deleted. Each fix is a switch; without it the explorer has to find a violation.
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
    """Of the entry that shall stand; None: none shall."""
    touches: bool = False
    """There is something to write or to delete."""
    stale: int = 0
    """The version that the index named when it refused ours as too old."""


class Bulk(NamedTuple):
    """A request on its way to Elasticsearch. ``sender`` None: nobody waits for the answer."""

    sender: int | None
    seq: int
    content: int | None


class State(NamedTuple):
    """Ledger, index, workers and network."""

    want: int = 0
    content: int | None = None
    """What the ledger wants: an entry of this content, or none."""
    seq: int = 0
    claimed: bool = False
    confirmed: int | None = None
    doubted: bool = False
    """A claim was met that its worker never confirmed: the document is looked at again after the latest bulk."""
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
    """What may stand in the index is written down before it is sent."""
    checks_want: bool = True
    """Nothing is confirmed that something newer has overtaken."""
    doubts: bool = True
    """A claim without confirmation is remembered until no bulk of it can land any more. Assumes that no living worker
    is paused between its claim and its bulk for that long and dies then."""
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
            yield "Elasticsearch forgets the tombstone", state._replace(entry=None, forgotten=state.forgotten + 1)
        if self.doubts and state.doubted and all(w.at in ("idle", "loaded") for w in state.workers):
            late = tuple(b for b in state.bulks if b.sender is not None)
            reopened = state._replace(bulks=late, doubted=False, claimed=True, confirmed=None, seq=state.want - 1)
            yield "no bulk can be late any more; the document is looked at again", reopened

    def violation(self, state: State) -> str | None:
        quiet = not state.bulks and all(w.at == "idle" for w in state.workers)
        if not quiet or state.seq < state.want or state.doubted:
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
                after = state if w.seq == state.want else _reopened(state, w)
                yield f"{name} begins again", _with(after, n, Worker())
            case "answered":
                yield f"{name} confirms", _with(self._confirms(state, w), n, Worker())

    def _claims(self, state: State, n: int, w: Worker) -> State:
        if w.seq != state.want:
            return _with(state, n, Worker())
        wanted = {} if w.content is None else {CHUNK: w.content}
        confirmed = {} if state.confirmed is None else {CHUNK: state.confirmed}
        diff = diff_keywords(wanted, confirmed, {CHUNK} if state.claimed else ())
        if not (diff.write or diff.delete):
            return _with(state, n, w._replace(at="answered"))
        doubted = state.doubted or (state.claimed and state.confirmed is None)
        after = _with(state, n, w._replace(at="claimed", touches=True))
        if not self.claims:
            return after
        return after._replace(claimed=True, confirmed=None, doubted=self.doubts and doubted)

    def _confirms(self, state: State, w: Worker) -> State:
        if w.seq != state.want and self.checks_want:
            return _reopened(state, w) if w.touches else state
        if w.stale:  # the index is ahead of the ledger: catch up and write again
            return state._replace(want=max(state.want, w.stale) + 1)
        return state._replace(seq=w.seq, claimed=w.content is not None, confirmed=w.content)


def _reopened(state: State, w: Worker) -> State:
    return state._replace(claimed=True, confirmed=None, seq=min(state.seq, w.seq))


def _lands(state: State) -> Iterator[tuple[str, State]]:
    for bulk in dict.fromkeys(state.bulks):
        rest = list(state.bulks)
        rest.remove(bulk)
        after = state._replace(bulks=tuple(rest))
        stale = state.entry is not None and bulk.seq < state.entry[0]
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
    return tuple(sorted(bulks, key=repr))
