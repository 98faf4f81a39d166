"""Measures how fast the query service responds, how it sheds load, and its recall under narrow access.

    python -m bench.query_load [--chunks 50000] [--dimensions 384] [--seconds 5] [--library FOLDER] [--json FILE]

A library of its own on the running local stack (``penstock up``; bench/load_library.py), and the service as a process
of its own (bench/load_service.py). Clients wait for each answer before they ask again (a closed loop), and no question
is asked twice.

Questions are embedded by ``bench.load_corpus.WordVectors``: a model's own time comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID

import numpy as np
import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TENANT, filled, opened
from bench.load_runs import SHARES, load, percentile, summary, tag
from bench.load_service import served
from pipeline.embedding.port import Vectors
from query.access.callers import Caller, readable
from query.access.filters import NONE, Filters
from query.retrieval.search import CANDIDATES, SPARE
from query.retrieval.vectors import NeighbourQuery, Scan, Tuning, choose_scan, indexed, nearest, of_entries
from tests.support.query.library import Library

RECALL_QUESTIONS, GRAPH_QUESTIONS = 100, 20
"""GRAPH_QUESTIONS: for the graph alone, which under narrow access visits nearly all of its rows."""
DEPTH = CANDIDATES + SPARE
"""Candidates that a search requests from the graph."""
DEFAULT = Tuning()
RESULTS = Path(__file__).parent / "results" / "query_load.json"


# Recall


async def recall(library: Library, corpus: Corpus, vectors: WordVectors) -> dict[str, dict[str, Any]]:
    """Return the recall@10 of the readable nearest chunks by share (``recalled``)."""
    return {
        width: await recalled(library, corpus, vectors, await library.caller(TENANT, tag(width))) for width in SHARES
    }


async def recalled(
    library: Library,
    corpus: Corpus,
    vectors: WordVectors,
    caller: Caller,
    filters: Filters = NONE,
    *,
    questions: int = RECALL_QUESTIONS,
    depth: int = DEPTH,
    tuning: Tuning = DEFAULT,
) -> dict[str, Any]:
    """Return the recall@10 of the nearest chunks that this caller may read and that pass the filters: of a search's
    chosen scan, and of the graph alone. depth: the candidates that are requested."""
    hits: dict[str, list[float]] = {"chosen": [], "graph": []}
    took: dict[str, list[float]] = {"chosen": [], "exact": []}
    scans: Counter[str] = Counter()
    async with library.pool.connection() as connection:
        request = NeighbourQuery(library.generation, caller, await readable(connection, caller), filters)

        async def ten(scan: Scan, vector: Vectors) -> tuple[set[UUID], Scan]:
            if scan == "index":
                ids = await indexed(library.es, request, vector, limit=depth)
                rows = await of_entries(connection, library.generation, ids, vector, limit=depth)
                return {row.chunk_id for row in rows[:10]}, scan
            rows, used = await nearest(
                connection, request, vector, scan, timeout_seconds=30, limit=depth, tuning=tuning
            )
            return {row.chunk_id for row in rows[:10]}, used

        for n, question in zip(range(questions), corpus.questions(7), strict=False):
            vector = vectors.vector(question)
            start = perf_counter()
            exact, _ = await ten("exact", vector)
            took["exact"].append(perf_counter() - start)
            # A service caches the choice for some seconds.
            way = await choose_scan(connection, request, limit=depth, tuning=tuning)
            start = perf_counter()
            chosen, used = await ten(way, vector)
            took["chosen"].append(perf_counter() - start)
            scans[used] += 1
            hits["chosen"].append(share(exact, chosen))
            if n < GRAPH_QUESTIONS:
                graph: Scan = "graph" if library.generation.vectors == "pgvector" else "index"
                hits["graph"].append(share(exact, (await ten(graph, vector))[0]))
    return {
        "recall@10": round(float(np.mean(hits["chosen"])), 4),
        "worst": round(min(hits["chosen"]), 2),
        "graph_recall@10": round(float(np.mean(hits["graph"])), 4),
        "scans": dict(scans),
        "p50_ms": percentile(took["chosen"], 50),
        "exact_p50_ms": percentile(took["exact"], 50),
    }


def share(nearest_chunks: set[UUID], returned: set[UUID]) -> float:
    """The share of the nearest chunks that were returned; 1 where nothing may be returned, as it is."""
    return len(nearest_chunks & returned) / len(nearest_chunks) if nearest_chunks else float(not returned)


async def main(chunks: int, dimensions: int, seconds: float, held: Path | None, written: Path) -> None:
    corpus = Corpus()
    vectors = WordVectors(dimensions, corpus)
    before = os.getloadavg()[0]
    async with AsyncExitStack() as closing:
        if held is None:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            library = await closing.enter_async_context(filled(corpus, vectors, chunks, folder))
        else:
            folder, library = held, await closing.enter_async_context(opened(vectors, held))
        took = json.loads((folder / "took.json").read_text())
        [(rows, documents, sets)] = await library.execute(
            f"SELECT (SELECT count(*) FROM {library.generation.chunk_table}), (SELECT count(*) FROM documents),"
            " (SELECT count(*) FROM access_sets)"
        )
        report: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "chunks": rows,
            "documents": documents,
            "access_sets": sets,
            "dimensions": dimensions,
            "cpus": os.cpu_count(),
            "load_average": {"before": round(before, 1)},
            "seconds_to_load": took,
            "recall": {},
            "load": [],
        }

        def write() -> None:
            """Write the results so far, so that an interrupted run loses none."""
            report["load_average"]["after"] = round(os.getloadavg()[0], 1)
            written.parent.mkdir(exist_ok=True)
            written.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")

        for feedback in (True, False):
            settings = {"PENSTOCK_QUERY_FEEDBACK": str(feedback).lower()}
            async with served(folder, dimensions, settings) as (address, service):
                async for run in load(address, service, corpus, seconds, feedback=feedback):
                    report["load"].append(run.row())
                    write()
        report["recall"] = await recall(library, corpus, vectors)
        write()
    print(summary(report))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--library", type=Path, help="folder of one that python -m bench.load_library holds")
    options = parser.parse_args()
    asyncio.run(main(options.chunks, options.dimensions, options.seconds, options.library, options.json))
