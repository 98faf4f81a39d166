"""Measures a library as it grows to a million chunks: the load, the graph, searches, recall, edits, an audit, a
migration, memory and disk.

    python -m bench.million [--dimensions 384|1536] [--sizes 10000 30000 100000 300000 1000000] [--json FILE]

One local stack with its workers in $PENSTOCK_HOME/bench-million, which grows from size to size: documents of one chunk
to twenty are published to Kafka's backfill topic and loaded by the real workers into the ledger and both stores. After
each size: how fast it was loaded and what each process spent, the steps of the graph, the bytes of everything, the
memory of each process, searches of one client and recall@10 for who may read all, a tenth, a hundredth and a thousandth
of the documents, edits at a steady pace, and `penstock audit`. After the last size, a generation of another model is
built and becomes the active one. Vectors are those of the words (bench.load_corpus), from bench.zero_cost.

It needs no attention: it checks disk and memory first, writes the results after each part, goes on after a part that
fails, and stops and removes everything at its end (also on SIGTERM). An aborted run keeps what it has measured, and
says so in its results; it cannot be continued. ``python -m bench.million_curves`` makes tables and pictures of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

import aiohttp
import httpx
import numpy as np
import psutil
import psycopg
import structlog
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from bench import ingest, processors
from bench.freshness import LAST_SECONDS, PAGE, POLL_SECONDS, Load, alongside
from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TEAMS, TENANT, opened
from bench.load_runs import SHARES, press, tag
from bench.load_runs import Run as Searches
from bench.load_service import served
from bench.machine import description
from bench.query_load import DEFAULT, DEPTH, share
from bench.running import FOR_LONG, PENSTOCK, spread, started
from pipeline.core.graph import usual_quantisation
from pipeline.embedding.port import Vectors
from pipeline.kafka.client import producer
from pipeline.ledger.generation_tables import graph_build_bytes
from pipeline.maintenance import plan
from pipeline.runtime.settings import KafkaSettings, home
from query.access.callers import readable
from query.retrieval.vectors import NeighbourQuery, Tuning, choose_scan, nearest
from tests.support.query.library import Library
from topics.registry import DOCUMENTS_BACKFILL

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
WORDS = (60, 200, 700, 1_850)
"""Words of a document."""
CHUNKS_A_DOCUMENT = 7.4
"""Measured, for documents of WORDS."""
CHARACTERS = 760
"""The length of a chunk, about."""
SOURCE = "wiki"
EDITED = 2_000
"""Documents that are edited, at most."""
EDITS_A_SECOND, EDIT_SECONDS = 50.0, 120.0
SEARCH_SECONDS, WARM_SECONDS = 15.0, 4.0
QUESTIONS = 100
"""Questions for which recall is measured."""
WIDEST = [*SHARES][-1]
EF_SEARCH = (300, 600, 1_000)
"""Further sizes of a walk's candidate list with which recall is measured for who may read all."""
BLOCK_ROWS = 10_000
SAMPLE_SECONDS = 10.0
MEMORY_SECONDS = 60.0
"""The kernel walks through all pages of each process, which takes seconds where thirty of Postgres share 6 GB."""
STALLED_SECONDS = 900.0
"""A load that gets nowhere for that long has failed."""
GRAPH_SECONDS = 4 * 3_600.0
QUIET_SECONDS = 300.0
"""How long a step waits for vacuum and merges after a load, at most."""
NEXT_MODEL = "word-vectors-2"
RESULTS = Path(__file__).parent / "results"

GB = 10**9
ELASTICSEARCH_HEAP_MB = 1_024
OTHER_PROCESSES_MB = 3_500
"""Kafka, the workers, the model and this program: measured at 384 and 1,536 dimensions."""


# Space


@dataclass(frozen=True, slots=True)
class Needs:
    """The space that a library takes, calculated before anything is started."""

    disk_gb: float
    shared_buffers_mb: int
    """Postgres's, with room for the whole graph."""
    build_mb: int
    """Memory in which the graph is built."""
    memory_gb: float


