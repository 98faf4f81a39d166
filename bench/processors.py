"""Where the seconds of a step go, by process; and the memory of each, over time.

Processor seconds are the kernel's own counts, of a process and of its children that have ended (Postgres answers each
connection in a process of its own), so what else runs on the machine does not change them much.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil


def seconds(processes: Mapping[str, int]) -> dict[str, float]:
    """name → processor seconds so far of the process with that pid and of all it ever started, and ``commands``: of
    what this process ran and waited for. A process that has gone is absent."""
    found = {}
    for name, pid in processes.items():
        try:
            found[name] = _tree(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found | {"commands": ended.ru_utime + ended.ru_stime}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Between two readings, the dearest first."""
    took = {name: round(value - before[name], 2) for name, value in after.items() if name in before}
    return dict(sorted(took.items(), key=lambda item: -item[1]))


def _tree(process: psutil.Process) -> float:
    total = _ended(process)
    for child in process.children():
        try:
            total += _tree(child)
        except psutil.NoSuchProcess:  # ended since: its parent counts it now, or at the next reading
            continue
    return total


def _ended(process: psutil.Process) -> float:
    """Of the process itself and of its children that ended."""
    return float(sum(process.cpu_times()[:4]))


def mebibytes(pid: int) -> int:
    """Resident, of a process and its children; pages that they share (Postgres's buffers) are counted once."""
    process = psutil.Process(pid)
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            memory = child.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += memory.rss - memory.shared
    return round(total / 2**20)


@dataclass
class Memory:
    """Samples of each process."""

    at: list[float] = field(default_factory=list)
    """Seconds since the first one."""
    mib: dict[str, list[int | None]] = field(default_factory=dict)
    """None: it had gone."""

    def sample(self, processes: Mapping[str, int], now: float) -> None:
        self.at.append(round(now, 1))
        for name, pid in processes.items():
            try:
                value = mebibytes(pid)
            except psutil.NoSuchProcess:
                value = None
            self.mib.setdefault(name, []).append(value)


@contextmanager
def watched(processes: Mapping[str, int], every_seconds: float = 1.0) -> Iterator[Memory]:
    """Samples as long as the block lasts."""
    memory, stop, began = Memory(), threading.Event(), time.monotonic()

    def watch() -> None:
        while not stop.wait(every_seconds):
            memory.sample(processes, time.monotonic() - began)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        stop.set()
        thread.join()
