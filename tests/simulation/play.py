"""Play one history from its seed, and shrink one that fails to the steps and faults that it needs."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pipeline.core.chunking as chunking
import pipeline.stages.vectors as vectors
from tests.simulation import changes
from tests.simulation.changes import Step
from tests.simulation.connectors import connected
from tests.simulation.faults import CONNECTED_RATES, RATES
from tests.simulation.kafka import looked_at
from tests.simulation.scheduler import VirtualLoop, controlled, use
from tests.simulation.world import World

MAX_SHRINK_PLAYS = 400
MAX_ROWS = 3
"""Rows of a chunk table that are written together: few, so that documents need several transactions."""


@dataclass(frozen=True)
class History:
    """A seed, and what is left out of its history."""

    seed: int
    steps: tuple[int, ...] | None = None
    """The steps that are played; None: all of them."""
    without: tuple[str, ...] = ()
    """Kinds of faults that do not happen."""

    def chosen(self) -> list[Step]:
        every = changes.drawn(Random(f"steps {self.seed}"), connected=changes.is_connected(self.seed))
        return every if self.steps is None else [every[n] for n in self.steps]

    @property
    def command(self) -> str:
        """Return the command that replays exactly this history."""
        parts = [f"SIMULATE_SEED={self.seed}"]
        if self.steps is not None:
            parts.append(f"SIMULATE_STEPS={','.join(map(str, self.steps))}")
        if self.without:
            parts.append(f"SIMULATE_WITHOUT='{','.join(self.without)}'")
        return f"make simulate SIMULATE_HISTORIES=1 {' '.join(parts)}"


@dataclass
class Played:
    """The outcome of one history."""

    history: History
    violation: str | None
    """The violated law and how it was violated; the first word is the kind."""
    tally: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    events: list[tuple[float, str]] = field(default_factory=list)
    """Steps and faults in the order of time."""

    @property
    def kind(self) -> str | None:
        return self.violation.split()[0] if self.violation else None

    def __str__(self) -> str:
        lines = [f"{at:9.3f} s  {what}" for at, what in self.events]
        return "\n".join([*lines, f"→ {self.violation}", self.history.command])


@contextmanager
def simulated() -> Iterator[None]:
    """Around any number of ``play``: the product's clocks and chunker are the simulation's."""
    chunker, rows = chunking.chunk, vectors.WRITE_CHUNKS
    chunking.chunk = changes.cut  # type: ignore[assignment]
    vectors.WRITE_CHUNKS = MAX_ROWS
    freezes = not gc.get_freeze_count()  # pytest has done it already
    if freezes:
        gc.collect()
        gc.freeze()  # the modules: looking through them again and again takes an eighth of the time
    try:
        with controlled(), connected(), looked_at():
            yield
    finally:
        if freezes:
            gc.unfreeze()
        chunking.chunk, vectors.WRITE_CHUNKS = chunker, rows


def play(history: History) -> Played:
    """Play one history. The caller has entered ``simulated``."""
    loop = VirtualLoop()
    use(loop, history.seed)
    world = World(loop, history.seed, history.without)
    steps = history.chosen()
    violation = None
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(world.play(steps))
    except Exception as error:  # noqa: BLE001  whatever it is, the history has failed
        violation = str(error) if isinstance(error, AssertionError) else f"BROKEN: {type(error).__name__}: {error}"
    finally:
        asyncio.set_event_loop(None)
        loop.end()
    events = sorted([(s.at, " ".join(map(str, (s.kind, *s.args)))) for s in steps] + world.faults.moments)
    return Played(history, violation, world.tally, world.faults.happened, events)


def shrink(played: Played) -> Played:
    """The same kind of violation with as few kinds of faults and steps as a greedy search finds."""
    best, plays = played, 0

    def fails(history: History) -> bool:
        nonlocal best, plays
        plays += 1
        again = play(history)
        if plays > MAX_SHRINK_PLAYS or again.kind != played.kind:
            return False
        best = again
        return True

    count = len(played.history.chosen())
    steps: Sequence[int] = played.history.steps or tuple(range(count))
    without: Collection[str] = played.history.without
    for kind in RATES | CONNECTED_RATES:
        if kind in played.faults and fails(History(played.history.seed, tuple(steps), (*without, kind))):
            without = (*without, kind)
    size = max(1, len(steps) // 2)
    while size:
        start = 0
        while start < len(steps):
            fewer = (*steps[:start], *steps[start + size :])
            if fails(History(played.history.seed, fewer, tuple(without))):
                steps = fewer
            else:
                start += size
        size //= 2
    return best
