"""``make simulate``: many histories on all processors, what happened in them, and a minimal replay of what fails.

Settings come from the environment: SIMULATE_HISTORIES (how many), SIMULATE_SECONDS (for so long instead),
SIMULATE_SEED (the first one), SIMULATE_STEPS and SIMULATE_WITHOUT (of a replay), SIMULATE_PROCESSES.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.play import History, Played, play, shrink, simulated

HISTORIES = 100_000
BATCH = 50
"""Histories that one process plays before it reports."""
MAX_SHOWN = 3
"""Failures that are shrunk and shown."""
LAWS = ("LOST", "UNDEAD", "LEAKED", "HIDDEN", "WRONG", "UNTOLD", "NEEDLESS", "STUCK", "BROKEN")


@dataclass
class Total:
    """The outcome of some histories."""

    histories: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    failed: list[History] = field(default_factory=list)

    def add(self, other: Total) -> None:
        self.histories += other.histories
        self.tally += other.tally
        self.faults += other.faults
        self.violations += other.violations
        self.failed += other.failed


def batch(begin: int, count: int) -> Total:
    """Play the histories of these seeds."""
    total = Total()
    with simulated():
        for seed in range(begin, begin + count):
            played = play(History(seed))
            total.histories += 1
            total.tally += played.tally
            total.faults += played.faults
            if played.kind is not None:
                total.violations[played.kind.rstrip(":")] += 1
                total.failed.append(played.history)
    return total


def shrunk(history: History) -> Played:
    """Play a history again and shrink it."""
    with simulated():
        return shrink(play(history))


def many(first: int, histories: int | None, seconds: float | None, processes: int) -> Iterator[Total]:
    """Play histories on several processes, a total for each batch as it ends."""
    until = time.monotonic() + (seconds if seconds is not None else float("inf"))
    last = first + histories if histories is not None else sys.maxsize
    seed = first
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        under_way: set[Future[Total]] = set()
        while True:
            while len(under_way) < 2 * processes and seed < last and time.monotonic() < until:
                count = min(BATCH, last - seed)
                under_way.add(pool.submit(batch, seed, count))
                seed += count
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def report(console: Console, total: Total, seconds: float) -> None:
    """The tables: what happened, and which laws were broken."""
    table = Table("happened", "times", title="what happened in the histories")
    for kind, times in sorted((total.tally + total.faults).items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{times:,}")
    console.print(table)
    laws = Table(*LAWS, title="laws broken")
    laws.add_row(*(str(total.violations[law]) for law in LAWS))
    console.print(laws)
    rate = total.histories / max(seconds, 1e-9)
    console.print(f"{total.histories:,} histories in {seconds:.0f} s: {rate:.0f} a second, {rate * 3600:,.0f} an hour")


def main() -> int:
    """Returns the exit code: 1 when a law was broken."""
    environment = os.environ
    console = Console()
    seed = int(environment.get("SIMULATE_SEED", "1"))
    chosen = environment.get("SIMULATE_STEPS")
    if chosen is not None or environment.get("SIMULATE_WITHOUT"):
        steps = None if chosen is None else tuple(int(n) for n in chosen.split(",") if n)
        without = tuple(kind for kind in environment.get("SIMULATE_WITHOUT", "").split(",") if kind)
        with simulated():
            played = play(History(seed, steps, without))
        console.print(str(played), markup=False, soft_wrap=True)
        return int(played.violation is not None)
    seconds = float(environment["SIMULATE_SECONDS"]) if "SIMULATE_SECONDS" in environment else None
    histories = None if seconds is not None else int(environment.get("SIMULATE_HISTORIES", HISTORIES))
    processes = int(environment.get("SIMULATE_PROCESSES", os.cpu_count() or 1))
    total, began = Total(), time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("histories", total=histories)
        for part in many(seed, histories, seconds, processes):
            total.add(part)
            progress.update(bar, completed=total.histories, description=f"histories, {len(total.failed)} failed")
    report(console, total, time.monotonic() - began)
    for history in total.failed[:MAX_SHOWN]:
        console.rule(f"seed {history.seed}")
        console.print(str(shrunk(history)), markup=False, soft_wrap=True)
    return int(bool(total.failed))


if __name__ == "__main__":
    sys.exit(main())
