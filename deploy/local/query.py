"""The query service as a child process of the local stack."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from deploy.local import process
from deploy.local.ports import Ports
from deploy.local.service import HOST
from deploy.local.workers import STOP_GRACE_SECONDS, answers, wait_ready
from pipeline.runtime.home import DEVELOPMENT_FILE, ENDPOINTS_FILE, page_address

NAME = "query"


@dataclass(frozen=True, slots=True)
class QueryService:
    url: str
    """Its address; the last one it had when it does not run; "" before it ever did."""
    pid: int | None
    ready: bool

    @property
    def is_started(self) -> bool:
        """It was started, and not stopped."""
        return bool(self.url)


def start(home: Path, ports: Ports, *, env: Mapping[str, str]) -> QueryService:
    """Start it, unless it runs, and wait until it is ready. Raises Misconfigured with one line if it ends before."""
    log = _log(home)
    log.parent.mkdir(parents=True, exist_ok=True)
    entry, offset = process.load(_pid_file(home)), 0
    if entry is None or process.running(entry) is None:
        offset = process.rotate(log)
        # Whoever listened on its old address may have been shown the old token.
        (home / DEVELOPMENT_FILE).unlink(missing_ok=True)
        port = _port(ports)
        argv = [sys.executable, "-P", "-m", "penstock", "serve", "--host", HOST, "--port", str(port)]
        entry = replace(
            process.spawn(argv, log=log, env={**os.environ, **env, "PENSTOCK_HOME": str(home)}),
            address=f"http://{HOST}:{port}",
        )
        process.save(_pid_file(home), entry)
    wait_ready("the query service", log, entry, offset)
    _publish(home, entry.address)
    return look(home)


def _port(ports: Ports) -> int:
    """The set one, else the one it had, else a free one."""
    configured = os.environ.get("PENSTOCK_SERVE_PORT", "")
    return int(configured) if configured.isdecimal() and int(configured) else ports.assign([NAME])[NAME]


def stop(home: Path, progress: Callable[[str, str], None]) -> bool:
    """Stop it; False: it did not run."""
    running = processes(home)
    if running:
        progress(NAME, "stopping")
    process.stop(running, ask=signal.SIGTERM, grace_seconds=STOP_GRACE_SECONDS)
    _pid_file(home).unlink(missing_ok=True)
    _publish(home, None)
    if running:
        progress(NAME, "stopped")
    return bool(running)


def _publish(home: Path, url: str | None) -> None:
    """Write the service's address to endpoints.json, if there is one, for other programs."""
    file = home / ENDPOINTS_FILE
    try:
        written = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return
    others = {part: settings for part, settings in written.items() if part != "serve"}
    now = others if url is None else {**others, "serve": {"url": url}}
    if now != written:
        process.write_atomically(file, json.dumps(now, indent=1) + "\n", mode=0o600)


def look(home: Path) -> QueryService:
    entry = process.load(_pid_file(home))
    running = process.running(entry)
    url = entry.address if entry else ""
    return QueryService(url, running.pid if running else None, running is not None and answers(url))


def page(home: Path) -> str | None:
    """The address of its page with the token of development mode in it: for a terminal, and for nothing that is kept.
    None: it does not run, or not in that mode."""
    service = look(home)
    return page_address(service.url, home / DEVELOPMENT_FILE) if service.pid is not None else None


def processes(home: Path) -> list[psutil.Process]:
    running = process.running(process.load(_pid_file(home)))
    return [] if running is None else [running]


def _pid_file(home: Path) -> Path:
    return home / "run" / f"{NAME}.json"


def _log(home: Path) -> Path:
    return home / "logs" / f"{NAME}.log"
