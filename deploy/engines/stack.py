"""docker-compose.yml in an engine: its settings, its services, and what is asked of them from outside."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from deploy.engines.engine import Engine
from deploy.report import CheckFailed

ROOT = Path(__file__).parents[2]
CHECKOUT, SETTINGS = "/penstock", "/settings"
"""Where the engine shows the checkout and the settings."""
POLL_SECONDS = 2.0
TAG = "staff"
"""The access tag that the demo profile gives to its documents."""
LATER = "/settings/later"
"""Documents that are published while a worker is killed."""
DOCUMENTS_LATER = 40


def write_settings(folder: Path) -> str:
    """``.env`` with new passwords, the API keys of an asker and of Prometheus, and documents for later. Returns the
    asker's key."""
    folder.mkdir(parents=True, exist_ok=True)
    key, operator = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    mail = "ALERT_"  # nobody is notified, and a mail server's password without its name is refused
    environment = {
        name: value or (secrets.token_hex(24) if name.endswith("_PASSWORD") and not name.startswith(mail) else "")
        for name, value in re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / "deploy/image/example.env").read_text(), re.M)
    }
    environment |= {"OPERATOR_KEY": operator, "TRAIL_KEY": secrets.token_hex(32), "KEYS_FILE": f"{SETTINGS}/keys.toml"}
    env = folder / "env"
    env.touch(mode=0o600)
    env.write_text("".join(f"{name}={value}\n" for name, value in environment.items()))
    expires = date.today() + timedelta(days=2)
    (folder / "keys.toml").write_text(
        f'[engines]\nsha256 = "{_sha256(key)}"\nexpires = {expires}\ntenant = "default"\ntags = ["{TAG}"]\n\n'
        f'[prometheus]\nsha256 = "{_sha256(operator)}"\nexpires = {expires}\ntenant = "default"\noperator = true\n'
    )
    later = folder / "later"
    later.mkdir(exist_ok=True)
    for number in range(DOCUMENTS_LATER):
        text = (
            f"# Locker {number}\n\nThe locker numbered {number} in the north corridor holds {secrets.token_hex(400)}.\n"
        )
        (later / f"locker-{number}.md").write_text(text)
    return key


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Stack:
    """The compose project in a running engine."""

    def __init__(self, engine: Engine, files: Sequence[str] = (), left_out: Sequence[str] = ()) -> None:
        merged = [f"--file={file}" for file in (f"{CHECKOUT}/docker-compose.yml", *files)]
        self._compose = ["docker", "compose", f"--project-directory={CHECKOUT}", f"--env-file={SETTINGS}/env", *merged]
        self._engine = engine
        self.left_out = tuple(left_out)

    def run(self, *arguments: str, seconds: float, send: str | None = None) -> str:
        """``docker compose`` with these arguments; returns its standard output. Raises CheckFailed."""
        try:
            done = self._engine.run(*self._compose, *arguments, seconds=seconds, send=send)
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"compose {arguments[0]} took more than {seconds:.0f} s") from error
        if done.returncode != 0:
            raise CheckFailed(f"compose {' '.join(arguments)[:80]} failed: {last_line(done.stderr or done.stdout)}")
        return done.stdout

    def services(self, *profiles: str) -> dict[str, dict[str, Any]]:
        chosen = [f"--profile={profile}" for profile in profiles]
        services: dict[str, dict[str, Any]] = json.loads(self.run(*chosen, "config", "--format=json", seconds=60))[
            "services"
        ]
        return services

    def containers(self) -> list[dict[str, Any]]:
        """As ``docker inspect`` describes them."""
        ids = self.run("ps", "--all", "--quiet", seconds=60).split()
        return json.loads(self.docker("inspect", *ids)) if ids else []

    def docker(self, *arguments: str, seconds: float = 60) -> str:
        """Raises CheckFailed."""
        done = self._engine.run("docker", *arguments, seconds=seconds)
        if done.returncode != 0:
            raise CheckFailed(f"docker {arguments[0]} failed: {last_line(done.stderr)}")
        return done.stdout

    def wait_until_healthy(self, seconds: float) -> int:
        """Every service that is started is healthy, or has ended well where it runs once. Returns how many containers
        there are. Raises CheckFailed."""
        deadline = time.monotonic() + seconds
        while True:
            containers = self.containers()
            waiting = sorted(filter(None, map(_what_is_missing, containers)))
            if containers and not waiting:
                return len(containers)
            if time.monotonic() > deadline:
                raise CheckFailed(f"after {seconds:.0f} s: {', '.join(waiting)}")
            time.sleep(POLL_SECONDS)

    def explain(self) -> str:
        """Name the containers that are not as they should be; their last lines go to the engine's log."""
        containers = self.containers()
        for container in containers:
            if _what_is_missing(container):
                self._engine.run("docker", "logs", "--tail=40", container["Id"], seconds=30)
        return ", ".join(sorted(filter(None, map(_what_is_missing, containers))))

    def search(self, query: str, key: str | None) -> tuple[int, Any]:
        """``POST /v1/search`` through the published port: status and answer. key: none, without one."""
        header = f'header = "X-Api-Key: {key}"\n' if key else ""
        done = self._engine.run(
            *("curl", "--silent", "--max-time", "30", "--config", "-", "--header", "Content-Type: application/json"),
            *("--data", json.dumps({"query": query, "top": 3}), "--write-out", "\n%{http_code}"),
            "http://127.0.0.1:8080/v1/search",
            seconds=60,
            send=header,
        )
        body, _, code = done.stdout.rpartition("\n")
        return int(code or 0), json.loads(body) if body.startswith("{") else body

    def kill(self, container: Mapping[str, Any]) -> None:
        """SIGKILL to a container's first process. ``docker kill`` would tell the engine not to restart it."""
        done = self._engine.run("sh", "-c", f"kill -KILL {int(container['State']['Pid'])}", seconds=20)
        if done.returncode != 0:
            raise CheckFailed(f"the process could not be killed: {last_line(done.stderr)}")


def service_of(container: Mapping[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def _what_is_missing(container: Mapping[str, Any]) -> str:
    """Empty where it is as it should be."""
    state, service = container["State"], service_of(container)
    if "Health" in state:
        health = state["Health"]["Status"] if state["Running"] else state["Status"]
        return "" if health == "healthy" else f"{service} is {health}"
    if state["Status"] == "exited" and state["ExitCode"] == 0:
        return ""
    return f"{service} is {state['Status']}" + (f" ({state['ExitCode']})" if state["ExitCode"] else "")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return lines[-1][:300]
