"""Runs a peer's driver as a process, sends it commands (bench.peers.protocol) and measures its memory."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
SAMPLE_SECONDS = 0.2
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONHASHSEED")
"""Environment variables that a driver inherits: no proxy and no key, so that it reaches only what its task names."""


class DriverFailed(Exception):
    """The driver ended, or wrote something that is not an answer. The message is one line."""


class Process:
    """A driver, from its start to its end."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log, self.environment = log, dict(environment)
        with log.open("a") as file:
            self._process = subprocess.Popen(
                list(argv),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ} | dict(environment),
            )
        self._answers: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.memory = Memory([self._process.pid])
        self.hello: dict[str, Any] = {}

    def greet(self, timeout_seconds: float) -> None:
        self.hello = self._answer(timeout_seconds)
        self.memory.watch(self.hello.get("memory_of", []))
        self.memory.peak = 0  # servers are children of the command that starts them

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command}) + "\n")
        self._process.stdin.flush()

    def answered(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the answer to the last command, or None if there is none within the time."""
        try:
            return self._answer(timeout_seconds)
        except Empty:
            return None

    def _answer(self, timeout_seconds: float) -> dict[str, Any]:
        line = self._answers.get(timeout=timeout_seconds)
        if not line:
            raise DriverFailed(f"its driver ended with {self._process.wait()}: {_last_line(self._log)} ({self._log})")
        try:
            return dict(json.loads(line))
        except ValueError as error:
            raise DriverFailed(f"its driver said {line.strip()[:100]!r} ({self._log})") from error

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def __enter__(self) -> Self:
        self.memory.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.memory.stop()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()


class Memory(threading.Thread):
    """The highest sum of resident memory of some processes and their children, sampled."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids = list(pids)
        self._over = threading.Event()
        self.peak = 0

    def watch(self, pids: Sequence[int]) -> None:
        self._pids += pids

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, sum(map(_resident, self._pids)))

    def stop(self) -> None:
        self._over.set()

    @property
    def peak_mb(self) -> int:
        return round(self.peak / 1e6)


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            total += member.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # it ended between two samples
    return total


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"
