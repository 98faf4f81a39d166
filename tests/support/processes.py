"""Processes of Penstock that a test starts beside itself: each with a health port and a log of its own."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.service import free_port

PROJECT = Path(__file__).parents[2]


class Processes:
    """The fields that all test environments with processes have."""

    home: Path
    processes: dict[str, subprocess.Popen[bytes]]
    ports: dict[str, int]

    def launch(self, name: str, argv: Sequence[str], env: Mapping[str, str], *ports: str) -> None:
        """ports: the variables that tell it where to listen, all of them the same port."""
        self.ports[name] = free_port()  # below those that outgoing connections get, so nobody comes in between
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv,
                env={**env, **dict.fromkeys(ports, str(self.ports[name]))},
                cwd=PROJECT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_ready(self, name: str, within_seconds: float = 90) -> None:
        deadline = time.monotonic() + within_seconds
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
