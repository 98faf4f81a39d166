"""Services on their way up: prepared, launched, waited for, all at the same time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal

from deploy.local import process
from deploy.local.service import LocalSettings, Place, Server, reason
from pipeline.core.errors import Misconfigured

Progress = Callable[[str, str], None]
"""Called with (service or worker, what happens), from any thread."""

Step = Literal["known", "ready"]
"""known: the address of a service is in endpoints.json; it need not run yet. ready: it answers."""
OnStep = Callable[[str, Step], None]


@dataclass
class Starter:
    """One service on its way up."""

    server: Server
    place: Place
    settings: LocalSettings
    ports: Mapping[str, int]
    progress: Progress
    on_step: OnStep

    def run(self, cancelled: threading.Event) -> None:
        began = time.monotonic()
        deadline = began + self.server.start_timeout_seconds
        self.progress(self.server.name, "starting")
        offset = process.rotate(self.place.log)
        port = self.ports[self.server.ports()[0]]
        try:
            self.server.prepare(self.place, self.ports, self.settings)
            self.on_step(self.server.name, "known")
            entry = self._launch(port, offset, deadline, cancelled)
            while not cancelled.is_set():
                if self.server.ready(entry.address, self.place):
                    self.server.complete(self.place, port)
                    break
                if process.running(entry) is None:
                    raise self._failure(_ended(entry.pid), offset)
                if time.monotonic() > deadline:
                    raise self._failure(f"does not answer after {self.server.start_timeout_seconds:.0f} s", offset)
                cancelled.wait(0.1)
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise Misconfigured(f"{self.server.name} cannot start: {error.strerror or error}{where}") from error
        if not cancelled.is_set():
            self.progress(self.server.name, f"ready in {time.monotonic() - began:.1f} s")
            self.on_step(self.server.name, "ready")

    def _launch(self, port: int, offset: int, deadline: float, cancelled: threading.Event) -> process.Record:
        command = self.server.launch(self.place, self.settings)
        address = self.server.url(self.place, port)
        entry = replace(
            process.spawn(command.argv, log=self.place.log, env=command.env, cwd=command.cwd), address=address
        )
        process.save(self.place.pid_file, entry)
        if not command.daemonizes:
            return entry
        while (code := process.exit_code(entry.pid)) is None and not cancelled.is_set():
            if time.monotonic() > deadline:
                raise self._failure(f"is not up after {self.server.start_timeout_seconds:.0f} s", offset)
            cancelled.wait(0.05)
        servers = process.find(lambda argv: self.server.is_mine(self.place, argv))
        if code or (not servers and not cancelled.is_set()):
            raise self._failure(_ended(entry.pid), offset)
        if servers:
            entry = process.record(servers[0].pid, address)
            process.save(self.place.pid_file, entry)
        return entry

    def _failure(self, what: str, offset: int) -> Misconfigured:
        return Misconfigured(f"{self.server.name} {what}: {reason(self.place.log, offset)} (log: {self.place.log})")


def _ended(pid: int) -> str:
    if process.exit_code(pid) == -signal.SIGKILL:
        return "was killed while starting (is there enough memory?)"
    return "stopped while starting"


def run_together(starters: Sequence[Starter]) -> None:
    """All at once; the first failure cancels the others and is raised."""
    cancelled = threading.Event()
    with ThreadPoolExecutor(len(starters) or 1) as pool:
        running = [pool.submit(starter.run, cancelled) for starter in starters]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            if any(not future.done() or future.exception() for future in running):
                cancelled.set()
        for future in running:
            future.result()