def needs(chunks: int, dimensions: int, *, migration: bool) -> Needs:
    """Return what a library of that size needs, with the model of ``penstock plan``. migration: with a second
    generation beside the first."""
    text, documents = chunks * CHARACTERS, chunks / CHUNKS_A_DOCUMENT
    quantisation = usual_quantisation(dimensions)
    graph = chunks * plan.graph_bytes(dimensions, quantisation)
    rows = chunks * plan.row_bytes(CHARACTERS, dimensions)
    ledger = documents * plan.LEDGER_DOCUMENT_BYTES + chunks * plan.LEDGER_CHUNK_BYTES + text * plan.BODY_SHARE
    keywords = 2 * text * plan.KEYWORD_SHARE  # a merge writes a segment anew before it removes the old ones
    log = 3 * text + 3 * GB  # topics with headers and hints; Postgres's write-ahead log
    copies = 2 if migration else 1
    shared = max(1_024, round(1.5 * graph / 2**20))
    build = max(512, graph_build_bytes(chunks, dimensions, quantisation) >> 20)
    memory = (shared + build + 2 * ELASTICSEARCH_HEAP_MB + OTHER_PROCESSES_MB) * 2**20
    return Needs(
        disk_gb=round((copies * (rows + graph + ledger + keywords) + log) / GB, 1),
        shared_buffers_mb=shared,
        build_mb=build,
        memory_gb=round(memory / GB, 1),
    )


def require(needed: Needs, folder: Path) -> None:
    """Raise SystemExit if this machine has less than that."""
    folder.mkdir(parents=True, exist_ok=True)
    disk, memory = shutil.disk_usage(folder).free / GB, psutil.virtual_memory().available / GB
    say(
        f"needs {needed.disk_gb} GB of disk ({disk:.1f} are free) and {needed.memory_gb} GB of memory ({memory:.1f} are"
        f" available): shared_buffers {needed.shared_buffers_mb} MB, {needed.build_mb} MB to build the graph"
    )
    if disk < needed.disk_gb or memory < needed.memory_gb:
        raise SystemExit("that is more than this machine has: smaller --sizes, fewer --dimensions or --no-migration")


# The system


class System(ingest.Run):
    """A running system with word vectors, and with memory for its size."""

    def __init__(self, folder: Path, embedding: str, *, dimensions: int, needed: Needs) -> None:
        super().__init__(folder, embedding)
        self.embedding = embedding
        self.environment |= {
            **FOR_LONG,
            "PENSTOCK_EMBEDDING_MODEL": WordVectors.model,
            "PENSTOCK_EMBEDDING_DIMENSIONS": str(dimensions),
            "PENSTOCK_HEAP_ELASTICSEARCH_MB": str(ELASTICSEARCH_HEAP_MB),
            "PENSTOCK_POSTGRES_SHARED_BUFFERS_MB": str(needed.shared_buffers_mb),
            # A graph is built in a quarter of it at most.
            "PENSTOCK_POSTGRES_EFFECTIVE_CACHE_MB": str(4 * max(1_024, needed.build_mb)),
        }

    def table(self) -> str:
        """Return the name of the active generation's chunk table."""
        return str(self.sql("SELECT 'chunks_' || name FROM generations WHERE state = 'active'")[0][0])

    def logged(self, worker: str) -> int:
        """Return the length of a worker's log."""
        path = self.folder / "logs" / f"worker-{worker}.log"
        return path.stat().st_size if path.exists() else 0

    def events(self, worker: str, event: str, offset: int) -> list[dict[str, Any]]:
        """Return the events of that name in a worker's log, from the offset on."""
        path = self.folder / "logs" / f"worker-{worker}.log"
        if not path.exists():
            return []
        with path.open("rb") as log:
            log.seek(offset)
            lines = [line for line in log if event.encode() in line]
        return [seen for line in lines if (seen := _json(line)).get("event") == event]


