"""Common parts of all services of the local stack."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import SystemRandom
from typing import Protocol

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from deploy.local import dist, run_as
from pipeline.core.errors import Misconfigured

HOST = "127.0.0.1"
PORT_RANGE = range(20_000, 32_000)
"""Below the range from which the kernel takes ports for outgoing connections: a restarted server finds its own free."""
FIRST_COMPILER = "-XX:TieredStopAtLevel=1"
"""For a server that mostly starts, works for minutes and stops: Java's second compiler costs it more than it saves. CPU
seconds with and without it, two cores: Elasticsearch until ready 16.4 → 7.7, the first 1,000 chunks 3.1 → 1.6, the
twelfth 1.2 → 0.7; Kafka until ready 8.0 → 4.6. What docker-compose.yml starts runs for months and has both; for
Elasticsearch here see LocalSettings."""
G1, SERIAL = "-XX:+UseG1GC", "-XX:+UseSerialGC"
"""Java's garbage collectors: the first pauses a server less, the second takes less of the processor."""


class LocalSettings(BaseSettings):
    """``PENSTOCK_PORT_KAFKA`` and so on. A port that is not set is found free, and kept for the next start."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    port_kafka: int | None = Field(None, ge=1, le=65535)
    port_postgres: int | None = Field(None, ge=1, le=65535)
    port_elasticsearch: int | None = Field(None, ge=1, le=65535)
    heap_kafka_mb: int = Field(512, ge=128)
    heap_elasticsearch_mb: int = Field(512, ge=256)
    elasticsearch_second_compiler: bool = False
    """As a server has it that runs for long: slower until it is warm, a third less of the processor a search then."""
    postgres_shared_buffers_mb: int = Field(1024, ge=16)
    """Taken page by page as it is used. The graph of 100,000 chunks of 1,536 dimensions is 389 MB, and a walk over it
    takes half as long again where it does not fit."""
    postgres_effective_cache_mb: int | None = Field(None, ge=64)
    """A graph is built in at most a quarter of it. Default: half of the memory of the machine or container, as
    Postgres advises."""
    workers_together: bool = False
    """The workers of the stages and of the analysis in one process."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one service lives in the state folder."""

    home: Path
    name: str

    @property
    def data(self) -> Path:
        return self.home / "data" / self.name

    @property
    def config(self) -> Path:
        return self.home / "run" / f"{self.name}.d"

    @property
    def log(self) -> Path:
        return self.home / "logs" / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        return self.home / "run" / f"{self.name}.json"


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    daemonizes: bool = False
    """The program ends well when its server runs; the server is then found by ``is_mine``."""


class Server(Protocol):
    """One service. ``prepare`` and ``launch`` may be repeated on existing data, also after a SIGKILL."""

    name: str
    stop_signal: signal.Signals
    start_timeout_seconds: float

    def prepare(self, place: Place, ports: Mapping[str, int], settings: LocalSettings) -> None:
        """Write configuration; format the data folder if it is new. Raises Misconfigured."""
        ...

    def launch(self, place: Place, settings: LocalSettings) -> Command: ...

    def is_mine(self, place: Place, argv: Sequence[str]) -> bool:
        """Whether a process of this command line is this server, or is about to become it."""
        ...

    def ready(self, address: str, place: Place) -> bool:
        """Send a real request; True: it was answered within two seconds. Never raises for a server that is down."""
        ...

    def complete(self, place: Place, port: int) -> None:
        """Complete the set-up once it answers (create a database, check versions). Raises Misconfigured."""
        ...

    def url(self, place: Place, port: int) -> str: ...

    def endpoint(self, place: Place, port: int) -> dict[str, str]:
        """Its part of endpoints.json."""
        ...

    def ports(self) -> tuple[str, ...]:
        """Names of the ports it binds; the first is the one that clients use and that can be set."""
        ...


