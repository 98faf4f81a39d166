"""The stream workers as child processes of the local stack."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from deploy.local import process
from deploy.local.lock import exclusive
from deploy.local.service import HOST, free_port, reason
from pipeline.core.errors import Misconfigured

START_TIMEOUT_SECONDS = 90.0
STOP_GRACE_SECONDS = 20.0
"""A worker finishes the batches in its lanes and leaves its group; more than three times what it took when tried."""


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    """``detect``; a second process of it is ``detect-1``."""
    pid: int | None
    ready: bool
    health: str
    """Where /livez, /readyz, /status and /metrics are: ``http://127.0.0.1:PORT``."""
    waiting_for: str | None = None
    """The service that one of its stages is stalled by."""
    reason: str | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    """The status of each of its stages; empty when it does not answer."""
    connectors: frozenset[str] = frozenset()
    """The names of the connectors that it runs."""


def command(name: str) -> list[str]:
    """The worker's program. ``-P``: nothing is imported from the folder that it happens to be started in."""
    return [sys.executable, "-P", "-m", "penstock", "worker", name]


def start(
    home: Path,
    name: str,
    *,
    instance: int = 0,
    env: Mapping[str, str],
    wait: bool,
) -> Worker:
    """Start one, unless it runs. Raises Misconfigured with one line if it ends before it is ready."""
    key = name if instance == 0 else f"{name}-{instance}"
    log = _log(home, key)
    log.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(home / "run" / "workers.lock"):
        entry, offset = process.load(_pid_file(home, key)), 0
        if entry is None or process.running(entry) is None:
            port = free_port()
            offset = process.rotate(log)
            environment = {**os.environ, **env, "PENSTOCK_HOME": str(home), "PENSTOCK_STREAM_HEALTH_PORT": str(port)}
            entry = replace(process.spawn(command(name), log=log, env=environment), address=f"http://{HOST}:{port}")
            process.save(_pid_file(home, key), entry)
    if wait:
        wait_ready(f"worker {key}", log, entry, offset)
    return _look(home, key)


def stop(home: Path, key: str) -> None:
    process.stop(processes(home, key), ask=signal.SIGTERM, grace_seconds=STOP_GRACE_SECONDS)
    _pid_file(home, key).unlink(missing_ok=True)


def stop_all(home: Path, progress: Callable[[str, str], None]) -> list[str]:
    """Stop every worker, all at once. Returns the names of those that ran."""
    keys = _keys(home)
    ran = [key for key in keys if processes(home, key)]

    def stop_one(key: str) -> None:
        if key in ran:
            progress(key, "stopping")
        stop(home, key)
        if key in ran:
            progress(key, "stopped")

    with ThreadPoolExecutor(len(keys) or 1) as pool:
        list(pool.map(stop_one, keys))
    return ran


def processes(home: Path, key: str) -> list[psutil.Process]:
    running = process.running(process.load(_pid_file(home, key)))
    return [] if running is None else [running]


def listed(home: Path) -> list[Worker]:
    """Every worker that was started and not stopped; one that died has no pid."""
    keys = _keys(home)
    with ThreadPoolExecutor(len(keys) or 1) as pool:
        return list(pool.map(lambda key: _look(home, key), keys))


def _look(home: Path, key: str) -> Worker:
    entry = process.load(_pid_file(home, key))
    running = process.running(entry)
    address = entry.address if entry else ""
    ready = running is not None and answers(address)
    status = _status(address) if ready else {}
    stages = status.get("stages", [])
    stuck = next((stage for stage in stages if stage["waiting_for"]), {"waiting_for": None, "reason": None})
    pid = running.pid if running else None
    connectors = frozenset(connector["name"] for connector in status.get("connectors", []))
    return Worker(key, pid, ready, address, stuck["waiting_for"], stuck["reason"], stages, connectors)


def wait_ready(name: str, log: Path, entry: process.Record, offset: int) -> None:
    """Until it answers /readyz. offset: of the log, where this start begins. Raises Misconfigured with one line."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not answers(entry.address):
        if process.running(entry) is None:
            raise Misconfigured(f"{name} stopped while starting: {reason(log, offset)} (log: {log})")
        if time.monotonic() > deadline:
            raise Misconfigured(
                f"{name} is not ready after {START_TIMEOUT_SECONDS:.0f} s: {reason(log, offset)} (log: {log})"
            )
        time.sleep(0.1)


def answers(address: str) -> bool:
    """Whether /readyz does, with 200."""
    return _get(address, "/readyz") is not None


def _status(address: str) -> dict[str, Any]:
    """Its status; empty when it does not answer."""
    body = _get(address, "/status")
    return dict(json.loads(body)) if body else {}


def _get(address: str, path: str) -> bytes | None:
    """The body of a 200 within two seconds, else None."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _keys(home: Path) -> list[str]:
    return sorted(file.stem.removeprefix("worker-") for file in (home / "run").glob("worker-*.json"))


def _pid_file(home: Path, key: str) -> Path:
    return home / "run" / f"worker-{key}.json"


def _log(home: Path, key: str) -> Path:
    return home / "logs" / f"worker-{key}.log"