def _json(line: bytes) -> dict[str, Any]:
    try:
        seen = json.loads(line)
    except ValueError:
        return {}
    return seen if isinstance(seen, dict) else {}


class Growing(Load):
    """The library's documents: some are edited, and each belongs to a team and may be read by shares of the callers."""

    def tags(self, name: str) -> list[str]:
        number = int(name.removesuffix(".md"))
        return [f"team-{number % TEAMS}", *(tag(width) for width, of in SHARES.items() if number % of == 0)]


def text_of(corpus: Corpus, number: int) -> str:
    """Return a document. Its topic and its length do not follow from its number, as access does."""
    drawn = crc32(b"document %d" % number)
    topics = len(corpus.topics)
    return corpus.text(number * topics + drawn % topics, WORDS[drawn // topics % len(WORDS)])


def documents_of(chunks: int) -> int:
    return round(chunks / CHUNKS_A_DOCUMENT)


# Parts of a step


@dataclass
class Spent:
    """The cost of a part, filled in at its end."""

    seconds: float = 0.0
    processor_s: dict[str, float] | None = None
    memory_mib: dict[str, dict[str, int]] | None = None
    """The most of each process: all, and anonymous and shared memory alone, without mapped files."""


@asynccontextmanager
async def measured(processes: Mapping[str, int]) -> AsyncIterator[Spent]:
    """Measure time, processor seconds and memory of processes while the block runs."""
    spent, began, own, before = Spent(), time.monotonic(), time.process_time(), processors.seconds(processes)
    most: dict[str, dict[str, int]] = {}

    async def watch() -> None:
        while True:
            for name, sample in (await asyncio.to_thread(_memory, processes)).items():
                known = most.setdefault(name, sample)
                most[name] = {kind: max(value, known[kind]) for kind, value in sample.items()}
            await asyncio.sleep(MEMORY_SECONDS)

    async with alongside(watch()):
        yield spent
    spent.seconds = round(time.monotonic() - began, 1)
    took = processors.spent(before, processors.seconds(processes))
    spent.processor_s = took | {"this program": round(time.process_time() - own, 2)}
    spent.memory_mib = most


def _memory(processes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {name: sample for name, pid in processes.items() if (sample := processors.proportional(pid)) is not None}


async def load(system: System, growing: Growing, first: int, documents: int, processes: Mapping[str, int]) -> Any:
    """Load further documents, and wait until both stores have them."""
    texts = system.folder / "texts.jsonl"
    say(f"writing {documents - first} texts")
    await asyncio.to_thread(_write_texts, texts, growing.corpus, first, documents)
    log_offset, rows = system.logged("vectors"), _rows(system)
    say(f"loading documents {first} to {documents}")
    progress: list[tuple[float, int, int, int]] = []
    began = time.monotonic()
    async with measured(processes) as spent:
        publishing = asyncio.create_task(_publish(growing, texts, first))
        moved = began
        while True:
            poll_began = time.monotonic()
            state = await asyncio.to_thread(_progress, system)
            done = state[0] >= documents and not state[1] and not state[2]
            if not progress or state != progress[-1][1:]:
                moved = poll_began
            if done or not progress or poll_began - began - progress[-1][0] >= SAMPLE_SECONDS:
                progress.append((round(poll_began - began, 1), *state))
            if publishing.done():
                publishing.result()
            if done and publishing.done():
                break
            if poll_began - moved > STALLED_SECONDS:
                publishing.cancel()
                raise SystemExit(f"nothing was loaded for {STALLED_SECONDS:.0f} s: {progress[-1]}")
            await asyncio.sleep(max(0.5, 20 * (time.monotonic() - poll_began)))
    texts.unlink()
    chunks = _rows(system) - rows
    return {
        "documents": documents - first,
        "chunks": chunks,
        "chunks_per_s": round(chunks / spent.seconds, 1),
        **asdict(spent),
        "progress": progress,
        "graph_steps": _graph_steps(system, log_offset),
    }


def _write_texts(file: Path, corpus: Corpus, first: int, documents: int) -> None:
    with file.open("w") as texts:
        for number in range(first, documents):
            texts.write(json.dumps(text_of(corpus, number)) + "\n")


async def _publish(growing: Growing, texts: Path, first: int) -> None:
    page: list[tuple[str, str]] = []
    with texts.open() as lines:
        for number, line in enumerate(lines, start=first):
            page.append((f"{number}.md", json.loads(line)))
            if len(page) == PAGE:
                await growing.publish(page, DOCUMENTS_BACKFILL)
                page = []
    if page:
        await growing.publish(page, DOCUMENTS_BACKFILL)


def _progress(system: System) -> tuple[int, int, int]:
    """Return the documents in the ledger, and how many are pending in the vectors and in the keywords."""
    [(documents, vectors, keywords)] = system.sql(
        "SELECT (SELECT count(*) FROM documents WHERE tenant = %s AND source = %s),"
        " count(*) FILTER (WHERE store = 'vectors'), count(*) FILTER (WHERE store = 'keywords')"
        " FROM index_state WHERE seq < want_seq",
        TENANT,
        SOURCE,
    )
    return int(documents), int(vectors), int(keywords)


def _rows(system: System) -> int:
    return int(system.sql(f"SELECT count(*) FROM {system.table()}")[0][0])


def _graph_steps(system: System, offset: int) -> list[dict[str, Any]]:
    """Return what the vectors worker did with graphs since that length of its log."""
    return [
        {"step": seen["step"], "seconds": seen["seconds"], "at": seen.get("timestamp")}
        for seen in system.events("vectors", "graph_step_finished", offset)
    ]


async def graph(system: System, processes: Mapping[str, int]) -> Any:
    """Wait until every row is in the graph, and then until vacuum and merges are done."""
    offset = system.logged("vectors")
    async with measured(processes) as spent, asyncio.timeout(GRAPH_SECONDS):
        while not await asyncio.to_thread(system.is_graph_settled):  # noqa: ASYNC110  nothing ends a thread
            await asyncio.sleep(0.5)
    async with measured(processes) as after:
        began = time.monotonic()
        while time.monotonic() - began < QUIET_SECONDS and await asyncio.to_thread(_is_working, system):  # noqa: ASYNC110
            await asyncio.sleep(2)
    return {
        **asdict(spent),
        "graph_steps": _graph_steps(system, offset),
        "until_quiet": asdict(after),
    }


def _is_working(system: System) -> bool:
    """Whether vacuum or a merge of segments runs."""
    [(vacuums,)] = system.sql("SELECT count(*) FROM pg_stat_progress_vacuum")
    return bool(vacuums or _elasticsearch(system, "/_stats/merge")["_all"]["total"]["merges"]["current"])


def _elasticsearch(system: System, path: str) -> Any:
    return httpx.get(system.endpoint("elasticsearch", "url") + path, timeout=60, trust_env=False).json()


def sizes(system: System) -> dict[str, Any]:
    """Return the bytes of each part of the system."""
    table = system.table()
    [(heap, toast, database)] = system.sql(
        "SELECT pg_relation_size(c.oid), pg_total_relation_size(c.reltoastrelid), pg_database_size(current_database())"
        " FROM pg_class c WHERE c.oid = to_regclass(%s)",
        table,
    )
    indexes = dict(
        system.sql(
            "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index"
            " WHERE indrelid = to_regclass(%s)",
            table,
        )
    )
    tables = dict(
        system.sql(
            "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r' AND relnamespace ="
            " 'public'::regnamespace ORDER BY 2 DESC LIMIT 12"
        )
    )
    stats = _elasticsearch(system, "/_stats/store,docs,segments")["_all"]["primaries"]
    data = system.folder / "data"
    return {
        "postgres": {
            "chunks": {"heap": heap, "toast": toast, "indexes": indexes},
            "tables": tables,
            "database": database,
            "folder": _bytes(data / "postgres"),
            "log": _bytes(data / "postgres" / "pg_wal"),
        },
        "elasticsearch": {
            "store": stats["store"]["size_in_bytes"],
            "segments": stats["segments"]["count"],
            "deleted": stats["docs"]["deleted"],
            "entries": stats["docs"]["count"],
        },
        "kafka": {"folder": _bytes(data / "kafka")},
        "folder": _bytes(system.folder),
    }


def _bytes(folder: Path) -> int:
    """Return the bytes on disk of a folder."""
    done = subprocess.run(["du", "-sk", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return 1_024 * int(done.stdout.split()[0])


async def searches(system: System, corpus: Corpus, processes: Mapping[str, int], dimensions: int, s: float) -> Any:
    """Search as one client for each width of access, in a service of its own. Return times and processor times, and
    what the service itself says of its recall."""
    rows: dict[str, Any] = {}
    more = {name: value for name, value in system.environment.items() if name.startswith("PENSTOCK_")}
    more["PENSTOCK_QUERY_COSINE_FLOOR"] = "-1"  # every question gets results, and so costs a whole search
    [(model,)] = system.sql("SELECT model FROM generations WHERE state = 'active'")
    async with served(system.folder, dimensions, more, model=model) as (address, service):
        for width in SHARES:
            questions, run = corpus.questions(21), Searches(width, 1)
            async with aiohttp.ClientSession(address) as session:
                await press(session, service, Searches(width, 1), questions, WARM_SECONDS)
                before = processors.seconds(processes)
                await press(session, service, run, questions, s)
                took = processors.spent(before, processors.seconds(processes))
            rows[width] = run.row() | {"processor_s": took}
            say(f"search, {width} readable: p50 {rows[width]['p50_ms']} ms, p95 {rows[width]['p95_ms']} ms")
        async with aiohttp.ClientSession(address) as session, session.get("/metrics") as answer:
            checks = await answer.text()
    return {"widths": rows, "self_check": self_check(checks)}


def self_check(exposition: str) -> dict[str, float | None]:
    """Return how many searches the service compared with exact scans, how many it could not, and the recall."""
    values = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    count = values.get(("penstock_query_recall_ratio_count", None), 0.0)
    total = values.get(("penstock_query_recall_ratio_sum", None), 0.0)
    return {
        "compared": count,
        "unfinished": values.get(("penstock_query_recall_checks_total", "unfinished"), 0.0),
        "recall": round(total / count, 4) if count else None,
    }


async def recall(system: System, corpus: Corpus, vectors: WordVectors) -> Any:
    """Return the recall@10 of the scan that a search chooses, for each width of access. The nearest are determined
    exactly, by one pass over all vectors outside of Postgres."""
    questions = [vectors.vector(text) for _, text in zip(range(QUESTIONS), corpus.questions(7), strict=False)]
    async with opened(vectors, system.folder) as library:
        callers = {width: await library.caller(TENANT, tag(width)) for width in SHARES}
        async with library.pool.connection() as connection:
            may = {width: await readable(connection, caller) for width, caller in callers.items()}
        exact = await asyncio.to_thread(
            true_nearest,
            system.endpoint("postgres", "dsn"),
            system.table(),
            np.array(questions, dtype=np.float32),
            {width: of.access_ids for width, of in may.items()},
            vector_type=library.generation.vector_type,
        )
        requests = {width: NeighbourQuery(library.generation, callers[width], may[width]) for width in callers}
        results = {width: await _recalled(library, of, questions, exact[width]) for width, of in requests.items()}
        for ef_search in EF_SEARCH:
            walked = await _recalled(
                library, requests[WIDEST], questions, exact[WIDEST], replace(DEFAULT, ef_search=ef_search)
            )
            results[WIDEST].setdefault("by_ef_search", {})[ef_search] = [walked["recall@10"], walked["p50_ms"]]
        return results


async def _recalled(
    library: Library,
    request: NeighbourQuery,
    questions: Sequence[Vectors],
    exact: Sequence[set[UUID]],
    tuning: Tuning = DEFAULT,
) -> dict[str, Any]:
    hits, took, scans = [], [], set()
    async with library.pool.connection() as connection:
        for vector, truth in zip(questions, exact, strict=True):
            scan = await choose_scan(connection, request, limit=DEPTH, tuning=tuning)
            began = time.perf_counter()
            rows, used = await nearest(
                connection, request, vector, scan, timeout_seconds=60, limit=DEPTH, tuning=tuning
            )
            took.append(time.perf_counter() - began)
            scans.add(used)
            hits.append(share(truth, {row.chunk_id for row in rows[:10]}))
            await connection.rollback()
    return {
        "recall@10": round(float(np.mean(hits)), 4),
        "worst": round(min(hits), 2),
        "scans": sorted(scans),
        "p50_ms": round(1_000 * float(np.median(took)), 1),
    }


def true_nearest(
    dsn: str,
    table: str,
    questions: NDArray[np.float32],
    access: Mapping[str, Collection[int]],
    *,
    vector_type: str,
    nearest_rows: int = 10,
) -> dict[str, list[set[UUID]]]:
    """Return for each width and question the chunks that are nearest of all that may be read. access: by width, the
    access sets."""
    widths = {width: np.array(sorted(ids), dtype=np.int64) for width, ids in access.items()}
    best: dict[str, tuple[NDArray[np.float32], NDArray[np.bytes_]]] = {
        width: (np.empty((len(questions), 0), dtype=np.float32), np.empty((len(questions), 0), dtype="V16"))
        for width in widths
    }
    for ids, access_ids, embeddings in _blocks(dsn, table, questions.shape[1], vector_type):
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        scores = questions @ embeddings.T
        for width, sets in widths.items():
            mine = np.flatnonzero(np.isin(access_ids, sets))
            known, chunks = best[width]
            both = np.hstack((known, scores[:, mine]))
            names = np.hstack((chunks, np.broadcast_to(ids[mine], (len(questions), len(mine)))))
            order = np.argsort(-both, axis=1, kind="stable")[:, :nearest_rows]
            best[width] = (np.take_along_axis(both, order, 1), np.take_along_axis(names, order, 1))
    return {
        width: [{UUID(bytes=chunk.tobytes()) for chunk in row} for row in chunks] for width, (_, chunks) in best.items()
    }


def _blocks(
    dsn: str, table: str, dimensions: int, vector_type: str
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.float32]]]:
    """Yield the ids, access sets and vectors of all rows, in blocks. Every row of a binary COPY has the same length
    here, so numpy reads many at once."""
    row = np.dtype(
        [
            ("fields", ">i2"),
            ("id_length", ">i4"),
            ("id", "V16"),
            ("access_length", ">i4"),
            ("access", ">i8"),
            ("length", ">i4"),
            ("dimensions", ">i2"),
            ("unused", ">i2"),
            ("vector", ">f2" if vector_type == "halfvec" else ">f4", (dimensions,)),
        ]
    )
    header = 19

    def parsed(parts: list[bytes]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.float32]]:
        rows = np.frombuffer(b"".join(parts), dtype=row)
        return rows["id"], rows["access"].astype(np.int64), rows["vector"].astype(np.float32)

    statement = f"COPY (SELECT id, access_id, embedding FROM {table}) TO STDOUT (FORMAT BINARY)"
    with psycopg.connect(dsn) as connection, connection.cursor().copy(statement.encode()) as copy:
        parts: list[bytes] = []
        for n, data in enumerate(copy):
            piece = bytes(data)[0 if n else header :]
            if len(piece) >= row.itemsize:  # the end has two bytes
                parts.append(piece)
            if len(parts) == BLOCK_ROWS:
                yield parsed(parts)
                parts = []
        if parts:
            yield parsed(parts)


async def edits(growing: Growing, processes: Mapping[str, int], seconds: float, seed: int) -> Any:
    """Edit documents at a steady pace, and wait until both stores return all of it."""
    growing.waiting.clear()
    growing.fresh = {"both": [], "vectors": [], "keywords": []}
    growing.most_outside, growing.behind = 0, 0.0
    began = time.monotonic()
    async with measured(processes) as spent, alongside(growing.record_settled()):
        sent = await growing.edit(EDITS_A_SECOND, began + seconds, seed=seed)
        took = time.monotonic() - began
        while growing.waiting and time.monotonic() - began - took < LAST_SECONDS:  # noqa: ASYNC110  record_settled() ends it
            await asyncio.sleep(POLL_SECONDS)
    return {
        "edits": sent,
        "edits_per_s": round(sent / took, 1),
        "freshness": {of: spread(times) for of, times in growing.fresh.items()},
        "never_settled": sum(map(len, growing.waiting.values())),
        "publisher_behind_s": round(growing.behind, 2),
        "most_outside": growing.most_outside,
        **asdict(spent),
    }


async def audit(system: System, processes: Mapping[str, int]) -> Any:
    """Compare every chunk in the ledger and both stores."""
    async with measured(processes) as spent:
        code, said = await _penstock(system, "audit", "--json")
    report = json.loads(said)
    fields = ("documents", "chunks", "clean", "pending", "left", "sample", "seconds")
    return {"exit": code, **{name: report[name] for name in fields}, **asdict(spent)}


async def migration(system: System, processes: Mapping[str, int], dimensions: int) -> Any:
    """Build a generation of another model and make it the active one. Every chunk is embedded again."""
    least = shutil.disk_usage(system.folder).free
    before = _bytes(system.folder)

    async def watch_disk() -> None:
        nonlocal least
        while True:
            least = min(least, shutil.disk_usage(system.folder).free)
            await asyncio.sleep(SAMPLE_SECONDS)

    free = least
    changed = (
        *("--model", NEXT_MODEL, "--dimensions", str(dimensions), "--provider", "openai"),
        *("--base-url", f"{system.embedding}/v1", "--wait", "--yes", "--json"),
    )
    async with measured(processes) as building, alongside(watch_disk()):
        code, said = await _penstock(system, "generation", "build", *changed)
        if code:
            raise RuntimeError(f"`penstock generation build` ended with {code}: {said[-500:]}")
    async with measured(processes) as switching:
        code, switched = await _penstock(system, "generation", "cutover", "--no-evaluation", "--json")
        if code:
            raise RuntimeError(f"`penstock generation cutover` ended with {code}: {switched[-500:]}")
    return {
        "build": json.loads(said),
        **asdict(building),
        "cutover_s": switching.seconds,
        "most_disk": free - least,
        "disk_before": before,
        "disk_after": _bytes(system.folder),
    }


async def _penstock(system: System, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        PENSTOCK, *arguments, env=system.environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return int(process.returncode or 0), said.decode()


# The run


@dataclass
class Report:
    """The results, written to their file after each part."""

    file: Path
    content: dict[str, Any]
    began: float

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.content["minutes"] = round((time.monotonic() - self.began) / 60, 1)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")

    async def part(self, of: dict[str, Any], name: str, work: Callable[[], Awaitable[Any]]) -> bool:
        """Run a part and keep its result; a failure is kept as well. Returns whether it succeeded."""
        say(f"{name} …")
        began = time.monotonic()
        try:
            of[name] = await work()
        except (Exception, SystemExit) as error:  # noqa: BLE001  an hour of other parts must not be lost
            of[name] = {"failed": f"{type(error).__name__}: {error}"[:1_000]}
            say(f"{name} failed: {of[name]['failed']}")
        self.write()
        say(f"{name}: {time.monotonic() - began:.0f} s")
        return "failed" not in of[name]


def say(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)


async def grow(system: System, report: Report, options: argparse.Namespace) -> None:
    """Load size after size, and measure each. Ends early when loading fails or the time is over."""
    corpus, processes = Corpus(), system.processes()
    vectors = WordVectors(options.dimensions, corpus)
    kafka, until = KafkaSettings(bootstrap=system.endpoint("kafka", "bootstrap")), report.began + 60 * options.minutes
    async with producer(kafka) as sender:
        growing = Growing(system, sender, corpus, TENANT, SOURCE)
        loaded = 0
        for turn, size in enumerate(options.sizes, start=1):
            if time.monotonic() > until:
                report.content["stopped"] = f"after {options.minutes} minutes, before {size} chunks"
                return
            step: dict[str, Any] = {"size": size}
            report.content["steps"].append(step)
            documents = documents_of(size)
            if not await report.part(
                step, "load", partial(load, system, growing, loaded, documents, processes)
            ) or not await report.part(step, "graph", partial(graph, system, processes)):
                report.content["stopped"] = f"loading {size} chunks failed"
                return
            loaded = documents
            for number in range(len(growing.texts), min(EDITED, documents)):
                growing.texts.append(text_of(corpus, number))
            step["chunks"] = _rows(system)
            await report.part(step, "sizes", partial(asyncio.to_thread, sizes, system))
            await _read(system, report, step, corpus, vectors, processes, options)
            await report.part(step, "edits", partial(edits, growing, processes, options.edit_seconds, turn))
            await report.part(step, "audit", partial(audit, system, processes))
        if options.migration and time.monotonic() <= until:
            after: dict[str, Any] = {}
            report.content["migration"] = after
            if await report.part(after, "build", partial(migration, system, processes, options.dimensions)):
                await _read(system, report, after, corpus, vectors, processes, options)
    report.content["finished"] = True


async def _read(
    system: System,
    report: Report,
    of: dict[str, Any],
    corpus: Corpus,
    vectors: WordVectors,
    processes: Mapping[str, int],
    options: argparse.Namespace,
) -> None:
    seconds = options.search_seconds
    await report.part(of, "searches", partial(searches, system, corpus, processes, options.dimensions, seconds))
    await report.part(of, "recall", partial(recall, system, corpus, vectors))


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this program as Ctrl-C does: everything that it started is stopped. asyncio's handler of SIGINT
    cancels the running part; an exception raised wherever the program happens to be would leave its tasks behind."""

    def end(_number: int, _frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.million", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="CHUNKS", help="ascending")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/million_DIMENSIONS.json")
    parser.add_argument("--no-migration", dest="migration", action="store_false")
    parser.add_argument("--minutes", type=float, default=600.0, help="no step begins after so many minutes")
    parser.add_argument("--edit-seconds", type=float, default=EDIT_SECONDS)
    parser.add_argument("--search-seconds", type=float, default=SEARCH_SECONDS, help="for each width of access")
    options = parser.parse_args(argv)
    if options.sizes != sorted(set(options.sizes)) or options.sizes[0] < 1:
        parser.error("--sizes: ascending numbers of chunks")
    options.json = options.json or RESULTS / f"million_{options.dimensions}.json"
    return options


def main() -> int:
    options = arguments()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    needed = needs(options.sizes[-1], options.dimensions, migration=options.migration)
    require(needed, home())
    content = {
        "machine": description(),
        "dimensions": options.dimensions,
        "sizes": options.sizes,
        "needs": asdict(needed),
        "finished": False,
        "stopped": None,
        "steps": [],
    }
    report = Report(options.json, content, time.monotonic())
    report.write()
    make = partial(System, dimensions=options.dimensions, needed=needed)
    try:
        with ending_on_sigterm(), started("bench-million", make, words=options.dimensions) as system:
            asyncio.run(grow(system, report, options))
    except BaseException as error:
        content["stopped"] = content["stopped"] or f"{type(error).__name__}: {error}"[:1_000]
        raise
    finally:
        content["machine"]["load_after"] = round(os.getloadavg()[0], 1)
        report.write()
        say(f"results: {options.json}")
    return 0 if content["finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
