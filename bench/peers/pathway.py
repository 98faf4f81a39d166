"""Pathway: a watched folder with persistence, its token splitter, its OpenAI embedder, a snapshot table of Postgres.
Variant "cache": the embedder remembers by text, on disk.

It keeps running and watches the folder, as it is meant to; a sync is complete when its table holds what the same
splitter makes of the folder. (Persisting its operators' state as well, so that a restart computes nothing again, needs
a licence key.)"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from urllib.parse import unquote, urlsplit

import pathway as pw
import psycopg
from pathway.internals.parse_graph import G
from pathway.xpacks.llm.embedders import OpenAIEmbedder
from pathway.xpacks.llm.splitters import RecursiveSplitter

from bench.peers.protocol import (
    BATCH,
    CHUNK_TOKENS,
    DIMENSIONS,
    MODEL,
    OVERLAP_TOKENS,
    Driver,
    Rows,
    Task,
    read_task,
    serve,
)

TABLE = f"""
CREATE TABLE chunks (key text PRIMARY KEY, name text NOT NULL, text text NOT NULL, access text NOT NULL,
  embedding vector({DIMENSIONS}))
"""

DIGEST = """
SELECT name, access, md5(string_agg(md5(text), '' ORDER BY md5(text) COLLATE "C")) FROM chunks GROUP BY name, access
"""
REQUESTS = 64
"""Concurrent requests, when each is one text: without a bound all texts of a commit are requested at once, and time
out."""
POLL_SECONDS = 0.1
IDLE_SECONDS = 60.0
START_SECONDS = 900.0
"""How long the table has to stay unchanged until a pipeline is taken to be finished: one that runs, and one that starts
(its first commit holds everything it reads, and appears only when all of it is embedded)."""
COMMIT_MS = 100


class Access(pw.Schema):
    name: str = pw.column_definition(primary_key=True)
    access: str


def main() -> None:
    task = read_task()
    with psycopg.connect(task.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    engine = Engine(task)
    serve(Driver(Rows("chunks", "name", "text", "access"), engine.sync, ("pathway",)))
    os._exit(0)  # it has no way to be stopped from another thread


class Engine:
    """Runs the pipeline in a thread, and restarts it from its persisted state after an error."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._splitter = RecursiveSplitter(CHUNK_TOKENS, OVERLAP_TOKENS, encoding_name="cl100k_base")
        self._expected: dict[str, tuple[str, str, str]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        os.environ["OPENAI_BASE_URL"] = task.embedding  # its embedder makes the client itself

    def sync(self) -> float:
        """Return the seconds until the table matches the folder, or until its last change."""
        began = time.perf_counter()
        publish_access(self._task)
        expected = self._split()
        changed = time.perf_counter()
        patience = IDLE_SECONDS
        if self._thread is None:
            began, patience = changed, START_SECONDS
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        with psycopg.connect(self._task.dsn, autocommit=True) as connection:
            seen: object = None
            while True:
                stored = {(name, access, mark) for name, access, mark in connection.execute(DIGEST).fetchall()}
                now = time.perf_counter()
                if stored != seen:
                    seen, changed = stored, now
                    patience = IDLE_SECONDS if stored else patience
                if stored == expected:
                    return now - began
                if now - changed > patience:
                    return changed - began
                if self._error is not None:
                    error, self._error, self._thread = self._error, None, None
                    raise error
                time.sleep(POLL_SECONDS)

    def _split(self) -> set[tuple[str, str, str]]:
        """Return the expected content of the table in the form of DIGEST."""
        for document in self._task.documents():
            if self._expected.get(document.name, ("",))[0] != document.text:
                marks = sorted(md5(chunk) for chunk, _ in self._splitter.chunk(document.text))
                self._expected[document.name] = (document.text, document.access, md5("".join(marks)))
            text, _, mark = self._expected[document.name]
            self._expected[document.name] = (text, document.access, mark)
        names = set(self._task.names())
        return {(name, access, mark) for name, (_, access, mark) in self._expected.items() if name in names}

    def _run(self) -> None:
        backend = pw.persistence.Backend.filesystem(str(self._task.state / "persistence"))
        try:
            G.clear()
            build(self._task)
            pw.run(monitoring_level=pw.MonitoringLevel.NONE, persistence_config=pw.persistence.Config(backend))
        except BaseException as error:
            self._error = error
            raise


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def publish_access(task: Task) -> None:
    folder = task.state / "access"
    folder.mkdir(exist_ok=True)
    draft = task.state / "access.draft"
    draft.write_text("".join(json.dumps({"name": n, "access": a}) + "\n" for n, a in sorted(task.access().items())))
    draft.replace(folder / "access.jsonl")


def build(task: Task) -> None:
    files = pw.io.fs.read(
        str(task.library),
        format="plaintext_by_file",
        with_metadata=True,
        autocommit_duration_ms=COMMIT_MS,
        name="library",
    )
    access = pw.io.jsonlines.read(
        str(task.state / "access"), schema=Access, autocommit_duration_ms=COMMIT_MS, name="access"
    )
    splitter = RecursiveSplitter(CHUNK_TOKENS, OVERLAP_TOKENS, encoding_name="cl100k_base")
    cached = task.variant == "cache"  # its key is a whole batch: only batches of one text recur
    embedder = OpenAIEmbedder(
        model=MODEL,
        api_key="none",
        batch_size=1 if cached else BATCH,
        capacity=REQUESTS if cached else None,
        cache_strategy=pw.udfs.DiskCache() if cached else None,
    )
    skipped = len(str(task.library)) + 1
    documents = files.select(
        name=pw.apply_with_type(lambda m: m["path"].as_str()[skipped:], str, pw.this._metadata), data=pw.this.data
    )
    chunks = documents.select(pw.this.name, part=splitter(pw.this.data)).flatten(pw.this.part)
    chunks = chunks.select(pw.this.name, text=pw.this.part[0])
    chunks = chunks.select(pw.this.name, pw.this.text, embedding=embedder(pw.this.text))
    rows = chunks.join(access, pw.left.name == pw.right.name, id=pw.left.id).select(
        pw.left.name, pw.left.text, pw.left.embedding, pw.right.access
    )
    rows = rows.select(
        pw.this.name, pw.this.text, pw.this.embedding, pw.this.access, key=pw.apply_with_type(str, str, pw.this.id)
    )
    address = urlsplit(task.dsn)
    settings = {
        "host": address.hostname,
        "port": str(address.port),
        "dbname": address.path[1:],
        "user": address.username,
        "password": unquote(address.password or ""),
    }
    pw.io.postgres.write(rows, settings, "chunks", output_table_type="snapshot", primary_key=[rows.key], name="chunks")


if __name__ == "__main__":
    main()
