"""Processes of Penstock that a test starts beside itself: each with a health port and a log of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from deploy.local.service import free_port
from tests.support.forking import PROJECT as PROJECT
from tests.support.forking import Forked, fork, may_fork
from tests.support.waiting import until

Process = subprocess.Popen[bytes] | Forked
PENSTOCK = (sys.executable, "-m", "cli.main")


class Processes:
    """The fields that all test environments with processes have."""

    home: Path
    processes: dict[str, Process]
    ports: dict[str, int]

    def launch(self, name: str, argv: Sequence[str], env: Mapping[str, str], *ports: str) -> None:
        """ports: the variables that tell it where to listen, all of them the same port."""
        self.ports[name] = free_port()  # below those that outgoing connections get, so nobody comes in between
        env = {**env, **dict.fromkeys(ports, str(self.ports[name]))}
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = _start(argv, env, stdout=log, stderr=log)

    def await_ready(self, name: str) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)[-4000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/readyz", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(f"{name} did not become ready:\n{self.log(name)[-4000:]}")

    def log(self, name: str) -> str:
        """Everything that a process and its predecessors of that name have written."""
        return (self.home / f"{name}.log").read_text()


def run_penstock(
    *arguments: str, env: Mapping[str, str], typed: str = "", within_seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own, in the project's folder and with exactly this environment. typed:
    its standard input. Raises TimeoutExpired."""
    argv = [*PENSTOCK, *arguments]
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        stdin.write(typed.encode())
        stdin.seek(0)
        process = _start(argv, env, stdin=stdin, stdout=out, stderr=errors)
        try:
            code = process.wait(within_seconds)
        finally:
            process.kill()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(argv, code, *texts)


@asynccontextmanager
async def serving(env: Mapping[str, str], log: IO[bytes] | None = None) -> AsyncIterator[tuple[str, Process]]:
    """`penstock serve` on a free port, as an operator starts it: its address and its process, which has ended at the
    end. log: what it writes to."""
    with tempfile.TemporaryFile() as printed, open(os.devnull, "wb") as nowhere:
        process = _start([*PENSTOCK, "serve", "--port", "0"], env, stdout=printed, stderr=log or nowhere)

        def addresses() -> list[str]:
            assert process.poll() is None, f"it ended with {process.returncode}"
            text = os.pread(printed.fileno(), 4096, 0).decode()
            return [word for word in text.split() if word.startswith("http")] if text.endswith("\n") else []

        try:
            await until(addresses)
            yield addresses()[-1], process
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)


def _start(
    argv: Sequence[str], env: Mapping[str, str], *, stdout: IO[bytes], stderr: IO[bytes], stdin: IO[bytes] | None = None
) -> Process:
    if may_fork(argv, env):
        return fork(argv[2], argv[3:], env, stdin=stdin, stdout=stdout, stderr=stderr)
    return subprocess.Popen(
        argv, env=env, cwd=PROJECT, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )
