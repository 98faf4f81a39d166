"""The connector protocol as a finite model: look, decide, intend, publish, record, with crashes and takeovers.

One document, whose source says one of three things and may change back; two runners, of which the one with the lease is
the newest. The ledger takes what was observed last. Each fix is a switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

GONE, SHARED, PRIVATE = "gone", "shared", "private"
IN_DOUBT = "in doubt"
"""A row that was written before publishing: whatever the source says next is published again."""

At = Literal["away", "idle", "looked", "intended", "published"]


class Runner(NamedTuple):
    """One runner; ``epoch`` is that of its lease."""

    at: At = "away"
    epoch: int = 0
    seen: str = GONE
    stamp: int = 0
    current: bool = False
    """Nothing changed at the source since it looked."""


class State(NamedTuple):
    """Source, Kafka and ledger (as one), the row of what was published, and the runners."""

    source: str = GONE
    row: str = GONE
    ledger: tuple[int, str] = (0, GONE)
    """(version, what is said) of what counts."""
    clock: int = 0
    epoch: int = 0
    runners: tuple[Runner, ...] = (Runner(), Runner())
    looked: bool = True
    """A look that began after the source's last change has come to its end."""
    changes: int = 0
    crashes: int = 0
    looks: int = 0


@dataclass(frozen=True)
class ConnectorModel:
    """The switches are the fixes; all are on in the product."""

    intends: bool = True
    """The row says that it is in doubt before anything is published."""
    stamps_before_reading: bool = True
    """Events are ordered by the time of their request to the source, not by the time when they were published."""
    fences: bool = True
    """Nobody writes rows under a lease that another runner has taken."""
    changes: int = 3
    crashes: int = 1
    looks: int = 4

    def initial(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.changes < self.changes:
            for said in (GONE, SHARED, PRIVATE):
                if said != state.source:
                    moved = tuple(r._replace(current=False) for r in state.runners)
                    yield (
                        f"the source says {said}",
                        state._replace(source=said, changes=state.changes + 1, looked=False, runners=moved),
                    )
        for n, runner in enumerate(state.runners):
            yield from self._runs(state, n, runner)

    def violation(self, state: State) -> str | None:
        at_rest = all(r.at in ("away", "idle") for r in state.runners)
        if not at_rest or not state.looked or state.row == IN_DOUBT or state.ledger[1] == state.source:
            return None
        return f"every look since says unchanged, but the source says {state.source} and the ledger {state.ledger[1]}"

    def _runs(self, state: State, n: int, r: Runner) -> Iterator[tuple[str, State]]:
        name = f"runner {n}"
        if r.at in ("looked", "intended", "published") and state.crashes < self.crashes:
            yield f"{name} crashes", _with(state, n, Runner())._replace(crashes=state.crashes + 1)
        match r.at:
            case "away":
                taken = state._replace(epoch=state.epoch + 1)
                if state.epoch < 3:
                    yield f"{name} takes the lease", _with(taken, n, Runner("idle", taken.epoch))
            case "idle" if r.epoch == state.epoch and state.looks < self.looks:
                looked = state._replace(clock=state.clock + 1, looks=state.looks + 1)
                seen = Runner("looked", r.epoch, state.source, looked.clock, current=True)
                yield f"{name} reads the source: {state.source}", _with(looked, n, seen)
            case "looked":
                yield from self._decides(state, n, r)
            case "intended":
                yield f"{name} publishes {r.seen}", self._published(state, n, r)
            case "published":
                yield f"{name} records {r.seen}", self._recorded(state, n, r, r.seen)

    def _decides(self, state: State, n: int, r: Runner) -> Iterator[tuple[str, State]]:
        if state.row == r.seen:
            yield f"runner {n} finds nothing changed", _ended(state, n, r)
        elif not self.intends:
            yield f"runner {n} publishes {r.seen}", self._published(state, n, r)
        elif self.fences and r.epoch != state.epoch:
            yield f"runner {n} has lost its lease", _with(state, n, Runner())
        else:
            yield f"runner {n} records its intent", _with(state, n, r._replace(at="intended"))._replace(row=IN_DOUBT)

    def _published(self, state: State, n: int, r: Runner) -> State:
        after = state if self.stamps_before_reading else state._replace(clock=state.clock + 1)
        stamp = r.stamp if self.stamps_before_reading else after.clock
        return _with(after, n, r._replace(at="published"))._replace(ledger=max(state.ledger, (stamp, r.seen)))

    def _recorded(self, state: State, n: int, r: Runner, said: str) -> State:
        if self.fences and r.epoch != state.epoch:
            return _with(state, n, Runner())
        return _ended(state._replace(row=said), n, r)


def _ended(state: State, n: int, r: Runner) -> State:
    return _with(state, n, Runner("idle", r.epoch))._replace(looked=state.looked or r.current)


def _with(state: State, n: int, runner: Runner) -> State:
    runners = list(state.runners)
    runners[n] = runner
    return state._replace(runners=tuple(runners))
