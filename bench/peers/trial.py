"""One peer's trial: its driver, its database, the library it indexes, and the embedding server's counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import psycopg
from psycopg import sql

from bench.peers.driver import DriverFailed, Process
from bench.peers.environments import OFFLINE, Peer, vocabulary
from bench.peers.library import Library, Row

READY_SECONDS = 300.0
"""Longest start of a driver: Penstock's starts three servers and its workers."""
SYNC_SECONDS = 3_600.0
HEALED_AFTER_SECONDS = 30.0
"""A fault of the embedding server is lifted after so long, unless the peer has given up before."""


class Embedding:
    """Reads the counts of the embedding server (bench.zero_cost) and sets its faults."""

    def __init__(self, address: str) -> None:
        self.address = address

    def inputs(self) -> int:
        with urlopen(f"{self.address}/stats") as answer:
            return int(json.load(answer)["inputs"])

    def spoil(self, **faults: int | None) -> None:
        body = json.dumps(faults).encode()
        urlopen(Request(f"{self.address}/faults", body, {"content-type": "application/json"})).close()

    def heal(self) -> None:
        self.spoil(throttle=0, inputs_left=None)


@dataclass(frozen=True)
class Outcome:
    """The result of one command."""

    seconds: float
    embedded: int
    error: str | None
    waited: bool
    """The command ran until a fault was lifted."""


class Trial:
    """One peer with its library, database and driver."""

    def __init__(self, peer: Peer, folder: Path, embedding: Embedding, library: Library, process: Process) -> None:
        self.peer, self.library, self.process, self.embedding = peer, library, process, embedding
        self._folder, self._counted = folder, embedding.inputs()

    @classmethod
    @contextmanager
    def of(
        cls, peer: Peer, python: Path, folder: Path, dsn: str, embedding: Embedding, *, elasticsearch: str = ""
    ) -> Iterator[Self]:
        """Start a peer's driver. folder: trials/NAME in it is used and removed afterwards. dsn: the server in which its
        database is made. elasticsearch: the address of one, if the peer writes to it."""
        home = folder / "trials" / peer.name
        shutil.rmtree(home, ignore_errors=True)
        (home / "state").mkdir(parents=True)
        (folder / "logs").mkdir(exist_ok=True)
        log = folder / "logs" / f"{peer.name}.log"
        log.write_text("")
        database = f"peer_{peer.name.replace('-', '_')}"
        library = Library(home)
        environment = OFFLINE | {
            "PEER_DSN": new_database(dsn, database),
            "PEER_LIBRARY": str(library.folder),
            "PEER_STATE": str(home / "state"),
            "PEER_EMBEDDING": f"{embedding.address}/v1",
            "PEER_VARIANT": peer.variant,
            "PEER_ELASTICSEARCH": elasticsearch,
            "HOME": str(home / "state"),
            "TIKTOKEN_CACHE_DIR": str(vocabulary(folder)),
            "OPENAI_API_KEY": "none",
        }
        embedding.heal()
        with Process([str(python), "-m", peer.module], environment, log) as process:
            process.greet(READY_SECONDS)
            yield cls(peer, home, embedding, library, process)
        shutil.rmtree(home)
        drop_database(dsn, database)

    def sync(
        self, command: str = "sync", *, healed_after: float | None = None, before_healing: Callable[[], object] = int
    ) -> Outcome:
        """Send a command and wait for its answer. healed_after: seconds after which the embedding server's faults are
        lifted if there is no answer yet. before_healing: called just before."""
        before = self._counted  # a peer that watches may have begun before the command
        self.process.say(command)
        answer = None
        if healed_after is not None:
            answer = self.process.answered(healed_after)
            before_healing()
            self.embedding.heal()
        waited = healed_after is not None and answer is None
        answer = answer or self.process.answered(SYNC_SECONDS)
        if answer is None:
            raise DriverFailed(f"no answer to {command} in {SYNC_SECONDS:.0f} s")
        self._counted = self.embedding.inputs()
        return Outcome(round(answer["seconds"], 2), self._counted - before, answer.get("error"), waited)

    @property
    def repairs(self) -> bool:
        return bool(self.process.hello["repairs"])

    def rows(self) -> list[Row]:
        place = self._place
        rows = self._query(
            f"SELECT {place['source']}, {place['text']}, {place['access']},"
            f" {place['embedding']} IS NOT NULL FROM {place['table']}"
        )
        return [Row(*row) for row in rows]

    def faults(self) -> dict[str, str]:
        return self.library.faults(self.rows())

    def written(self) -> set[tuple[Any, ...]]:
        """Return marks of the stored rows; a row has another mark after it is written."""
        return set(self._query(f"SELECT ctid::text, xmin::text FROM {self._stored}"))

    def lose(self, share: int) -> int:
        """Delete one row in ``share`` from the store without the peer's knowledge. Returns how many."""
        lost = self._query(
            f"WITH lost AS (DELETE FROM {self._stored} WHERE ctid IN (SELECT ctid FROM (SELECT ctid,"
            f" row_number() OVER (ORDER BY ctid) AS n FROM {self._stored}) AS numbered"
            f" WHERE n % {share} = 0) RETURNING 1) SELECT count(*) FROM lost"
        )
        return int(lost[0][0])

    @property
    def _place(self) -> dict[str, str]:
        return dict(self.process.hello["rows"])

    @property
    def _stored(self) -> str:
        return self._place["stored"] or self._place["table"]

    def _query(self, statement: str) -> list[tuple[Any, ...]]:
        dsn = self._place["dsn"] or self.process.environment["PEER_DSN"]
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(statement.encode()).fetchall()


def new_database(dsn: str, name: str) -> str:
    """Make a database with pgvector and return its address. An older one of the same name is dropped."""
    drop_database(dsn, name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    address = f"{dsn.rpartition('/')[0]}/{name}"
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    return address


def drop_database(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
