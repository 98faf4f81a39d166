"""From a folder into both stores: first load, nothing changed, edits, deletes, a paragraph at the top of a long one.

    python -m bench.ingest [--documents 1000] [--with-graph] [--json FILE]      # → bench/results/ingest.json

The whole pipeline with Kafka in between, as ``penstock up`` starts it, in a state folder of its own; each step is the
command that a person types (``penstock ingest --wait --json``), timed by itself. The model is bench.zero_cost, 1536
dimensions, so that the pipeline is measured; texts are bench.prose's, chunks of about 400 tokens. Without --with-graph
the vectors have no HNSW index while they are loaded (the peers have none), and it is built, and timed, at the end.
Where the first load's seconds go is told by process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
from rich.console import Console
from rich.table import Table

from bench import processors
from bench.prose import WORDS_A_CHUNK, text
from bench.zero_cost import DIMENSIONS, MODEL, zero_cost
from pipeline.settings import home

RESULTS = Path(__file__).parent / "results" / "ingest.json"
CHUNKS = 9
"""Of a document, about."""
LONG_CHUNKS = 500
"""Of the long one, about."""
SHARE = 100
"""One document in so many is edited, and one deleted."""

console = Console(highlight=False)


class Run:
    """One home, its processes and what they took."""

    def __init__(self, folder: Path, embedding: str) -> None:
        self.folder = folder
        self.library = folder / "library"
        self.environment = {
            **os.environ, "PENSTOCK_HOME": str(folder), "PENSTOCK_EMBEDDING_PROVIDER": "openai",
            "PENSTOCK_EMBEDDING_BASE_URL": f"{embedding}/v1", "PENSTOCK_EMBEDDING_API_KEY": "none",
            "PENSTOCK_EMBEDDING_MODEL": MODEL, "PENSTOCK_EMBEDDING_DIMENSIONS": str(DIMENSIONS),
            "PENSTOCK_EMBEDDING_CHUNK_TOKENS": "400",
        }  # fmt: skip

    def penstock(self, *arguments: str) -> Any:
        process = subprocess.run(
            [str(Path(sys.executable).with_name("penstock")), *arguments, "--json"],
            env=self.environment, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
        if process.returncode:
            raise SystemExit(f"`penstock {' '.join(arguments)}` ended with {process.returncode}")
        return json.loads(process.stdout)

    def ingest(self) -> Mapping[str, Any]:
        """What ``penstock ingest`` tells, and ``whole_s``: the process from its start to its end."""
        began = time.perf_counter()
        told = self.penstock("ingest", str(self.library), "--acl", "staff", "--wait")
        return {**told, "whole_s": round(time.perf_counter() - began, 2)}

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        dsn = json.loads((self.folder / "endpoints.json").read_text())["postgres"]["dsn"]
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def graph(self) -> tuple[str, str]:
        """Name and definition of the vectors' HNSW index."""
        [(name, definition)] = self.sql(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'chunks_g1' AND indexdef LIKE '%USING hnsw%'"
        )
        return name, definition

    def processes(self) -> dict[str, int]:
        """Name → pid of each worker and server, the model among them."""
        told = self.penstock("status")
        named = {worker["name"]: worker["pid"] for worker in told["workers"] if worker["pid"]}
        named |= {name: service["pid"] for name, service in told["services"].items() if service["pid"]}
        model = [child.pid for child in psutil.Process().children() if "bench.zero_cost" in child.cmdline()]
        return named | dict(zip(["model"], model, strict=True))


def write(path: Path, text: str) -> None:
    path.write_text(text)


def lap(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return round(time.perf_counter() - began, 2)


def edit(path: Path) -> None:
    """One word in the middle."""
    whole = path.read_text()
    word = re.compile(r"\b[a-z]{4,}\b").search(whole, len(whole) // 2)
    assert word is not None
    write(path, whole[: word.start()] + "spillway" + whole[word.end() :])


def measure(run: Run, documents: int, *, with_graph: bool) -> dict[str, Any]:
    run.library.mkdir(parents=True)
    for n in range(documents):
        write(run.library / f"{n:05}.md", text(n, CHUNKS * WORDS_A_CHUNK))
    result: dict[str, Any] = {}
    name, definition = run.graph()
    if not with_graph:
        run.sql(f'DROP INDEX "{name}"')
    processes = run.processes()
    before = processors.seconds(processes)
    with processors.watched(processes) as memory:
        first = run.ingest()
        result["first_load_s"], result["chunks"] = first["seconds"], first["chunks"]
        result["first_load_chunks_per_s"] = round(first["chunks"] / first["seconds"], 1)
        result["first_load_processor_s"] = processors.spent(before, processors.seconds(processes))
        changes(run, result, documents, None if with_graph else definition)
    peak = {name: max(filter(None, values), default=None) for name, values in memory.mib.items()}
    return result | {"memory_peak_mib": peak, "memory": {"s": memory.at, "mib": memory.mib}}


def changes(run: Run, result: dict[str, Any], documents: int, graph: str | None) -> None:
    """What follows the first load. graph: the definition of the index that was left out."""
    if graph:
        result["graph_s"] = lap(lambda: run.sql(graph))
    unchanged = run.ingest()
    result |= {"unchanged_s": unchanged["seconds"], "unchanged_whole_s": unchanged["whole_s"],
               "unchanged_published": unchanged["published"]}  # fmt: skip
    some = sorted(run.library.glob("*.md"))[::SHARE]
    for path in some:
        edit(path)
    edited = run.ingest()
    result |= {"edit_s": edited["seconds"], "edit_whole_s": edited["whole_s"],
               "edit_reembedded_per_document": round(edited["embedded"] / len(some), 2)}  # fmt: skip
    for path in some:
        path.unlink()
    result["delete_s"] = run.ingest()["seconds"]
    long = run.library / "long.md"
    write(long, text(documents, LONG_CHUNKS * WORDS_A_CHUNK))
    result["long_chunks"] = run.ingest()["embedded"]
    write(long, "A paragraph that was not there before.\n\n" + long.read_text())
    result["insert_paragraph_reembedded"] = run.ingest()["embedded"]


def main() -> None:
    parser = argparse.ArgumentParser(description="From a folder into both stores, timed.")
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument("--with-graph", action="store_true", help="load under the live HNSW index")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    folder = home() / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    with zero_cost() as address:
        run = Run(folder, address)
        subprocess.run([str(Path(sys.executable).with_name("penstock")), "up"], env=run.environment, check=True)
        try:
            result = measure(run, given.documents, with_graph=given.with_graph)
        finally:
            subprocess.run([str(Path(sys.executable).with_name("penstock")), "down"], env=run.environment, check=True)
            shutil.rmtree(folder, ignore_errors=True)
    table = Table(title=f"{given.documents} documents", show_header=False)
    for key, value in result.items():
        if key == "memory":
            continue
        table.add_row(key, str(value))
    console.print(table)
    machine = {"cpus": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30),
               "load": os.getloadavg()[0], "at": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
    given.json.write_text(json.dumps({"documents": given.documents, "with_graph": given.with_graph, "machine": machine,
                                   **result}, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
