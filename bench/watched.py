"""Measures how soon an edited file of a watched folder is searchable.

    python -m bench.watched [--documents 1000] [--edits 60] [--json FILE]      # → bench/results/watched.json

A running system (bench.ingest) and ``penstock watch``. One file after the other is edited, a word each, with pauses of
PAUSE_SECONDS. An edit's time counts from the moment before the file is written until the ledger says that a store
returns it: each store alone, and both."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from bench.freshness import SETTLED
from bench.ingest import CHUNKS, Run, edit, write
from bench.prose import WORDS_A_CHUNK, text
from bench.running import machine, spread, started
from pipeline.core.identity import INGESTED

RESULTS = Path(__file__).parent / "results" / "watched.json"
PAUSE_SECONDS = (0.5, 1.5)
"""The shortest and the longest pause between two edits."""
POLL_SECONDS, LAST_SECONDS = 0.01, 30.0
WARM_EDITS = 5
"""Edits before those that count."""
console = Console(highlight=False)


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Run ``penstock watch`` on the library while the block runs."""
    with (run.folder / "watch.log").open("w") as output:
        process = run.watch(output)
    try:
        marker = run.library / "watched.md"
        with psycopg.connect(run.endpoint("postgres", "dsn"), autocommit=True) as connection:
            write(marker, "# Watched\n\nThe first change.\n")
            _settled(connection, marker, 0)
        yield
    finally:
        process.terminate()
        process.wait()


def measure(run: Run, documents: int, edits: int) -> dict[str, Any]:
    for n in range(documents):
        write(run.library / f"{n:05}.md", text(n, CHUNKS * WORDS_A_CHUNK))
    run.ingest()
    run.settle_graph()
    drawn = random.Random(1)
    times: dict[str, list[float]] = {"vectors": [], "keywords": [], "both": []}
    with watching(run), psycopg.connect(run.endpoint("postgres", "dsn"), autocommit=True) as connection:
        for number in range(WARM_EDITS + edits):
            path = run.library / f"{drawn.randrange(documents):05}.md"
            state = _state(connection, path)
            assert state is not None
            began = time.time()
            edit(path, f"spillway{number}")
            vectors, keywords = (at - began for at in _settled(connection, path, state[0]))
            if number >= WARM_EDITS:
                times["vectors"].append(vectors)
                times["keywords"].append(keywords)
                times["both"].append(max(vectors, keywords))
            time.sleep(drawn.uniform(*PAUSE_SECONDS))
    return {name: spread(values) for name, values in times.items()}


def _state(connection: psycopg.Connection[Any], path: Path) -> tuple[int, float, float] | None:
    """Return the version that both stores have, and when each of them had it."""
    row = connection.execute(SETTLED, ["default", INGESTED, [str(path.resolve())]]).fetchone()
    return None if row is None else row[1:]


def _settled(connection: psycopg.Connection[Any], path: Path, version: int) -> tuple[float, float]:
    """Wait until both stores have a newer version. Return when each of them had it."""
    deadline = time.monotonic() + LAST_SECONDS
    while time.monotonic() < deadline:
        state = _state(connection, path)
        if state is not None and state[0] > version:
            return state[1:]
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"{path.name} was not searchable {LAST_SECONDS:.0f} s after it had changed")


def main() -> None:
    parser = argparse.ArgumentParser(description="From an edit in a watched folder to both stores.")
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument("--edits", type=int, default=60)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    with started("bench-watched", Run) as run:
        result = measure(run, options.documents, options.edits)
    for name, row in result.items():
        console.print(f"{name}: p50 {row['p50']} s, p99 {row['p99']} s, longest {row['max']} s")
    options.json.write_text(
        json.dumps({"documents": options.documents, "machine": machine(), **result}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
