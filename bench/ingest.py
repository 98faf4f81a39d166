"""Measures loading a folder into both stores: first load, nothing changed, edits, deletes, a paragraph at the top of a
long document.

python -m bench.ingest [--documents 1000] [--json FILE]      # → bench/results/ingest.json

The whole pipeline with Kafka in between, as ``penstock up`` starts it, in a state folder of its own; each step is the
command that a person types (``penstock ingest --wait --json``). Seconds are those that it reports, from after its
modules are loaded; ``…_whole_s`` is the whole process, 0.3 s more. The model is bench.zero_cost, 1536 dimensions, so
that the pipeline is measured; texts are bench.prose's, chunks of about 400 tokens. The vectors' HNSW index is built
after the first load (docs/adr/0030), and that is timed separately. The first load's processor seconds are reported by
process."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console
from rich.table import Table

from bench import processors
from bench.prose import WORDS_A_CHUNK, text
from bench.running import PENSTOCK, Running, machine, started

RESULTS = Path(__file__).parent / "results" / "ingest.json"
CHUNKS = 9
"""Chunks of a document, about."""
LONG_CHUNKS = 500
"""Chunks of the long document, about."""
SHARE = 100
"""One document in so many is edited, and one deleted."""

console = Console(highlight=False)


class Run(Running):
    """A running system whose chunks have the peers' size."""

    def __init__(self, folder: Path, embedding: str) -> None:
        super().__init__(folder, embedding)
        self.environment["PENSTOCK_EMBEDDING_CHUNK_TOKENS"] = "400"

    def ingest(self) -> Mapping[str, Any]:
        """Run ``penstock ingest``. Return its report, and ``whole_s``: the seconds of the whole process."""
        began = time.perf_counter()
        report = self.penstock("ingest", str(self.library), "--acl", "staff", "--wait")
        return {**report, "whole_s": round(time.perf_counter() - began, 2)}

    def watch(self, output: IO[str]) -> subprocess.Popen[bytes]:
        """Start ``penstock watch`` on the library. The caller ends it."""
        argv = [PENSTOCK, "watch", str(self.library), "--acl", "staff"]
        return subprocess.Popen(argv, env=self.environment, stdout=output, stderr=output)

    def workers_and_servers(self) -> dict[str, int]:
        """Return the pid of each worker and server by name."""
        status = self.penstock("status")
        named = {worker["name"]: worker["pid"] for worker in status["workers"] if worker["pid"]}
        return named | {name: service["pid"] for name, service in status["services"].items() if service["pid"]}

    def processes(self) -> dict[str, int]:
        """Return the pid of each worker and server by name, including the model's."""
        model = [child.pid for child in psutil.Process().children() if "bench.zero_cost" in child.cmdline()]
        return self.workers_and_servers() | dict(zip(["model"], model, strict=True))


def write(path: Path, text: str) -> None:
    path.write_text(text)


def edit(path: Path, new_word: str = "spillway") -> None:
    """Change one word in the middle."""
    whole = path.read_text()
    word = re.compile(r"\b[a-z]{4,}\b").search(whole, len(whole) // 2)
    assert word is not None
    write(path, whole[: word.start()] + new_word + whole[word.end() :])


def measure(run: Run, documents: int) -> dict[str, Any]:
    for n in range(documents):
        write(run.library / f"{n:05}.md", text(n, CHUNKS * WORDS_A_CHUNK))
    result: dict[str, Any] = {}
    processes = run.processes()
    before = processors.seconds(processes)
    with processors.watched(processes) as memory:
        first = run.ingest()
        result["first_load_s"], result["chunks"] = first["seconds"], first["chunks"]
        result["first_load_chunks_per_s"] = round(first["chunks"] / first["seconds"], 1)
        result["first_load_processor_s"] = processors.spent(before, processors.seconds(processes))
        result["graph_s"] = run.settle_graph()
        changes(run, result, documents)
    peak = {name: max(filter(None, values), default=None) for name, values in memory.mib.items()}
    return result | {"memory_peak_mib": peak, "memory": {"s": memory.at, "mib": memory.mib}}


def changes(run: Run, result: dict[str, Any], documents: int) -> None:
    """Measure the changes after the first load."""
    unchanged = run.ingest()
    result |= {
        "unchanged_s": unchanged["seconds"],
        "unchanged_whole_s": unchanged["whole_s"],
        "unchanged_published": unchanged["published"],
    }
    some = sorted(run.library.glob("*.md"))[::SHARE]
    for path in some:
        edit(path)
    edited = run.ingest()
    result |= {
        "edit_s": edited["seconds"],
        "edit_whole_s": edited["whole_s"],
        "edit_reembedded_per_document": round(edited["embedded"] / len(some), 2),
    }
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
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    with started("bench", Run) as run:
        result = measure(run, options.documents)
    table = Table(title=f"{options.documents} documents", show_header=False)
    for key, value in result.items():
        if key == "memory":
            continue
        table.add_row(key, str(value))
    console.print(table)
    options.json.write_text(
        json.dumps({"documents": options.documents, "machine": machine(), **result}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
