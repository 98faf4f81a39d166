"""Measures the processor seconds of a step by process, and each process's memory over time.

Processor seconds are the kernel's own counts, of a process and of its children that have ended (Postgres answers each
connection in a process of its own). They depend less on what else runs on the machine than elapsed time does, but up to
three times as many have been measured at a high load, when caches and the processors' shared cores are another's: only
measurements in turns can be compared.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def seconds(processes: Mapping[str, int]) -> dict[str, float]:
    """Return by name the processor seconds so far of the process with that pid and of all its descendants, and under
    ``commands`` those of the commands that this process ran. A process that has ended is absent."""
    by_name = {}
    for name, pid in processes.items():
        try:
            by_name[name] = _tree(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return by_name | {"commands": ended.ru_utime + ended.ru_stime}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds between two readings, the largest first."""
    took = {name: round(value - before[name], 2) for name, value in after.items() if name in before}
    return dict(sorted(took.items(), key=lambda item: -item[1]))


def _tree(process: psutil.Process) -> float:
    total = _own_seconds(process)
    for child in process.children():
        try:
            total += _tree(child)
        except psutil.NoSuchProcess:  # ended since: its parent counts it now, or at the next reading
            continue
    return total


def _own_seconds(process: psutil.Process) -> float:
    """Return the seconds of the process itself and of its children that have ended."""
    return float(sum(process.cpu_times()[:4]))


def mebibytes(pid: int) -> int:
    """Return the resident memory of a process and its children; shared pages (Postgres's buffers) count once."""
    process = psutil.Process(pid)
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            memory = child.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += memory.rss - memory.shared
    return round(total / 2**20)


def proportional(pid: int) -> dict[str, int] | None:
    """Return in MiB the memory of a process and its children, each page divided by the processes that share it: all,
    and without mapped files. None: it has ended."""
    try:
        process = psutil.Process(pid)
        pids = [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return None
    totals = {"Pss": 0, "Pss_Anon": 0, "Pss_Shmem": 0}
    for member in pids:
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:  # ended since
            continue
        for name, _, value in (line.partition(":") for line in lines):
            if name in totals:
                totals[name] += int(value.split()[0])
    return {"all": totals["Pss"] >> 10, "without_files": (totals["Pss_Anon"] + totals["Pss_Shmem"]) >> 10}


@dataclass
class Memory:
    """Samples of each process's memory."""

    at: list[float] = field(default_factory=list)
    """Seconds since the start."""
    mib: dict[str, list[int | None]] = field(default_factory=dict)
    """By process; None: it had ended."""

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
    """Sample the memory of processes while the block runs."""
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
