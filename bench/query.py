"""Measures one person's searches: how long each takes, whether the nearest are found, and what more chunks cost.

    python -m bench.query [--quick] [--library FOLDER] [--json FILE]

10,000, 30,000 and 100,000 chunks of 1,536 dimensions (--quick: 2,000 alone), a library of its own for each, on the
running local stack; --library: one that ``python -m bench.load_library --dimensions 1536`` holds, and no other. Of
each: hybrid searches over HTTP, both looks, uncached, one client; and recall@10 against an exact scan, for
who may read all, a tenth, a hundredth and a thousandth of the documents. Of the largest also several clients who may
read all: how many searches a second are answered while p95 stays below 100 ms. bench/query_load.py presses harder.

Postgres should hold the graph in memory: 1 GB of shared_buffers, which the local stack has unless
PENSTOCK_POSTGRES_SHARED_BUFFERS_MB says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import filled, opened
from bench.load_runs import SHARES, Run, press
from bench.load_service import served
from bench.machine import description
from bench.query_load import recall

DIMENSIONS = 1_536
SIZES = (10_000, 30_000, 100_000)
WIDEST = [*SHARES][-1]
WARM_SECONDS = 3.0
"""Warm-up before each run. The widest access comes last, after some thousand requests."""
CROWDS = (1, 2, 3, 4)
"""Concurrent clients: with more, not every search has relevance feedback (PENSTOCK_QUERY_FEEDBACK_AT_ONCE)."""
CROWDED_P95_MS = 100.0
RESULTS = Path(__file__).parent / "results" / "query.json"


async def measure(chunks: int, seconds: float, held: Path | None, *, crowds: bool) -> dict[str, Any]:
    """Measure one library. chunks: size of the library to make, if none is held. crowds: also with several clients."""
    corpus = Corpus()
    vectors = WordVectors(DIMENSIONS, corpus)
    async with AsyncExitStack() as closing:
        if held is None:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            library = await closing.enter_async_context(filled(corpus, vectors, chunks, folder))
        else:
            folder, library = held, await closing.enter_async_context(opened(vectors, held))
        [(rows,)] = await library.execute(f"SELECT count(*) FROM {library.generation.chunk_table}")
        [(buffers,)] = await library.execute("SHOW shared_buffers")
        both = await searched(folder, corpus, [Run(share, 1) for share in SHARES], seconds)
        first = await searched(folder, corpus, [Run(WIDEST, 1, feedback=False)], seconds)
        many = await searched(folder, corpus, [Run(WIDEST, n) for n in CROWDS], seconds / 2) if crowds else []
        return {
            "chunks": rows,
            "shared_buffers": buffers,
            "searches": {row["access"]: row for row in both},
            "first_look_alone": {row["access"]: row for row in first},
            "crowds": crowded(many) if crowds else None,
            "recall": await recall(library, corpus, vectors),
        }


async def searched(folder: Path, corpus: Corpus, runs: Sequence[Run], seconds: float) -> list[dict[str, Any]]:
    """Return the measurements of each run, one after another. The first run decides about relevance feedback."""
    async with served(folder, DIMENSIONS, {"PENSTOCK_QUERY_FEEDBACK": str(runs[0].feedback).lower()}) as (
        address,
        service,
    ):
        for run in runs:
            async with aiohttp.ClientSession(address) as session:
                questions = corpus.questions(21)
                await press(session, service, Run(run.share, run.concurrency, run.feedback), questions, WARM_SECONDS)
                await press(session, service, run, questions, seconds)
    return [run.row() for run in runs]


def crowded(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs with several clients, and the most searches per second that were fast enough."""
    fast = [row["per_second"] for row in rows if row["p95_ms"] is not None and row["p95_ms"] < CROWDED_P95_MS]
    best = max(fast, default=0.0)
    return {"clients": rows, "per_second": best, "per_second_a_processor": round(best / (os.cpu_count() or 1), 1)}


async def main(sizes: Sequence[int], seconds: float, held: Path | None, written: Path) -> None:
    report: dict[str, Any] = {"machine": description(), "dimensions": DIMENSIONS, "sizes": []}
    for chunks in sizes:
        measured = await measure(chunks, seconds, held, crowds=chunks == sizes[-1])
        report["sizes"].append(measured)
        report["query_p50_ms"] = measured["searches"][WIDEST]["p50_ms"]
        report["query_p95_ms"] = measured["searches"][WIDEST]["p95_ms"]
        report["first_look_alone_p95_ms"] = measured["first_look_alone"][WIDEST]["p95_ms"]
        report["recall_at_10"] = {share: recalled["recall@10"] for share, recalled in measured["recall"].items()}
        report["machine"]["load_after"] = round(os.getloadavg()[0], 1)
        written.parent.mkdir(exist_ok=True)
        written.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        for share, row in measured["searches"].items():
            print(
                f"{measured['chunks']:>7} chunks, {share:>6} readable: p50 {row['p50_ms']} ms, p95 {row['p95_ms']} ms,"
                f" the service's processor {row['service_cpu_ms_per_request']} ms;"
                f" recall@10 {report['recall_at_10'][share]:.3f}",
                flush=True,
            )
        if seen := measured["crowds"]:
            print(
                f"{measured['chunks']:>7} chunks, p95 below {CROWDED_P95_MS:g} ms: {seen['per_second']} searches/s,"
                f" {seen['per_second_a_processor']} a processor"
            )
        print(
            f"{measured['chunks']:>7} chunks, the first look alone: p95 {report['first_look_alone_p95_ms']} ms",
            flush=True,
        )


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 chunks, few searches")
    parser.add_argument("--library", type=Path, help="folder of a library that another process holds")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = (0,) if options.library else (2_000,) if options.quick else SIZES
    asyncio.run(main(sizes, 3.0 if options.quick else 20.0, options.library, options.json))
