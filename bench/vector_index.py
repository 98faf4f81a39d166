"""Measures vectors that Elasticsearch searches: how many of the nearest a search returns, how fast, and their size.

    python -m bench.vector_index [--chunks 12000] [--dimensions 384] [--json FILE]

A library of its own on the running local stack (``penstock up --no-workers``; bench/load_library.py), whose keyword
entries carry the vectors. Recall@10 is that of the index against an exact scan in Postgres, by share of readable
documents, as the entries were loaded and after their segments were merged into one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TENANT, filled
from bench.load_runs import SHARES, tag
from bench.machine import moment
from bench.query_load import recalled
from query.retrieval.vectors import Tuning
from tests.support.query.library import Library

QUESTIONS = 50
INDEX_ALONE = Tuning(always_exact_rows=0)
RESULTS = Path(__file__).parent / "results" / "vector_index.json"


async def sizes(library: Library) -> dict[str, Any]:
    """Return the bytes of each vector in the index: whole, quantised, and its neighbours in the graph."""
    index = library.generation.keyword_index
    await library.es.options(request_timeout=600).indices.forcemerge(index=index, max_num_segments=1)
    stats = (await library.es.indices.stats(index=index, metric="dense_vector,docs"))["_all"]["primaries"]
    vectors, off_heap = stats["dense_vector"]["value_count"], stats["dense_vector"]["off_heap"]
    return {
        "vectors": vectors,
        "whole_bytes": round(off_heap["total_vec_size_bytes"] / vectors),
        "quantised_bytes": round(off_heap["total_veb_size_bytes"] / vectors),
        "graph_bytes": round(off_heap["total_vex_size_bytes"] / vectors),
    }


async def main(chunks: int, dimensions: int, written: Path) -> None:
    corpus = Corpus()
    vectors = WordVectors(dimensions, corpus)
    report: dict[str, Any] = {**moment(), "cpus": os.cpu_count(), "dimensions": dimensions, "recall": {}}
    with tempfile.TemporaryDirectory() as folder:
        async with filled(corpus, vectors, chunks, Path(folder), index="elasticsearch") as library:
            report["load"] = json.loads((Path(folder) / "took.json").read_text())
            for merged in (False, True):
                if merged:
                    report |= await sizes(library)
                for share in SHARES:
                    caller = await library.caller(TENANT, tag(share))
                    measured = await recalled(library, corpus, vectors, caller, questions=QUESTIONS, tuning=INDEX_ALONE)
                    report["recall"][f"{share} readable, {'one segment' if merged else 'as loaded'}"] = measured
                    print(f"{share:>6} readable: {measured}", flush=True)
                    written.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=12_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    asyncio.run(main(options.chunks, options.dimensions, options.json))
