"""How fast the query service answers, how it sheds load, and how many of the nearest it finds under narrow access.

    python -m bench.query_load [--chunks 50000] [--dimensions 384] [--seconds 5] [--json FILE]

A library of its own on the running local stack (``penstock up``): documents go through the real detect and the real
keyword sink; vectors are copied and the HNSW index is built afterwards. The service is a process of its own behind
HTTP, with API keys, its result cache off and rate limits lifted; the places for work and the waiting room are the
defaults. Clients wait for each answer before they ask again (a closed loop), and no question is asked twice.

Questions are embedded by ``bench.load_corpus.WordVectors``: a model's own time comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import structlog
from pgvector import HalfVector

from bench.load_corpus import Corpus, WordVectors
from bench.load_runs import SHARES, key, load, percentile, tag, told
from deploy.local.stack import Stack
from pipeline.core.model import ChunkParams
from pipeline.ledger import work
from pipeline.ledger.entry import cut
from pipeline.settings import home
from pipeline.settings import load as load_settings
from pipeline.stores.postgres import create_graph
from query.access import readable
from query.embedder import QueryEmbedder
from query.settings import load as load_query
from query.vectors import Asked, Tuning, choose, nearest
from tests.library import Library, document

TENANT = "acme"
TEAMS = 200
"""Besides, each document belongs to one: so many access sets, as a company has, and not four."""
CHUNKS_A_DOCUMENT, TARGET_WORDS, WORDS_A_CHUNK = 25, 100, 54
"""The last: what a chunk of that target has of its own; the rest repeats the one before (measured)."""
RECALL_QUESTIONS, GRAPH_QUESTIONS = 100, 20
"""The second for the graph alone, which under narrow access walks nearly all of itself."""
DEPTH = 114
"""What a search asks the graph for (query/retrieval.py: candidates and spare ones)."""
RESULTS = Path(__file__).parent / "results" / "query_load.json"


# The library


async def fill(library: Library, corpus: Corpus, vectors: WordVectors, chunks: int) -> dict[str, float]:
    """Seconds that each part took."""
    took: dict[str, float] = {}
    began = perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        took[name] = round(perf_counter() - began, 1)
        began = perf_counter()
        print(f"  {name}: {took[name]} s", file=sys.stderr)

    documents = max(max(SHARES.values()), chunks // CHUNKS_A_DOCUMENT)
    words = chunks * WORDS_A_CHUNK // documents
    ids = []
    for start in range(0, documents, 32):
        events = [
            document(
                f"{n}.md", corpus.text(n, words), tenant=TENANT, title=f"{corpus.words[2_000 + n % 15_000]} {n}",
                acl_tags=[f"team-{n % TEAMS}", *(tag(s) for s, of in SHARES.items() if n % of == 0)],
            )
            for n in range(start, min(start + 32, documents))
        ]  # fmt: skip
        ids += await library.accept(*events)
    lap("detect")
    for start in range(0, len(ids), 256):
        await library.keywords.converge(library.generation, ids[start : start + 256])
    lap("keywords")
    await copy_vectors(library, vectors, ids)
    lap("vectors")
    async with library.pool.connection() as connection:
        await connection.execute("SET statement_timeout = 0; SET maintenance_work_mem = '512MB'")
        await create_graph(connection, library.generation)
    lap("graph")
    for statement in ("ANALYZE", f"VACUUM {library.generation.chunk_table}"):
        async with library.pool.connection() as connection:
            await connection.set_autocommit(True)
            await connection.execute(statement.encode())
            await connection.set_autocommit(False)
    lap("analyze")
    return took


async def copy_vectors(library: Library, vectors: WordVectors, ids: Sequence[Any]) -> None:
    generation = library.generation
    async with library.pool.connection() as connection:
        await connection.execute(f"DROP INDEX {generation.chunk_table}_hnsw".encode())
        for start in range(0, len(ids), 256):
            some = await work.load(connection, generation.name, "vectors", ids[start : start + 256])
            texts = await work.bodies(connection, some)
            rows = [
                (id_, w.identity.id, w.access_id, text, HalfVector(vectors.vector(text)))
                for w in some if w.manifest is not None
                for id_, text in (
                    (i, cut(texts[w.identity.id][0], spans))
                    for i, spans in zip(w.manifest.chunk_ids, w.manifest.spans, strict=True)
                )
            ]  # fmt: skip
            statement = f"COPY {generation.chunk_table} (id, document_id, access_id, text, embedding) FROM STDIN"
            async with connection.cursor().copy(f"{statement} (FORMAT BINARY)".encode()) as copy:
                copy.set_types(["uuid", "uuid", "int8", "text", generation.vector_type])
                for row in rows:
                    await copy.write_row(row)
        await connection.execute("UPDATE index_state SET seq = want_seq, settled_at = now() WHERE store = 'vectors'")


# Recall


async def recall(library: Library, corpus: Corpus, vectors: WordVectors) -> dict[str, dict[str, Any]]:
    """Of the ten nearest that may be read, how many a search's own scan finds, and how many the graph alone would."""
    found: dict[str, dict[str, Any]] = {}
    tuning = Tuning()
    for share in SHARES:
        caller = await library.caller(TENANT, tag(share))
        hits: dict[str, list[float]] = {"chosen": [], "graph": []}
        took: dict[str, list[float]] = {"chosen": [], "exact": []}
        scans: Counter[str] = Counter()
        async with library.pool.connection() as connection:
            asked = Asked(library.generation, caller, await readable(connection, caller))
            of = {"limit": DEPTH, "tuning": tuning}
            for n, question in zip(range(RECALL_QUESTIONS), corpus.questions(7), strict=False):
                vector = vectors.vector(question)

                async def ten(
                    scan: Any, vector: Any = vector, asked: Asked = asked, of: Any = of
                ) -> tuple[set[Any], str]:
                    rows, used = await nearest(connection, asked, vector, scan, timeout_seconds=30, **of)
                    return {row.chunk_id for row in rows[:10]}, used

                start = perf_counter()
                exact, _ = await ten("exact")
                took["exact"].append(perf_counter() - start)
                start = perf_counter()
                chosen, used = await ten(await choose(connection, asked, **of))
                took["chosen"].append(perf_counter() - start)
                scans[used] += 1
                of_all = max(1, len(exact))  # of a narrow access there may be fewer than ten
                hits["chosen"].append(len(exact & chosen) / of_all)
                if n < GRAPH_QUESTIONS:
                    hits["graph"].append(len(exact & (await ten("graph"))[0]) / of_all)
        found[share] = {
            "recall@10": round(float(np.mean(hits["chosen"])), 4),
            "worst": round(min(hits["chosen"]), 2),
            "graph_recall@10": round(float(np.mean(hits["graph"])), 4),
            "scans": dict(scans),
            "p50_ms": percentile(took["chosen"], 50),
            "exact_p50_ms": percentile(took["exact"], 50),
        }
    return found


