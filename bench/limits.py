"""Measures what a first load could take at best: each of its parts alone, and the whole for comparison.

    python -m bench.limits [--documents 1000] [--json FILE]      # → bench/results/limits.json

A library is loaded through the whole pipeline, as bench.ingest does, and its graph built. Then the same documents go
through each part by itself, one after another: published to Kafka, cut, embedded (bench.zero_cost), copied into a chunk
table, sent to an Elasticsearch index in bulk, a graph built over the rows. What the parts take together is what a
program would take that loses nothing between them and uses one processor at a time where they do; the ratio says how
far the pipeline is from that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from elasticsearch import AsyncElasticsearch
from elasticsearch.helpers import async_scan
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection
from rich.console import Console
from rich.table import Table
from structlog import configure, make_filtering_bound_logger

from bench.embedding_client import client
from bench.ingest import CHUNKS
from bench.prose import WORDS_A_CHUNK, text
from bench.running import Running, machine, running
from pipeline.core.chunking import chunk
from pipeline.core.model import Generation
from pipeline.embedding.tokens import byte_pairs
from pipeline.ledger import generations
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import create_chunk_table

RESULTS = Path(__file__).parent / "results" / "limits.json"
TOPIC, TABLE, INDEX = "limits", "chunks_limits", "chunks-limits"
BATCH = 512
COLUMNS, TYPES = "id, document_id, access_id, text, embedding", ["uuid", "uuid", "int8", "text", "halfvec"]


class Parts:
    """Times each part of a load."""

    def __init__(self, run: Running, texts: list[str]) -> None:
        self.run = run
        self.texts = texts
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 2)

    async def all(self) -> None:
        async with await AsyncConnection.connect(self.run.endpoint("postgres", "dsn"), autocommit=True) as connection:
            await register_vector_async(connection)
            generation = await generations.active(connection)
            await self.publish()
            await self.embed(self.cut(generation))
            await self.copy(connection, replace(generation, chunk_table=TABLE))
        await self.bulk(generation)

    async def publish(self) -> None:
        bootstrap = self.run.endpoint("kafka", "bootstrap")
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic(TOPIC, num_partitions=8, replication_factor=1)])
        await admin.close()
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", compression_type="zstd") as producer:
            with self.timed("kafka"):
                sent = [await producer.send(TOPIC, text.encode(), key=text[:40].encode()) for text in self.texts]
                await asyncio.gather(*sent)

    def cut(self, generation: Generation) -> list[str]:
        count = byte_pairs().count
        chunk(self.texts[0], "text/markdown", params=generation.params, count_tokens=count)  # loads the tokenizer
        with self.timed("chunking"):
            return [
                piece.text
                for whole in self.texts
                for piece in chunk(whole, "text/markdown", params=generation.params, count_tokens=count)
            ]

    async def embed(self, chunks: list[str]) -> None:
        address = self.run.environment["PENSTOCK_EMBEDDING_BASE_URL"].removesuffix("/v1")
        async with client(address, BATCH, 4) as embedder:
            with self.timed("embedding"):
                await asyncio.gather(
                    *(embedder.embed_documents(chunks[n : n + BATCH]) for n in range(0, len(chunks), BATCH))
                )

    async def copy(self, connection: AsyncConnection, generation: Generation) -> None:
        """Copy the chunks into a table with all its indexes except the graph, as in a load; then build the graph."""
        await create_chunk_table(connection, generation)
        cursor = await connection.execute(f"SELECT {COLUMNS} FROM chunks_g1".encode(), binary=True)
        rows = await cursor.fetchall()
        with self.timed("pgvector"):
            into = f"COPY {TABLE} ({COLUMNS}) FROM STDIN (FORMAT BINARY)"
            async with connection.cursor() as writing, writing.copy(into.encode()) as copy:
                copy.set_types(TYPES)
                for row in rows:
                    await copy.write_row(row)
        with self.timed("graph"):
            await create_graph(connection, generation)

    async def bulk(self, generation: Generation) -> None:
        es = AsyncElasticsearch(self.run.endpoint("elasticsearch", "url"))
        scanned = async_scan(es, index=generation.keyword_index, size=1_000)
        entries = [(hit["_id"], hit["_source"]) async for hit in scanned]
        await create_index(es, INDEX)
        requests = [
            [
                json.dumps(line).encode()
                for id_, entry in entries[n : n + BATCH]
                for line in ({"index": {"_index": INDEX, "_id": id_, "version": 1, "version_type": "external"}}, entry)
            ]
            for n in range(0, len(entries), BATCH)
        ]
        with self.timed("elasticsearch"):
            for lines in requests:
                answer = await es.bulk(operations=lines)  # type: ignore[arg-type]  # bytes go as they are
                assert not answer["errors"]
            await es.indices.refresh(index=INDEX)
        await es.close()


def measure(run: Running, documents: int) -> dict[str, Any]:
    texts = [text(n, CHUNKS * WORDS_A_CHUNK) for n in range(documents)]
    for n, whole in enumerate(texts):
        (run.library / f"{n:05}.md").write_text(whole)
    first = run.ingest()
    graph = run.settle_graph()
    parts = Parts(run, texts)
    asyncio.run(parts.all())
    together = round(sum(parts.seconds.values()), 2)
    whole = round(first["seconds"] + graph, 2)
    return {
        "documents": documents,
        "chunks": first["chunks"],
        "parts_s": parts.seconds,
        "parts_together_s": together,
        "first_load_s": first["seconds"],
        "graph_s": graph,
        "whole_s": whole,
        "ratio": round(whole / together, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A first load compared with each of its parts alone.")
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    configure(wrapper_class=make_filtering_bound_logger(logging.ERROR))
    with running("limits", {"PENSTOCK_EMBEDDING_CHUNK_TOKENS": "400"}) as run:
        result = measure(run, options.documents)
    table = Table(title=f"{result['documents']} documents, {result['chunks']} chunks", show_header=False)
    for name, seconds in result["parts_s"].items():
        table.add_row(f"{name} alone", f"{seconds:.2f} s")
    table.add_row("the parts together", f"{result['parts_together_s']:.2f} s")
    table.add_row("the pipeline, its graph included", f"{result['whole_s']:.2f} s, {result['ratio']} times that")
    Console(highlight=False).print(table)
    options.json.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
