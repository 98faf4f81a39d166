"""The local stack: real Postgres, Kafka and Elasticsearch, and the workers, as processes of this machine.

State lies in one folder (``$PENSTOCK_HOME``): ``data/``, ``logs/``, ``run/`` and ``endpoints.json``, which the settings
of every other part read. Each step may be repeated, and begins by looking at what really runs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import ValidationError

from deploy.local import dist, process, query, workers
from deploy.local.elasticsearch import Elasticsearch
from deploy.local.kafka import Kafka
from deploy.local.lock import exclusive
from deploy.local.ports import Ports
from deploy.local.postgres import Postgres
from deploy.local.query import QueryService
from deploy.local.service import LocalSettings, Place, Server, require_space
from deploy.local.starting import OnStep, Progress, Starter, Step, run_together
from deploy.local.workers import Worker
from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import ENDPOINTS_FILE

SERVERS: dict[str, Server] = {server.name: server for server in (Postgres(), Kafka(), Elasticsearch())}
NEEDED_MB = 600
"""A fresh stack's data (100 MB) and room for the write-ahead logs to grow before anything is deleted again."""
STOP_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    url: str
    """Its address; the last one it had when it does not run; "" before it ever did."""
    pid: int | None
    ready: bool


class Stack:
    """The stack of one state folder. Every method may be called from any process that may write the folder."""

    def __init__(self, home: Path, *, die_with_parent: bool = False, servers: Mapping[str, Server] = SERVERS) -> None:
        """die_with_parent: all stops by itself when the calling process is gone. servers: others of the same names."""
        self.home = home.absolute()
        self._servers = servers
        self._die_with_parent = die_with_parent

    def up(
        self,
        on_progress: Progress | None = None,
        *,
        services: Sequence[str] = tuple(SERVERS),
        on_step: OnStep = lambda name, step: None,
    ) -> list[str]:
        """Start what does not run, and wait until it answers. Returns the names of what this call started.

        on_step: called for every service, from any thread.
        Raises Misconfigured with one line if one fails; what this call started is then stopped again.
        """
        progress = on_progress or _silent
        down = [name for name in services if not self._service(name).ready]
        for name in services:
            if name not in down:
                progress(name, "already running")
                on_step(name, "known")
                on_step(name, "ready")
        if down:
            self._start_all(down, progress, on_step)
        return down

    def start(self, name: str, on_progress: Progress | None = None) -> None:
        """Start one service again on its data, and wait until it answers; nothing if it runs."""
        self.up(on_progress, services=(name,))

    def kill(self, name: str) -> None:
        """SIGKILL a service, a worker (``detect``, ``detect-1``) or ``query``: a fault. KeyError if it does not run."""
        if name in self._servers:
            victims = self._server_processes(name)
        else:
            victims = query.processes(self.home) if name == query.NAME else workers.processes(self.home, name)
        if not victims:
            raise KeyError(name)
        process.stop(victims, ask=None, grace_seconds=0)

    def stop(self, name: str) -> None:
        """Stop one service or worker, or ``query``, in good order, and wait for its end; nothing if it does not run."""
        if name == query.NAME:
            self.stop_query()
            return
        if name not in self._servers:
            workers.stop(self.home, name)
            return
        with self._locked(_silent):
            self._stop_server(name)

    def down(self, on_progress: Progress | None = None) -> list[str]:
        """Stop the query service, workers, then services: nothing runs on. Returns the names of what was running."""
        progress = on_progress or _silent
        if not self.home.is_dir():
            return []
        with self._locked(progress):
            with ThreadPoolExecutor(1) as pool:
                query_stopped = pool.submit(self.stop_query, progress)
                stopped = workers.stop_all(self.home, progress)
            stopped += [query.NAME] if query_stopped.result() else []
            running = [name for name in self._servers if self._server_processes(name)]
            with ThreadPoolExecutor(len(self._servers)) as pool:
                list(pool.map(lambda name: self._stop_server(name, progress), self._servers))
            (self.home / ENDPOINTS_FILE).unlink(missing_ok=True)
            self._stop_watchdog()
        return [*stopped, *running]

    @property
    def names(self) -> list[str]:
        """The names of the services."""
        return list(self._servers)

    def services(self) -> list[Service]:
        """All three, in a fixed order, whether they run or not."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            return list(pool.map(self._service, ("kafka", "postgres", "elasticsearch")))

    def endpoints(self) -> dict[str, dict[str, str]]:
        """The content of endpoints.json: the settings by which clients reach each service, by service."""
        try:
            return dict(json.loads((self.home / ENDPOINTS_FILE).read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def start_worker(
        self, name: str, *, instance: int = 0, env: Mapping[str, str] | None = None, wait: bool = True
    ) -> Worker:
        """Start ``penstock worker NAME``, with env added to ours; the same again is a no-op while it runs.

        wait: until it answers /readyz. Raises Misconfigured with one line if it ends before that.
        """
        if self._die_with_parent:
            self._start_watchdog()
        return workers.start(self.home, name, instance=instance, env=env or {}, wait=wait)

    def workers(self) -> list[Worker]:
        return workers.listed(self.home)

    def start_query(self, *, env: Mapping[str, str] | None = None) -> QueryService:
        """Start ``penstock serve``, with env added to ours, and wait until it answers /readyz; the same again is a
        no-op while it runs. Its address is in endpoints.json from then on. Raises Misconfigured with one line."""
        if self._die_with_parent:
            self._start_watchdog()
        with exclusive(self.home / "run" / "query.lock"):  # not the servers' lock: one of them may still be starting
            return query.start(self.home, Ports(self.home, local_settings()), env=env or {})

    def stop_query(self, on_progress: Progress | None = None) -> bool:
        """Stop the query service; False: it did not run."""
        return query.stop(self.home, on_progress or _silent)

    def query(self) -> QueryService:
        return query.look(self.home)

    def page(self) -> str | None:
        """The address of the query service's page with the token of development mode: for a terminal alone."""
        return query.page(self.home)

    def mark_prepared(self) -> None:
        """Remember that topics, tables and indexes were made for the services as they run now."""
        process.write_atomically(self._prepared_file, json.dumps(self._incarnations()) + "\n")

    def is_new(self) -> bool:
        """Whether there is no database yet."""
        return not self._place("postgres").data.exists()

    def is_prepared(self) -> bool:
        """Whether that was done since the services were last started."""
        try:
            return bool(json.loads(self._prepared_file.read_text()) == self._incarnations())
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    @property
    def _prepared_file(self) -> Path:
        return self.home / "run" / "prepared.json"

    def _incarnations(self) -> dict[str, list[float] | None]:
        entries = {name: process.load(self._place(name).pid_file) for name in self._servers}
        return {name: [entry.pid, entry.created] if entry else None for name, entry in entries.items()}

    # One service

    def _place(self, name: str) -> Place:
        return Place(self.home, name)

    def _service(self, name: str) -> Service:
        server, place = self._servers[name], self._place(name)
        recorded = process.load(place.pid_file)
        running = process.running(recorded)
        address = recorded.address if recorded else ""
        ready = running is not None and bool(address) and server.ready(address, place)
        return Service(name, address, running.pid if running else None, ready)

    def _server_processes(self, name: str) -> list[psutil.Process]:
        """The recorded process, and any other that is plainly this server (started by an ``up`` that was killed)."""
        place = self._place(name)
        recorded = process.running(process.load(place.pid_file))
        candidates = process.find(lambda argv: self._servers[name].is_mine(place, argv))
        by_pid = {candidate.pid: candidate for candidate in candidates}
        if recorded is not None:
            by_pid[recorded.pid] = recorded
        return list(by_pid.values())

    def _stop_server(self, name: str, progress: Progress | None = None) -> None:
        server, place = self._servers[name], self._place(name)
        victims = self._server_processes(name)
        if victims and progress:
            progress(name, "stopping")
        process.stop(victims, ask=server.stop_signal, grace_seconds=STOP_GRACE_SECONDS)
        if recorded := process.load(place.pid_file):
            process.save(place.pid_file, replace(recorded, pid=0, created=0.0))  # keeps the address, for status
        if victims and progress:
            progress(name, "stopped")

    def _becomes_ready(self, name: str, progress: Progress) -> bool:
        """Give a service that runs and does not answer some time (a busy machine, a start under way)."""
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        has_reported = False
        while (now := self._service(name)).pid is not None and not now.ready:
            if time.monotonic() > deadline:
                return False
            if not has_reported:
                progress(name, "running, waiting for its answer")
                has_reported = True
            time.sleep(0.2)
        return now.ready

    # Starting

    def _start_all(self, names: Sequence[str], progress: Progress, on_step: OnStep) -> None:
        dist.require()
        settings = local_settings()
        self._make_folders()
        with self._locked(progress):
            missing = [name for name in names if not self._service(name).ready]  # another `up` may have been faster
            if self._die_with_parent:
                self._start_watchdog()
            require_space(self.home, NEEDED_MB)
            missing = [name for name in missing if not self._becomes_ready(name, progress)]
            for name in names:
                if name not in missing:
                    on_step(name, "known")
                    on_step(name, "ready")
            for name in missing:
                self._stop_server(name)  # hangs, or was left by an `up` that was killed
            ports = Ports(self.home, settings).assign(port for name in missing for port in self._servers[name].ports())
            before, writing = self.endpoints(), threading.Lock()

            def take_step(name: str, step: Step) -> None:
                if step == "known":
                    server = self._servers[name]
                    with writing:
                        endpoint = server.endpoint(self._place(name), ports[server.ports()[0]])
                        self._write_endpoints({**self.endpoints(), name: endpoint})
                on_step(name, step)

            starters = [
                Starter(self._servers[name], self._place(name), settings, ports, progress, take_step)
                for name in missing
            ]
            try:
                run_together(starters)
            except BaseException:
                with ThreadPoolExecutor(len(missing) or 1) as pool:
                    list(pool.map(self._stop_server, missing))
                self._write_endpoints(before)
                raise

    def _make_folders(self) -> None:
        try:
            for folder in ("data", "logs", "run"):
                (self.home / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Misconfigured(
                f"cannot write the state folder {self.home}: {error.strerror} (set PENSTOCK_HOME)"
            ) from error

    def _write_endpoints(self, written: Mapping[str, Mapping[str, str]]) -> None:
        file = self.home / ENDPOINTS_FILE
        if written:
            process.write_atomically(file, json.dumps(written, indent=1) + "\n", mode=0o600)
        else:
            file.unlink(missing_ok=True)

    def _locked(self, progress: Progress) -> AbstractContextManager[None]:
        return exclusive(self.home / "run" / "lock", waiting=lambda: progress("stack", "waiting for another command"))

    # The watchdog of a stack that shall not outlive its parent

    def _start_watchdog(self) -> None:
        pid_file = self.home / "run" / "watchdog.json"
        if process.running(process.load(pid_file)) is not None:
            return
        self._make_folders()
        me = process.record(os.getpid())
        entry = process.spawn(
            [sys.executable, "-P", "-m", "deploy.local.watchdog", str(self.home), str(me.pid), str(me.created)],
            log=self.home / "logs" / "watchdog.log",
            env=os.environ,
        )
        process.save(pid_file, entry)

    def _stop_watchdog(self) -> None:
        pid_file = self.home / "run" / "watchdog.json"
        watchdog = process.running(process.load(pid_file))
        if watchdog is not None and watchdog.pid != os.getpid():
            process.stop([watchdog], ask=None, grace_seconds=0)
        pid_file.unlink(missing_ok=True)


def local_settings() -> LocalSettings:
    try:
        return LocalSettings()
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise Misconfigured(f"setting PENSTOCK_{str(problem['loc'][0]).upper()}: {problem['msg']}") from error


def _silent(name: str, what: str) -> None:
    """Progress nobody wants to see."""
