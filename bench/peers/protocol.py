"""The protocol between runner and drivers. It needs only the standard library: each peer's own Python imports it.

A driver is ``python -m bench.peers.NAME``. Its first line on stdout says where its rows are; then it reads one JSON
object a line and answers each with one, until its input ends:

    ← {"rows": {"table": "public.chunks", "source": SQL, "text": SQL, …}, "versions": {package: version}, …}
    → {"do": "sync"}      bring the store into line with the folder      ← {"seconds": 1.23} or {"error": "…"}
    → {"do": "repair"}    the documented way to repair a store that lost rows, if there is one
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

MODEL = "text-embedding-3-small"
"""Named as a model that every client knows to have 1,536 dimensions; the server answers for any name."""
DIMENSIONS = 1_536
CHUNK_TOKENS, OVERLAP_TOKENS = 400, 80
CHARACTERS_A_TOKEN, TOKENS_A_WORD = 2.71, 2.44
"""Ratios of the library's text in cl100k, for splitters that count characters or words."""
BATCH = 100
"""Texts of a request, if the peer lets one choose."""


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    access: str


@dataclass(frozen=True)
class Task:
    """The task of a driver, which the runner passes in environment variables."""

    dsn: str
    """An empty database with pgvector available, the peer's own."""
    library: Path
    """Folders of text files; a document's name is its path in them. Next to it is access.json, {name: tag}."""
    state: Path
    """An empty folder for the peer's files."""
    embedding: str
    """The embedding server's base URL, with /v1."""
    variant: str
    elasticsearch: str
    """The address of an Elasticsearch, for peers that write to one; otherwise empty."""

    def access(self) -> dict[str, str]:
        return dict(json.loads(self.library.with_name("access.json").read_text()))

    def documents(self) -> list[Document]:
        access = self.access()
        return [Document(name, (self.library / name).read_text(), access[name]) for name in self.names()]

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.library)) for path in self.library.rglob("*.md"))


def read_task() -> Task:
    environment = os.environ
    return Task(
        environment["PEER_DSN"],
        Path(environment["PEER_LIBRARY"]),
        Path(environment["PEER_STATE"]),
        environment["PEER_EMBEDDING"],
        environment.get("PEER_VARIANT", ""),
        environment.get("PEER_ELASTICSEARCH", ""),
    )


@dataclass(frozen=True)
class Rows:
    """Where a peer stores its chunks: a table (or view), and SQL expressions for a row's name of the document, text,
    access tag and vector. stored: the table to delete rows from, if it is another. dsn: the database, if it is not the
    task's."""

    table: str
    source: str
    text: str
    access: str
    embedding: str = "embedding"
    stored: str = ""
    dsn: str = ""


@dataclass
class Driver:
    """A peer's operations for the runner."""

    rows: Rows
    sync: Callable[[], float | None]
    """Returns seconds if it measured them itself."""
    packages: tuple[str, ...]
    repair: Callable[[], float | None] | None = None
    memory_of: tuple[int, ...] = field(default=())
    """Processes that do the peer's work and are not this one's children."""


def serve(driver: Driver) -> None:
    """Answer commands until the input ends. Output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(
        {
            "rows": asdict(driver.rows),
            "versions": {name: version(name) for name in driver.packages},
            "repairs": driver.repair is not None,
            "memory_of": driver.memory_of,
        }
    )
    for line in sys.stdin:
        work = driver.repair if json.loads(line)["do"] == "repair" else driver.sync
        assert work is not None
        began = time.perf_counter()
        try:
            seconds = work()
        except Exception as error:  # noqa: BLE001 — whatever a peer raises is its answer
            say({"error": f"{type(error).__name__}: {error}"[:300], "seconds": time.perf_counter() - began})
            continue
        say({"seconds": time.perf_counter() - began if seconds is None else seconds})
