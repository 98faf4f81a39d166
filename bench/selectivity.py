"""Measures whether a search finds the nearest passages when a filter by metadata leaves few documents.

    python -m bench.selectivity [--chunks 52000] [--dimensions 384] [--json FILE]
    python -m bench.selectivity --table         # results file → the table of docs/performance.md

A library of its own on the running local stack (``penstock up --no-workers``; bench/load_library.py), for vectors
alone. Documents have two keys. ``spread``: values that a tenth, a hundredth … of the documents have, whatever these are
about. ``topic``: values of whole topics, so that the passages that match are near each other, and far from almost every
question, which is the hardest case for a graph. Each value is measured with access to all documents and to a tenth of
them, by recall@10 against an exact scan: of the scan that a search chooses, and of the graph alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import structlog

from bench.load_corpus import TOPICS, Corpus, WordVectors
from bench.load_library import TENANT, filled
from bench.load_runs import tag
from bench.machine import moment
from bench.query_load import recalled
from pipeline.core.metadata_keys import key_filter
from query.access.filters import NONE, Filters

SELECTED: Mapping[str, int] = {"0.1 %": 1_000, "1 %": 100, "10 %": 10, "50 %": 2}
"""By share of the documents: one of so many has the value."""
ACCESS = ("100 %", "10 %")
LABELS = {"spread": "spread over all topics", "topic": "of whole topics"}
KEYS = tuple(LABELS)
CHUNKS_A_DOCUMENT = 5
"""So few that a thousandth of the documents is ten of them, and a tenth of those one."""
QUESTIONS = 50
RESULTS = Path(__file__).parent / "results" / "selectivity.json"


def metadata(number: int) -> dict[str, Any]:
    """The metadata of a document. Whom access admits depends on the number itself, so that both are independent."""
    topic = number % TOPICS
    dice = crc32(f"document {number}".encode())
    return {
        "spread": [share for share, of in SELECTED.items() if dice % of == 0],
        # Of one topic not all documents have a value that less than a topic has.
        "topic": [s for s, of in SELECTED.items() if topic < TOPICS / of and (of <= TOPICS or dice % of < TOPICS)],
    }


async def main(chunks: int, dimensions: int, written: Path) -> None:
    corpus = Corpus()
    vectors = WordVectors(dimensions, corpus)
    report: dict[str, Any] = {**moment(), "cpus": os.cpu_count(), "dimensions": dimensions, "recall": []}
    with tempfile.TemporaryDirectory() as folder:
        async with filled(
            corpus,
            vectors,
            chunks,
            Path(folder),
            metadata=metadata,
            keywords=False,
            chunks_a_document=CHUNKS_A_DOCUMENT,
        ) as library:
            [(rows, documents)] = await library.execute(
                f"SELECT (SELECT count(*) FROM {library.generation.chunk_table}), (SELECT count(*) FROM documents)"
            )
            report |= {"chunks": rows, "documents": documents}
            values = [("", "100 %"), *((key, share) for key in KEYS for share in SELECTED)]
            for key, share in values:
                filters = Filters(keys=(key_filter(key, any=[share]),)) if key else NONE
                for access in ACCESS:
                    caller = await library.caller(TENANT, tag(access))
                    of = await recalled(library, corpus, vectors, caller, filters, questions=QUESTIONS)
                    report["recall"].append({"key": key, "selected": share, "access": access, **of})
                    print(f"{key:>7} {share:>6}, {access:>6} readable: {of}", flush=True)
                    written.write_text(json.dumps(report, indent=1) + "\n")


def table(report: Mapping[str, Any]) -> str:
    """Return the table of docs/performance.md: a line for each filter, with access to everything and to a tenth."""
    by_filter: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in report["recall"]:
        by_filter.setdefault((row["key"], row["selected"]), {})[row["access"]] = row
    lines = ["| filter | everything readable | | a tenth readable | |", "|---|---|---|---|---|"]
    lines.append("| | **recall@10**, worst | scan, p50 | **recall@10**, worst | scan, p50 |")
    for (key, selected), widths in by_filter.items():
        cells = []
        for access in ACCESS:
            row = widths[access]
            cells += [
                f"**{row['recall@10']:.3f}**, {row['worst']:.1f}",
                f"{' and '.join(sorted(row['scans']))}, {row['p50_ms']} ms",
            ]
        name = f"{selected}, {LABELS[key]}" if key else "none"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=52_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of a results file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.json.read_text())), end="")
        parser.exit()
    asyncio.run(main(options.chunks, options.dimensions, options.json))