# The service


@asynccontextmanager
async def served(
    library: Library, folder: Path, dimensions: int, *, feedback: bool
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The service as a process of its own; yields its address and the process."""
    library.write_home(folder)
    keys = [
        f'["{tag(share)}"]\nsha256 = "{hashlib.sha256(key(share).encode()).hexdigest()}"\ntenant = "{TENANT}"\n'
        f'tags = ["wiki/{tag(share)}"]\n'
        for share in SHARES
    ]
    (folder / "keys.toml").write_text("\n".join(keys))
    environment = {
        **os.environ, "PENSTOCK_HOME": str(folder), "PENSTOCK_SERVE_PORT": "0",
        "PENSTOCK_AUTH_KEYS_FILE": str(folder / "keys.toml"), "PENSTOCK_SERVE_REQUESTS_PER_MINUTE": "1000000000",
        "PENSTOCK_SERVE_CONCURRENT_PER_CALLER": "1000000", "PENSTOCK_QUERY_CACHED_QUERIES": "0",
        "PENSTOCK_QUERY_FEEDBACK": str(feedback).lower(),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.query_load", "--serve", "--dimensions", str(dimensions),
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        if not address:
            raise SystemExit("the service did not start: what it says stands above")
        yield address, psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serve(dimensions: int) -> None:
    from query.http.serve import serving

    vectors = WordVectors(dimensions, Corpus())
    async with serving(load_settings(), load_query(), embedder=QueryEmbedder(lambda: vectors)) as (address, _):
        print(address, flush=True)
        await asyncio.Event().wait()


async def main(chunks: int, dimensions: int, seconds: float, written: Path) -> None:
    corpus = Corpus()
    vectors = WordVectors(dimensions, corpus)
    params = ChunkParams(target=TARGET_WORDS, min_tokens=40, max_tokens=128)
    before = os.getloadavg()[0]
    async with Library.create(Stack(home()), vectors, params=params) as library:
        took = await fill(library, corpus, vectors, chunks)
        [(rows, documents, sets)] = await library.execute(
            f"SELECT (SELECT count(*) FROM {library.generation.chunk_table}), (SELECT count(*) FROM documents),"
            " (SELECT count(*) FROM access_sets)"
        )
        found = await recall(library, corpus, vectors)
        print(json.dumps(found, ensure_ascii=False), file=sys.stderr)
        runs = []
        for feedback in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                async with served(library, Path(folder), dimensions, feedback=feedback) as (address, service):
                    runs += await load(address, service, corpus, seconds, feedback=feedback)
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "chunks": rows, "documents": documents,
        "access_sets": sets, "dimensions": dimensions, "cpus": os.cpu_count(),
        "load_average": {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)},
        "seconds_to_load": took, "recall": found, "load": [run.row() for run in runs],
    }  # fmt: skip
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(told(report))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.dimensions))
    else:
        asyncio.run(main(given.chunks, given.dimensions, given.seconds, given.json))
