"""Child processes that outlive us: started apart, recorded in a file, found again, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pipeline.core.errors import Misconfigured

CREATED_TOLERANCE_SECONDS = 2.0
"""psutil derives a start time from the boot time, which moves a little when the clock is set."""
LARGE_LOG_BYTES = 16 * 1024 * 1024

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Ours to reap. Kept, because a Popen that is dropped while its process runs warns."""
_children_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Record:
    """The content of the pid file: enough to distinguish the process from a later one with the same pid."""

    pid: int
    created: float
    address: str = ""


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None) -> Record:
    """Start a program in a session of its own, so that no Ctrl-C reaches it; its output is appended to the log."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env), cwd=cwd, start_new_session=True
        )
    with _children_lock:
        for ended in [pid for pid, other in _children.items() if other.poll() is not None]:
            del _children[ended]
        _children[child.pid] = child
    return record(child.pid)


def rotate(log: Path) -> int:
    """Begin a new log when the old one is large (it is kept as NAME.1). Returns the size of the log now."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return 0
    if size < LARGE_LOG_BYTES:
        return size
    log.replace(log.with_name(f"{log.name}.1"))
    return 0


def record(pid: int, address: str = "") -> Record:
    try:
        return Record(pid, psutil.Process(pid).create_time(), address)
    except psutil.NoSuchProcess:  # died at once; whoever waits for it finds out and reads its log
        return Record(pid, 0.0, address)


def save(path: Path, entry: Record) -> None:
    """Write a pid file whole, or not at all."""
    write_atomically(path, json.dumps(asdict(entry)) + "\n", mode=0o600)  # Postgres' address holds its password


def load(path: Path) -> Record | None:
    """The pid file's record, or None where there is none or it is not one of ours (whatever it says is not trusted)."""
    try:
        written = json.loads(path.read_text())
        return Record(int(written["pid"]), float(written["created"]), str(written.get("address", "")))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with open(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)


def running(entry: Record | None) -> psutil.Process | None:
    """The recorded process, if it is that one and still alive."""
    if entry is None:
        return None
    reap(entry.pid)
    try:
        process = psutil.Process(entry.pid)
        if abs(process.create_time() - entry.created) > CREATED_TOLERANCE_SECONDS:
            return None
        return process if _lives(process) else None
    except psutil.NoSuchProcess:
        return None


def exit_code(pid: int) -> int | None:
    """Exit code of a child that has ended (negative: the signal that killed it); None while it runs, or for others."""
    child = _children.get(pid)
    return child.poll() if child is not None else None


def reap(pid: int) -> None:
    """Take the exit status if the process was our child and has ended."""
    child = _children.get(pid)
    if child is not None:
        child.poll()


def find(is_mine: Callable[[Sequence[str]], bool]) -> list[psutil.Process]:
    """Live processes by their command line: those whose pid file was lost."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if is_mine(process.cmdline()) and _lives(process):
                matches.append(process)
    return matches


def stop(processes: Iterable[psutil.Process], *, ask: signal.Signals | None, grace_seconds: float) -> None:
    """Signal, wait, then SIGKILL with every descendant. ``ask=None`` kills at once.

    Raises Misconfigured if one cannot be stopped: it is another user's, or hangs in the kernel.
    """
    victims = list(processes)
    family = {process.pid: process for process in victims}
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= {child.pid: child for child in process.children(recursive=True)}
    if ask is not None:
        _signal(victims, ask)
        _wait_gone(family.values(), grace_seconds)
    _signal(family.values(), signal.SIGKILL)
    if left := _wait_gone(family.values(), 10.0):
        raise Misconfigured(f"process {left[0].pid} does not end though it was killed: is its disk or network stuck?")


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied as error:
            raise Misconfigured(
                f"process {process.pid} belongs to user {process.username()}: stop it as that user"
            ) from error


def _wait_gone(processes: Iterable[psutil.Process], timeout_seconds: float) -> list[psutil.Process]:
    """Returns those still there at the end."""
    deadline = time.monotonic() + timeout_seconds
    left = list(processes)
    while left and time.monotonic() < deadline:
        left = [process for process in left if _lives(process)]
        if left:
            time.sleep(0.05)
    return left


def _lives(process: psutil.Process) -> bool:
    """A zombie that has threads yet does: only its first has ended, as Java's does for a while."""
    try:
        lives = bool(process.is_running()) and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        lives = False
    reap(process.pid)  # also one that has ended this moment: its Popen would warn when we end
    return lives
