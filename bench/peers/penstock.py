"""Penstock itself: a stack of its own as ``penstock up`` starts it; each command is ``penstock ingest --wait``, which
returns when both stores have everything. Its workers run on in between, as the watching peers do, and build the
vectors' index when the load is over (docs/adr/0030), which no peer has.

Variant "watch": ``penstock watch`` follows the folder, as the watching peers do, and one process has all stages, as
docs/deploy.md advises for a small machine. A sync is complete when the ledger says that both stores have all that is in
the folder, and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psycopg

from bench.ingest import Run
from bench.peers.protocol import Driver, Rows, Task, read_task, serve
from bench.running import PENSTOCK
from pipeline.core.identity import content_hash
from pipeline.core.normalise import normalise

STORED = "chunks_g1"
TABLE = f"""(
  SELECT split_part(d.external_id, '/library/', 2) AS name, c.text, c.embedding,
         substring(a.acl_tags[1] from '[^/]*$') AS access
  FROM {STORED} AS c
  LEFT JOIN documents AS d ON d.id = c.document_id LEFT JOIN access_sets AS a ON a.id = d.access_id
) AS chunks"""
REPAIRS_AT_MOST = 3


CONTENT = """
SELECT split_part(d.external_id, '/library/', 2), substring(a.acl_tags[1] from '[^/]*$'), encode(d.content_hash, 'hex')
FROM documents d JOIN access_sets a ON a.id = d.access_id
JOIN index_state v ON v.document_id = d.id AND v.store = 'vectors' AND v.seq >= v.want_seq
JOIN index_state k ON k.document_id = d.id AND k.store = 'keywords' AND k.seq >= k.want_seq
WHERE d.deleted_at IS NULL
"""
PENDING = "SELECT count(*) FROM index_state WHERE seq < want_seq"
POLL_SECONDS = 0.1
IDLE_SECONDS = 120.0
"""How long a watched folder and the stores may differ without a change of the stores."""


def main() -> None:
    task = read_task()
    run = Run(task.state / "home", task.embedding.removesuffix("/v1"))
    run.library = task.library
    watches = task.variant == "watch"
    run.environment["PENSTOCK_WORKERS_TOGETHER"] = str(watches).lower()
    run.command("up")
    watcher = Watcher(run, task) if watches else None
    try:
        workers = [worker["pid"] for worker in run.penstock("status")["workers"]]
        serve(
            Driver(
                Rows(TABLE, "name", "text", "access", stored=STORED, dsn=run.endpoint("postgres", "dsn")),
                watcher.sync if watcher else lambda: sync(run, task),
                ("penstock",),
                repair=lambda: repair(run),
                memory_of=tuple(workers),
            )
        )
    finally:
        if watcher:
            watcher.stop()
        run.command("down")


class Watcher:
    """Runs ``penstock watch`` on the library, from the first sync on."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run, self._task = run, task
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[str, tuple[str, str]] = {}
        """By name: a document's text and the digest under which the ledger has it."""

    def sync(self) -> float:
        """Return the seconds until both stores have what is in the folder. Raises RuntimeError if they never do."""
        began = time.perf_counter()
        write_policies(self._task)
        expected = self._expected()
        changed = time.perf_counter()
        if self._process is None:
            began = changed
            self._process = self._run.watch(sys.stderr)
        with psycopg.connect(self._run.endpoint("postgres", "dsn"), autocommit=True) as connection:
            seen: object = None
            while time.perf_counter() - changed < IDLE_SECONDS:
                stored = set(connection.execute(CONTENT).fetchall())
                if stored == expected and connection.execute(PENDING).fetchone() == (0,):
                    return time.perf_counter() - began
                if stored != seen:
                    seen, changed = stored, time.perf_counter()
                time.sleep(POLL_SECONDS)
        raise RuntimeError(f"the stores do not have what is in the folder after {IDLE_SECONDS:.0f} s")

    def _expected(self) -> set[tuple[str, str, str]]:
        """Return what is in the folder, in the form of CONTENT."""
        expected = set()
        for document in self._task.documents():
            if self._known.get(document.name, ("",))[0] != document.text:
                text, _ = normalise(document.text, "text/markdown")
                self._known[document.name] = document.text, content_hash(text).hex()
            expected.add((document.name, document.access, self._known[document.name][1]))
        return expected

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def sync(run: Run, task: Task) -> float:
    write_policies(task)
    try:
        return float(run.ingest()["seconds"])
    except SystemExit as error:
        raise RuntimeError(str(error)) from error


def repair(run: Run) -> None:
    """Run audits until one finds no difference (one that finds any exits with 1)."""
    for _ in range(REPAIRS_AT_MOST):
        argv = [PENSTOCK, "audit", "--repair", "--json"]
        audit = subprocess.run(argv, env=run.environment, stdout=subprocess.PIPE, check=False)
        if json.loads(audit.stdout)["clean"]:
            return
    raise RuntimeError(f"{REPAIRS_AT_MOST} audits did not repair it")


def write_policies(task: Task) -> None:
    """Write the access as the folder connector reads it, in one file for each folder."""
    tags: dict[Path, set[str]] = defaultdict(set)
    for name, tag in task.access().items():
        tags[(task.library / name).parent].add(tag)
    for folder, (tag, *others) in ((folder, sorted(values)) for folder, values in tags.items()):
        policy = folder / ".penstock.toml"
        text = f'acl = ["{tag}"]\n'
        if folder != task.library and not others and (not policy.exists() or policy.read_text() != text):
            policy.write_text(text)


if __name__ == "__main__":
    main()
