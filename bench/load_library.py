"""Fills the library on which load is measured, and holds it for many runs.

    python -m bench.load_library FOLDER [--chunks 50000] [--dimensions 384]

makes a library on the running local stack, writes FOLDER so that it is a PENSTOCK_HOME that leads there, and drops the
library when it is told to end (Ctrl-C). Documents go through the real detect and the real keyword sink; vectors are
copied and the HNSW index is built afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_runs import SHARES, tag
from deploy.local.stack import Stack
from pipeline.core.model import ChunkParams, VectorIndex
from pipeline.ledger import generations, metadata_keys, work
from pipeline.ledger.entry import cut
from pipeline.runtime.settings import (
    ElasticsearchSettings,
    EmbeddingSettings,
    KafkaSettings,
    PostgresSettings,
    Settings,
    StreamSettings,
    home,
)
from pipeline.stores.elasticsearch import connect
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import open_pool, permit_long
from pipeline.stores.vectors import Row, insert
from query.evaluation.place import assembled
from tests.support.query.library import Library, document

TENANT = "acme"
TEAMS = 200
"""Each document also belongs to one of them, so that there are as many access sets as in a company."""
CHUNKS_A_DOCUMENT, TARGET_WORDS, WORDS_A_CHUNK = 25, 100, 54
"""WORDS_A_CHUNK: the words of a chunk that do not repeat the chunk before (measured)."""


async def fill(
    library: Library,
    corpus: Corpus,
    vectors: WordVectors,
    chunks: int,
    tenants: Sequence[str],
    *,
    metadata: Callable[[int], dict[str, Any]] = lambda number: {},
    keywords: bool = True,
    chunks_a_document: int = CHUNKS_A_DOCUMENT,
) -> dict[str, float]:
    """Fill the library; each tenant gets the same share of the documents. metadata: of a document, by its number; its
    keys are declared. keywords: whether the keyword index is filled, too. Returns the seconds of each part."""
    took: dict[str, float] = {}
    began = perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        took[name] = round(perf_counter() - began, 1)
        began = perf_counter()
        print(f"  {name}: {took[name]} s", file=sys.stderr)

    documents = max(max(SHARES.values()), chunks // chunks_a_document)
    words = chunks * WORDS_A_CHUNK // documents
    ids = []
    async with library.pool.connection() as connection:
        for name in metadata(0):
            for tenant in tenants:
                await metadata_keys.declare(connection, tenant, name, "keyword")
    for start in range(0, documents, 32):
        events = [
            document(
                f"{n}.md",
                corpus.text(n, words),
                tenant=tenants[n % len(tenants)],
                title=f"{corpus.words[2_000 + n % 15_000]} {n}",
                acl_tags=[f"team-{n % TEAMS}", *(tag(s) for s, of in SHARES.items() if n % of == 0)],
                metadata=metadata(n),
            )
            for n in range(start, min(start + 32, documents))
        ]
        ids += await library.accept(*events)
    lap("detect")
    await copy_vectors(library, vectors, ids)
    lap("vectors")
    for start in range(0, len(ids) if keywords else 0, 256):
        await library.keywords.converge(library.generation, ids[start : start + 256])
    lap("keywords")
    if library.generation.vectors == "pgvector":
        async with library.pool.connection() as connection:
            await permit_long(connection)
            await connection.execute("SET maintenance_work_mem = '512MB'")
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
        await connection.execute(f"DROP INDEX IF EXISTS {generation.chunk_table}_hnsw".encode())
        for start in range(0, len(ids), 256):
            some = await work.load(connection, generation.name, "vectors", ids[start : start + 256])
            texts = await work.bodies(connection, some)
            rows = [
                Row(id_, w.identity.id, w.identity.tenant, w.access_id, text, vectors.vector(text), in_graph=True)
                for w in some
                if w.manifest is not None
                for id_, text in (
                    (i, cut(texts[w.identity.id][0], spans))
                    for i, spans in zip(w.manifest.chunk_ids, w.manifest.spans, strict=True)
                )
            ]
            await insert(connection, generation, rows)
        await connection.execute("UPDATE index_state SET seq = want_seq, settled_at = now() WHERE store = 'vectors'")


@asynccontextmanager
async def filled(
    corpus: Corpus,
    vectors: WordVectors,
    chunks: int,
    folder: Path,
    tenants: Sequence[str] = (TENANT,),
    *,
    index: VectorIndex = "pgvector",
    **options: Any,
) -> AsyncIterator[Library]:
    """Make a library, and drop it at the end. folder: becomes a PENSTOCK_HOME that uses it. index: where its vectors
    are searched. options: of ``fill``."""
    params = ChunkParams(target=TARGET_WORDS, min_tokens=40, max_tokens=128)
    async with Library.create(Stack(home()), vectors, params=params, vectors=index) as library:
        library.write_home(folder)
        (folder / "took.json").write_text(json.dumps(await fill(library, corpus, vectors, chunks, tenants, **options)))
        yield library


@asynccontextmanager
async def opened(vectors: WordVectors, folder: Path) -> AsyncIterator[Library]:
    """Open a library that another process holds."""
    at = json.loads((folder / "endpoints.json").read_text())
    settings = Settings(
        kafka=KafkaSettings(),
        postgres=PostgresSettings(dsn=at["postgres"]["dsn"]),
        elasticsearch=ElasticsearchSettings(**at["elasticsearch"]),
        embedding=EmbeddingSettings(),
        stream=StreamSettings(),
    )
    es = connect(settings.elasticsearch)
    try:
        async with open_pool(settings.postgres) as pool:
            async with pool.connection() as connection:
                generation = await generations.active(connection)
            yield Library.over(assembled(settings, pool, es, generation, vectors), vectors)
    finally:
        await es.close()


async def hold(folder: Path, chunks: int, dimensions: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = Corpus()
    async with filled(corpus, WordVectors(dimensions, corpus), chunks, folder):
        print(f"held in {folder}; Ctrl-C drops it", flush=True)
        await stop.wait()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--dimensions", type=int, default=384)
    options = parser.parse_args()
    asyncio.run(hold(options.folder, options.chunks, options.dimensions))
