"""Measures the disk space of documents and chunks and the cost of a graph, from which `penstock plan` calculates.

    python -m bench.sizing            # on the running local stack; five minutes → bench/results/sizing.json

Vectors are random: no graph is harder to build. Their tables are made by what makes a generation's, in a schema that is
dropped at the end, and their indexes in Elasticsearch by what makes a generation's. Ledger and keyword index: a small
library of bench.load_corpus, by the real detect and sink.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import psutil
import psycopg
from elasticsearch import AsyncElasticsearch
from pgvector import HalfVector
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection, sql

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import CHUNKS_A_DOCUMENT, TARGET_WORDS, WORDS_A_CHUNK
from deploy.local.stack import Stack
from pipeline.core.model import ChunkParams, Generation
from pipeline.ledger.generation_tables import drop_table
from pipeline.runtime.settings import home, load
from pipeline.stages.entry_vectors import fields
from pipeline.stores.dense import nearest
from pipeline.stores.elasticsearch import connect, create_index
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import create_chunk_table
from pipeline.stores.vectors import sketches_of
from tests.support.query.library import Library, document

RESULTS = Path(__file__).parent / "results" / "sizing.json"
ROWS = {1_536: 4_000, 384: 8_000}
"""Rows by dimensions."""
ONE_BY_ONE = 500
"""Rows that are added to an existing graph, in one transaction."""
SEARCHES = 200
"""For the nearest vectors of one shard in Elasticsearch."""
DOCUMENTS = 400
CHARACTERS = 1_600
"""Length of a chunk: 400 tokens of four characters."""


def generation(dimensions: int) -> Generation:
    return Generation(
        name=f"s{dimensions}",
        model="random",
        revision="1",
        dimensions=dimensions,
        vector_type="halfvec",
        input_window=8_191,
        document_prefix="",
        query_prefix="",
        chunk_table=f"sized_{dimensions}",
        keyword_index="none",
        params=ChunkParams(target=400, min_tokens=160, max_tokens=600),
        state="building",
    )


async def tables(connection: AsyncConnection[Any], rows: Mapping[int, int]) -> dict[str, dict[str, float]]:
    """Measure a table of so many rows for each number of dimensions. Nothing that was made for them stays."""
    await connection.execute("CREATE SCHEMA sized")
    try:
        await connection.execute("SET search_path = sized, public")
        await connection.execute("SET statement_timeout = 0; SET maintenance_work_mem = '512MB'")
        await connection.execute("SET max_parallel_maintenance_workers = 0")
        return {str(n): await measure(connection, n, number) for n, number in rows.items()}
    finally:
        for of in map(generation, rows):
            await drop_table(connection, of.chunk_table)  # with its view, which is in another schema
            probes = sql.Identifier("public", f"standing_probes_{of.name}")
            await connection.execute(sql.SQL("DROP INDEX IF EXISTS {}").format(probes))
        await connection.execute("DROP SCHEMA sized CASCADE")


async def measure(connection: AsyncConnection[Any], dimensions: int, rows: int) -> dict[str, float]:
    of = generation(dimensions)
    random = np.random.default_rng(7)
    await create_chunk_table(connection, of)
    began = await busy(connection)
    await add(connection, of, random, rows)
    plain = await busy(connection) - began
    heap = await size(connection, f"pg_table_size('{of.chunk_table}')")
    small = await size(connection, f"pg_indexes_size('{of.chunk_table}')")
    began = await busy(connection)
    await create_graph(connection, of)
    built = await busy(connection) - began
    graph = await size(connection, f"pg_relation_size('{of.chunk_table}_hnsw')")
    await create_graph(connection, replace(of, quantisation="binary"), name="sized_bits")
    bits = await size(connection, "pg_relation_size('sized_bits')")
    await connection.execute("DROP INDEX sized_bits")
    keys = await size(connection, f"pg_relation_size('{of.chunk_table}_pkey')")
    began = await busy(connection)
    await add(connection, of, random, ONE_BY_ONE)
    added = await busy(connection) - began
    return {
        "rows": rows,
        "row_bytes": round((heap + small) / rows),
        "graph_bytes": round(graph / rows),
        "bit_graph_bytes": round(bits / rows),
        "key_bytes": round(keys / rows),
        "ms_per_row_alone": round(1000 * plain / rows, 2),
        "ms_per_row_built": round(1000 * built / rows, 2),
        "ms_per_row_added": round(1000 * added / ONE_BY_ONE, 2),
    }


async def entries(es: AsyncElasticsearch, dimensions: int, rows: int) -> dict[str, float]:
    """Measure the vectors of keyword entries: bytes of each, and the processor time that they add to an entry."""
    random = np.random.default_rng(7)
    names = {f"sized-{dimensions}-{uuid4().hex[:8]}": dimensions, f"sized-0-{uuid4().hex[:8]}": None}
    server, client = {}, {}
    try:
        for name, carried in names.items():
            await create_index(es, name, dimensions=carried, refresh_interval="-1")
            began = await node_seconds(es), time.process_time()
            for _ in range(0, rows, 200):
                operations: list[dict[str, Any]] = []
                for vector in random.standard_normal((200, dimensions)).astype(np.float32):
                    entry = {"text": text(random), "tenant": "t", "document_id": str(uuid4()), "acl_tags": ["all"]}
                    operations += [{"index": {"_id": str(uuid4())}}, entry | (fields(vector) if carried else {})]
                await es.bulk(index=name, operations=operations)
            client[name] = time.process_time() - began[1]
            await es.options(request_timeout=600).indices.forcemerge(index=name, max_num_segments=1)
            server[name] = await node_seconds(es) - began[0]
        of = replace(generation(dimensions), keyword_index=next(iter(names)), vectors="elasticsearch")
        await es.indices.refresh(index=of.keyword_index)
        began_searches = await node_seconds(es)
        for vector in random.standard_normal((SEARCHES, dimensions)).astype(np.float32):
            await nearest(es, of, vector, [{"term": {"tenant": "t"}}], limit=50)
        searched = await node_seconds(es) - began_searches
        stats = await es.indices.stats(index=list(names), metric="store,dense_vector")
    finally:
        for name in names:
            await es.indices.delete(index=name, ignore_unavailable=True)
            await es.indices.delete_index_template(name=name)
    with_vectors, without = names
    stored = {name: stats["indices"][name]["primaries"]["store"]["size_in_bytes"] for name in names}
    held = stats["indices"][with_vectors]["primaries"]["dense_vector"]["off_heap"]
    return {
        "rows": rows,
        "disk_bytes": round((stored[with_vectors] - stored[without]) / rows),
        "memory_bytes": round((held["total_veb_size_bytes"] + held["total_vex_size_bytes"]) / rows),
        "server_ms": round(1000 * (server[with_vectors] - server[without]) / rows, 2),
        "search_ms": round(1000 * searched / SEARCHES, 2),
        "client_ms": round(1000 * (client[with_vectors] - client[without]) / rows, 2),
    }


async def node_seconds(es: AsyncElasticsearch) -> float:
    """Return the processor seconds that Elasticsearch has used so far."""
    stats = await es.nodes.stats(metric="process")
    return sum(float(node["process"]["cpu"]["total_in_millis"]) / 1000 for node in stats["nodes"].values())


LEDGER = ("documents", "manifests", "index_state", "document_events", "access_sets")


async def library() -> dict[str, float]:
    """Measure the bytes of documents that were ingested once."""
    corpus = Corpus()
    params = ChunkParams(target=TARGET_WORDS, min_tokens=40, max_tokens=128)
    vectors = WordVectors(384, corpus)
    async with Library.create(Stack(home()), vectors, params=params) as own:
        ids = []
        for start in range(0, DOCUMENTS, 32):
            events = [
                document(f"{n}.md", corpus.text(n, CHUNKS_A_DOCUMENT * WORDS_A_CHUNK), title=f"{n}", acl_tags=["all"])
                for n in range(start, min(start + 32, DOCUMENTS))
            ]
            ids += await own.accept(*events)
        for start in range(0, len(ids), 256):
            await own.keywords.converge(own.generation, ids[start : start + 256])
        [(chunks,)] = await own.execute("SELECT sum(cardinality(chunk_ids)) FROM manifests")
        [(text_bytes, stored)] = await own.execute(
            "SELECT sum(octet_length(text)), sum(pg_column_size(text)) FROM document_bodies"
        )
        tables = ", ".join(f"'{table}'" for table in LEDGER)
        [(ledger,)] = await own.execute(
            f"SELECT sum(pg_total_relation_size(t::regclass)) FROM unnest(ARRAY[{tables}]) t"
        )
        index = own.generation.keyword_index
        await own.es.indices.forcemerge(index=index, max_num_segments=1)
        await own.es.indices.flush(index=index, force=True)
        stats = await own.es.indices.stats(index=index, metric="store")
        keyword = int(stats["_all"]["primaries"]["store"]["size_in_bytes"])
    return {
        "documents": DOCUMENTS,
        "chunks_per_document": round(int(chunks) / DOCUMENTS, 1),
        "text_bytes_per_chunk": round(int(text_bytes) / int(chunks)),
        "body_share": round(int(stored) / int(text_bytes), 3),
        "ledger_bytes_per_document": round(int(ledger) / DOCUMENTS),
        "keyword_share": round(keyword / int(text_bytes), 2),
    }


async def add(connection: AsyncConnection[Any], of: Generation, random: np.random.Generator, rows: int) -> None:
    async with connection.transaction(), connection.cursor() as cursor:
        for start in range(0, rows, 200):
            vectors = random.standard_normal((min(200, rows - start), of.dimensions)).astype(np.float16)
            await cursor.executemany(
                sql.SQL(
                    "INSERT INTO {} (id, document_id, access_id, text, embedding, sketch)"
                    " VALUES (%s, %s, 1, %s, %s, %s)"
                ).format(sql.Identifier(of.chunk_table)),
                [
                    (uuid4(), UUID(int=start), text(random), HalfVector(vector), sketch)
                    for vector, sketch in zip(vectors, sketches_of(of, vectors), strict=True)
                ],
            )


def text(random: np.random.Generator) -> str:
    """Return words that Postgres compresses about as well as real ones."""
    return " ".join(f"{word:x}" for word in random.zipf(1.3, CHARACTERS) % 100_000)[:CHARACTERS]


async def busy(connection: AsyncConnection[Any]) -> float:
    """Return the processor seconds of the server's process for this connection, whatever else the machine does."""
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    times = psutil.Process(int(row[0])).cpu_times()
    return float(times.user + times.system)


async def size(connection: AsyncConnection[Any], of: str) -> int:
    row = await (await connection.execute(f"SELECT {of}".encode())).fetchone()
    assert row is not None
    return int(row[0])


async def main() -> None:
    dsn = load().postgres.dsn.get_secret_value()
    began = os.getloadavg()[0]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await register_vector_async(connection)
        by_dimensions = await tables(connection, ROWS)
    es = connect(load().elasticsearch)
    try:
        by_entries = {str(n): await entries(es, n, rows) for n, rows in ROWS.items()}
    finally:
        await es.close()
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load_average": {"before": round(began, 1), "after": round(os.getloadavg()[0], 1)},
        "characters": CHARACTERS,
        "dimensions": by_dimensions,
        "elasticsearch": by_entries,
        "library": await library(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
