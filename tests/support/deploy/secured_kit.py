"""A Penstock on the secured stack, every process with a login of its own, told its secrets by files."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psycopg

from deploy.local.secured import ADMIN, OWNER, Secured
from tests.support.processes import PROJECT, Processes, run_penstock
from tests.support.space import KEY_ENDS

ROLES = PROJECT / "deploy" / "roles"
POSTGRES = {
    OWNER: "penstock_owner",
    "penstock_detect": "penstock_worker",
    "penstock_vectors": "penstock_worker",
    "penstock_keywords": "penstock_worker",
    "penstock_analyse": "penstock_analysis",
    "penstock_connect": "penstock_connectors",
    "penstock_ask": "penstock_query",
}
ELASTICSEARCH = {
    OWNER: "penstock_migrate",
    "penstock_detect": "penstock_worker",
    "penstock_vectors": None,
    "penstock_keywords": "penstock_worker",
    "penstock_analyse": None,
    "penstock_connect": None,
    "penstock_ask": "penstock_query",
}
SMALL = {
    "PENSTOCK_HEAP_KAFKA_MB": "256",
    "PENSTOCK_HEAP_ELASTICSEARCH_MB": "512",
    "PENSTOCK_POSTGRES_SHARED_BUFFERS_MB": "64",
}


@dataclass
class Site(Processes):
    home: Path
    secured: Secured
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """The API key of the principal that may search."""

    # Who is told what

    def environment(self, login: str, **more: str) -> dict[str, str]:
        """Return the environment of a process with this login: addresses and files, no secret. more: changes of it."""
        shown = self.secured.logins[login].certificate
        endpoints = self.secured.stack.endpoints()
        home = self.home / "processes" / login
        home.mkdir(parents=True, exist_ok=True)
        given = {
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_SECRETS_DIR": str(self._secrets(login)),
            "PENSTOCK_KAFKA_BOOTSTRAP": endpoints["kafka"]["bootstrap"],
            "PENSTOCK_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "PENSTOCK_KAFKA_SSL_CAFILE": str(self.secured.authority.ca),
            "PENSTOCK_POSTGRES_DSN": f"{endpoints['postgres']['dsn']}&sslcert={shown.certificate}&sslkey={shown.key}",
            "PENSTOCK_ELASTICSEARCH_URL": endpoints["elasticsearch"]["url"],
            "PENSTOCK_ELASTICSEARCH_CA_CERTS": str(self.secured.authority.ca),
            "PENSTOCK_ELASTICSEARCH_CLIENT_CERT": str(shown.certificate),
            "PENSTOCK_ELASTICSEARCH_CLIENT_KEY": str(shown.key),
            "PENSTOCK_STREAM_SESSION_TIMEOUT_SECONDS": "10",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG"))}
        dist = {name: value for name, value in os.environ.items() if name == "PENSTOCK_DIST"}
        return {**kept, **dist, **given, **more}

    def _secrets(self, login: str) -> Path:
        folder = self.home / "secrets" / login
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        password = self.secured.logins[login].password
        said = {
            "penstock_kafka_sasl_username": login,
            "penstock_kafka_sasl_password": password,
            "penstock_postgres_username": login,
            "penstock_postgres_password": password,
        }
        if ELASTICSEARCH.get(login):
            said |= {"penstock_elasticsearch_username": login, "penstock_elasticsearch_password": password}
        for name, value in said.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(value)
        return folder

    def all_secrets(self) -> set[str]:
        passwords = {login.password for login in self.secured.logins.values()}
        return passwords | {self.key} | {file.read_text().splitlines()[1] for file in self.home.glob("*.pem")}

    # Commands and processes

    def penstock(self, login: str, *arguments: str, within_seconds: float = 120, **more: str) -> tuple[int, str, str]:
        """The real command as this login: exit code, stdout, stderr."""
        env = self.environment(login, **more)
        done = run_penstock(*arguments, env=env, within_seconds=within_seconds)
        return done.returncode, done.stdout, done.stderr

    def run(self, login: str, *argv: str, within_seconds: float = 120, **more: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *argv],
            env=self.environment(login, **more),
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_seconds,
        )
        return done.returncode, done.stdout, done.stderr

    def start(self, name: str, login: str, *arguments: str, **more: str) -> None:
        argv = [sys.executable, "-m", "cli.main", *arguments]
        env = self.environment(login, **more)
        self.launch(name, argv, env, "PENSTOCK_STREAM_HEALTH_PORT", "PENSTOCK_SERVE_PORT")

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def enrol(self, name: str, *allow: str) -> Path:
        """A producer, as the owner enrols it (``default/NAME`` where nothing else is said): its private key's file."""
        file = self.home / f"{name}.pem"
        patterns = [word for pattern in allow or (f"default/{name}",) for word in ("--allow", pattern)]
        done = self.penstock(OWNER, "producer", "add", name, *patterns, "--key-file", str(file))
        assert done[0] == 0, done
        return file

    # The servers, as their administrators

    def set_up(self) -> None:
        """By the files that an operator uses, in the order of docs/deploy.md."""
        with psycopg.connect(self.secured.postgres(), autocommit=True) as admin:
            admin.execute((ROLES / "postgres" / "1-roles.sql").read_text().encode())
            for login, role in POSTGRES.items():
                password = self.secured.logins[login].password
                admin.execute(f"CREATE ROLE {login} LOGIN PASSWORD '{password}' IN ROLE {role}".encode())
            admin.execute(f"ALTER ROLE {OWNER} SET role = penstock_owner".encode())
        users = self.make_kafka_users({login: self.secured.logins[login].password for login in ELASTICSEARCH})
        assert users[0] == 0, users
        migrated = self.penstock(OWNER, "migrate")
        assert migrated[0] == 0, migrated
        owner = self.secured.logins[OWNER]
        dsn = self.secured.postgres(
            user=OWNER,
            password=owner.password,
            sslcert=str(owner.certificate.certificate),
            sslkey=str(owner.certificate.key),
        )
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute((ROLES / "postgres" / "2-grants.sql").read_text().encode())

    def give_acls(self, prefix: str = "") -> tuple[int, str, str]:
        """As the administrator: exit code, stdout, stderr."""
        more = {"PENSTOCK_KAFKA_SASL_MECHANISM": "PLAIN", "PENSTOCK_KAFKA_TOPIC_PREFIX": prefix}
        return self.run(ADMIN, "-m", "deploy.roles.kafka", **more)

    def make_kafka_users(self, passwords: Mapping[str, str]) -> tuple[int, str, str]:
        """As docker-compose.yml's `kafka-users` does it: exit code, stdout, stderr."""
        folder = self.home / "secrets" / "kafka-users"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in folder.iterdir():
            file.unlink()
        for user, password in passwords.items():
            (folder / user).touch(mode=0o600)
            (folder / user).write_text(password)
        more = {"PENSTOCK_KAFKA_SASL_MECHANISM": "PLAIN"}
        return self.run(ADMIN, "-m", "deploy.roles.kafka", "--passwords", str(folder), **more)

    def keys_file(self) -> Path:
        file = self.home / "keys.toml"
        file.write_text(
            f'[intranet]\nexpires = {KEY_ENDS}\nsha256 = "{sha256(self.key.encode()).hexdigest()}"\n'
            'tenant = "default"\ntags = ["folder/staff"]\n'
        )
        return file

    def ask(self, question: str) -> dict[str, Any]:
        response = httpx.post(
            f"http://127.0.0.1:{self.ports['query']}/v1/search",
            json={"query": question},
            headers={"X-Api-Key": self.key},
            timeout=30,
        )
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


@contextmanager
def secured_site(home: Path) -> Iterator[Site]:
    """The stack, its users and their rights, and what migrations make; nothing of Penstock runs yet."""
    before = {name: os.environ.get(name) for name in SMALL}
    os.environ.update(SMALL)
    try:
        secured = Secured(home / "stack", ELASTICSEARCH)
        secured.stack.up()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    site = Site(home, secured)
    try:
        site.set_up()
        yield site
    finally:
        site.stop_all()
        secured.stack.down()
