"""Measures how long it takes until both stores return each of thousands of chunks that change at once.

    python -m bench.burst [--chunks 20000] [--json]

A running system (bench.running). The first load is ``penstock ingest`` of a folder; then every file gets other words
and the folder is ingested again. A document's time counts from the start of that command (so reading, hashing and
publishing all of it are in it) to the ledger's settled_at of the slower store, and each chunk has its document's.
Searches run all the time: they show how long one takes while thousands of rows wait outside of the graph.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.load_corpus import Corpus
from bench.running import Running, machine, percentile, running, spread

WORDS, CHUNKS = 1_850, 19
"""Size of a document."""
SEARCH_INTERVAL_SECONDS = 0.25


class Searches:
    """Runs vector searches one after another, and counts the rows that wait outside of the graph."""

    def __init__(self, run: Running, corpus: Corpus) -> None:
        self._run, self._corpus = run, corpus
        self._stop = threading.Event()
        self.milliseconds: list[float] = []
        self.failed = 0
        self.outside: list[int] = []
        self._thread = threading.Thread(target=self._search)

    def __enter__(self) -> Searches:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _search(self) -> None:
        questions = self._corpus.questions(3)
        url, headers = self._run.endpoint("serve", "url"), self._run.bearer()
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
            while not self._stop.wait(SEARCH_INTERVAL_SECONDS):
                began = time.perf_counter()
                answer = client.post("/v1/search", json={"query": next(questions), "mode": "vector"})
                self.milliseconds.append(1_000 * (time.perf_counter() - began))
                self.failed += answer.status_code != 200
                self.outside.append(self._run.outside())


def write(run: Running, documents: int, seed: int) -> None:
    corpus = Corpus()
    for n in range(documents):
        (run.library / f"{n:05}.md").write_text(corpus.text(seed + n, WORDS))


def measure(run: Running, chunks: int) -> dict[str, Any]:
    documents = max(1, round(chunks / CHUNKS))
    write(run, documents, 0)
    first = run.ingest()
    graph = run.settle_graph()
    write(run, documents, documents)
    [(began,)] = run.sql("SELECT clock_timestamp()")
    with Searches(run, Corpus()) as searches:
        changed = run.ingest()
        at_once = list(searches.milliseconds)
    times: dict[str, list[float]] = {}
    for store in ("vectors", "keywords"):
        times[store] = [
            seconds
            for seconds, count in run.sql(
                "SELECT extract(epoch FROM s.settled_at - %s)::float, cardinality(m.chunk_ids) FROM index_state s"
                " JOIN manifests m USING (document_id, generation) WHERE s.store = %s ORDER BY document_id",
                began,
                store,
            )
            for _ in range(count)
        ]
    both = [max(pair) for pair in zip(times["vectors"], times["keywords"], strict=True)]
    return {
        "documents": documents,
        "chunks": changed["embedded"],
        "first_load_s": first["seconds"],
        "graph_after_first_load_s": graph,
        "burst_s": round(max(both), 2),
        "both": spread(both),
        "vectors": spread(times["vectors"]),
        "keywords": spread(times["keywords"]),
        "ingest_s": changed["seconds"],
        "most_outside": max(searches.outside, default=0),
        "search_ms": {
            "count": len(at_once),
            "p50": percentile(at_once, 0.5),
            "p95": percentile(at_once, 0.95),
            "failed": searches.failed,
        },
        "graph_after_burst_s": run.settle_graph(),
        "memory_mib": run.memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A burst of changed chunks, timed.")
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    with running("burst") as run:
        result = {"machine": machine(), **measure(run, options.chunks)}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"{result['chunks']} chunks changed at once", show_header=False)
    for key, value in result.items():
        table.add_row(key, str(value))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