def free_port(taken: frozenset[int] = frozenset()) -> int:
    """A port nobody listens on, and never the same one twice in a row: a server that was started a moment ago does not
    listen yet. Raises Misconfigured when there is none."""
    for port in islice(_candidates(), len(PORT_RANGE)):
        if port not in taken and is_free(port):
            return port
    raise Misconfigured(f"no free port found between {PORT_RANGE.start} and {PORT_RANGE.stop}")


@cache
def _candidates() -> Iterator[int]:
    """All ports of the range over and over, in an order of this process's own."""
    ports = list(PORT_RANGE)
    SystemRandom().shuffle(ports)
    return cycle(ports)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def as_server_user(argv: Sequence[str], *reads: Path) -> tuple[str, ...]:
    """The command, if need be through ``run_as``: root becomes nobody. reads: paths that the server must reach."""
    if os.geteuid() != 0:
        return tuple(argv)
    return (*_run_as("drop"), *map(str, reads), "--", *argv)


def with_a_name(argv: Sequence[str], *reads: Path) -> tuple[str, ...]:
    """Like as_server_user, for a program that looks up the name of the user who runs it."""
    if os.geteuid() == 0:
        return as_server_user(argv, *reads)
    if _has_name(os.geteuid()):
        return tuple(argv)
    return (*_run_as("alias"), "--", *argv)


def own_folder(folder: Path, *, mode: int = 0o755) -> None:
    """Make a folder that the server's user owns."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    if os.geteuid() == 0:
        uid, gid = run_as.nobody()
        if folder.stat().st_uid != uid:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, uid, gid, follow_symlinks=False)


def own_file(file: Path) -> None:
    """Let the server's user own a file."""
    if os.geteuid() == 0:
        os.chown(file, *run_as.nobody())


def java_command(place: Place, heap_mb: int, *archives: Path) -> list[str]:
    """archives: of the program's own classes, on top of Java's; those that are not there are left out."""
    present = [str(archive) for archive in archives if archive.is_file()]
    return [
        str(dist.java()),
        FIRST_COMPILER,
        f"-Xms{heap_mb}m",
        f"-Xmx{heap_mb}m",
        f"-XX:SharedArchiveFile={':'.join([str(dist.java_archive()), *present])}",
        f"-XX:ErrorFile={place.log.parent}/{place.name}-crash-%p.log",
        "-Xlog:disable",
        "-Xlog:all=error:stderr",
    ]


def clean_env() -> dict[str, str]:
    """Our environment without what would change a server behind our back."""
    dropped = ("JAVA_", "_JAVA_", "JDK_JAVA_", "ES_", "KAFKA_", "PG", "LD_PRELOAD", "CLASSPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**environment, "LC_ALL": "C.UTF-8"}  # or Java cannot open a path that is not ASCII


_TELLING = re.compile(r"FATAL|PANIC|\bERROR\b|Exception|[Ee]rror:|could not|No space left|OutOfMemory")
_NOISE = re.compile(
    r"^\s+(at |\.\.\. \d+ more)|Could not create the Java Virtual Machine|A fatal exception has occurred"
)


def reason(log: Path, offset: int) -> str:
    """The line of a log, from the offset on, that best says why its program ended."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            text = file.read(1 << 20).decode("utf-8", "replace")
    except FileNotFoundError:
        return "no log was written"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    causes = [line for line in lines if line.startswith("Caused by:")]
    telling = [line for line in lines if _TELLING.search(line) and not line.startswith("Caused by:")]
    best = (causes or telling or lines or ["it wrote nothing"])[-1]
    return best[:400]


def require_space(home: Path, needed_mb: int) -> None:
    free = shutil.disk_usage(home).free >> 20
    if free < needed_mb:
        raise Misconfigured(
            f"{home} has {free} MiB free, the local stack needs {needed_mb}: free some,"
            " or set PENSTOCK_HOME to another disk"
        )


def _run_as(mode: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(Path(run_as.__file__)), mode)


def _has_name(uid: int) -> bool:
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
