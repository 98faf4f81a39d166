"""Pathway: a watched folder with persistence, its token splitter, its OpenAI embedder, a snapshot table of Postgres.
Variant "cache": the embedder remembers by text, on disk. Variant "both": the chunks are also written to an index of
Elasticsearch. Its own connector for that needs a licence key, so that a subscription to the table's changes writes them
with Elasticsearch's client, one bulk request for each commit.

It keeps running and watches the folder, as it is meant to; a sync is complete when its table holds what the same
splitter makes of the folder. (Persisting its operators' state as well, so that a restart computes nothing again, needs
a licence key.)"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import pathway as pw
import psycopg
from elasticsearch import Elasticsearch, helpers
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
INDEX = "chunks"
MAPPING = {"properties": {"text": {"type": "text"}, "name": {"type": "keyword"}, "access": {"type": "keyword"}}}


class Access(pw.Schema):
    name: str = pw.column_definition(primary_key=True)
    access: str


def main() -> None:
    task = read_task()
    with psycopg.connect(task.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    engine = Engine(task, Index(task.elasticsearch) if task.variant == "both" else None)
    serve(Driver(Rows("chunks", "name", "text", "access"), engine.sync, ("pathway",)))
    os._exit(0)  # it has no way to be stopped from another thread


class Index:
    """Writes the changes of a table to Elasticsearch, those of a commit at once."""

    def __init__(self, address: str) -> None:
        self._client = Elasticsearch(address, request_timeout=60)
        self._client.indices.delete(index=INDEX, ignore_unavailable=True)
        self._client.indices.create(index=INDEX, mappings=MAPPING, settings={"number_of_replicas": 0})
        self._changes: list[dict[str, Any]] = []
        self._stored: dict[str, tuple[str, str, str]] = {}
        """By id of an entry that Elasticsearch has acknowledged: its document, access and the digest of its text."""

    def change(self, key: pw.Pointer, row: dict[str, Any], time: int, is_addition: bool) -> None:
        entry = {"_op_type": "index" if is_addition else "delete", "_index": INDEX, "_id": str(key)}
        if is_addition:
            entry["_source"] = {name: row[name] for name in ("name", "text", "access")}
        self._changes.append(entry)

    def commit(self, time: int) -> None:
        # Of an entry that changed, the removal comes first or last: what is added stays.
        added = {entry["_id"] for entry in self._changes if entry["_op_type"] == "index"}
        changes = [entry for entry in self._changes if entry["_op_type"] == "index" or entry["_id"] not in added]
        self._changes = []
        helpers.bulk(self._client, changes, refresh=False)
        for entry in changes:
            if row := entry.get("_source"):
                self._stored[entry["_id"]] = (row["name"], row["access"], md5(row["text"]))
            else:
                self._stored.pop(entry["_id"], None)

    def content(self) -> set[tuple[str, str, str]]:
        """Return what is stored in the form of DIGEST."""
        marks: dict[tuple[str, str], list[str]] = {}
        for name, access, mark in list(self._stored.values()):
            marks.setdefault((name, access), []).append(mark)
        return {(*of, md5("".join(sorted(values)))) for of, values in marks.items()}

    def refresh(self) -> None:
        self._client.indices.refresh(index=INDEX)


class Engine:
    """Runs the pipeline in a thread, and restarts it from its persisted state after an error."""

    def __init__(self, task: Task, index: Index | None) -> None:
        self._task, self._index = task, index
        self._splitter = RecursiveSplitter(CHUNK_TOKENS, OVERLAP_TOKENS, encoding_name="cl100k_base")
        self._expected: dict[str, tuple[str, str, str]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        os.environ["OPENAI_BASE_URL"] = task.embedding  # its embedder makes the client itself

    def sync(self) -> float:
        """Return the seconds until the table, and the index, match the folder, or until the table's last change."""
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
                if stored == expected and (self._index is None or self._index.content() == expected):
                    if self._index is not None:
                        self._index.refresh()
                    return time.perf_counter() - began
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
            build(self._task, self._index)
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


def build(task: Task, index: Index | None) -> None:
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
    if index is not None:
        pw.io.subscribe(rows, index.change, on_time_end=index.commit, name="index")


if __name__ == "__main__":
    main()
