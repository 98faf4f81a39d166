"""Penstock itself: a stack of its own as ``penstock up`` starts it; each command is ``penstock ingest --wait``, which
returns when both stores have everything. Its workers run on in between, as the watching peers do, and build the
vectors' index when the load is over (docs/adr/0030), which no peer has. Variant "together": one process for all stages,
as docs/deploy.md advises for a small machine.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

from bench.ingest import Run
from bench.peers.protocol import Driver, Rows, Task, read_task, serve
from bench.running import PENSTOCK

STORED = "chunks_g1"
TABLE = f"""(
  SELECT split_part(d.external_id, '/library/', 2) AS name, c.text, c.embedding,
         substring(a.acl_tags[1] from '[^/]*$') AS access
  FROM {STORED} AS c
  LEFT JOIN documents AS d ON d.id = c.document_id LEFT JOIN access_sets AS a ON a.id = d.access_id
) AS chunks"""
REPAIRS_AT_MOST = 3


def main() -> None:
    task = read_task()
    run = Run(task.state / "home", task.embedding.removesuffix("/v1"))
    run.library = task.library
    run.environment["PENSTOCK_WORKERS_TOGETHER"] = str(task.variant == "together").lower()
    run.command("up")
    try:
        dsn = json.loads((run.folder / "endpoints.json").read_text())["postgres"]["dsn"]
        workers = [worker["pid"] for worker in run.penstock("status")["workers"]]
        serve(
            Driver(
                Rows(TABLE, "name", "text", "access", stored=STORED, dsn=dsn),
                lambda: sync(run, task),
                ("penstock",),
                repair=lambda: repair(run),
                memory_of=tuple(workers),
            )
        )
    finally:
        run.command("down")


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
