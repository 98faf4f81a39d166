"""Measures previews of an edit in a large index: ``python -m bench.preview [--chunks 100000] [--questions 100]``.

Fills a database and an index of its own on the running local stack: the topics of the Python documentation, chunked and
embedded as they would be, and copies of them until there are enough chunks. In a copy, a third of the longer words are
replaced by others of the same length, and its vectors are as far from the original's as the vectors of such texts are.
The golden questions are people's questions about the topics and the topics' headings, each with its topic as judged
document. Then single pages are edited, one sentence in each, and previewed.

The processor time is that of this process, Postgres and Elasticsearch together: what others do at that time does not
count, other than in the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import string
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from uuid import UUID

import numpy as np
import structlog
from pgvector import HalfVector

from bench.machine import description
from bench.python_docs import collection
from bench.scale import SOURCE, TENANT, keyword_entry, processor_seconds
from deploy.local.stack import Stack
from pipeline.core.identity import chunk_ids, content_hash, document_id
from pipeline.core.model import Manifest
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Vectors
from pipeline.ledger.entry import cut
from pipeline.runtime.settings import EmbeddingSettings, dist, home
from pipeline.stages.manifests import build_manifest
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import permit_long
from query.embedding.embedders import QueryEmbedder
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.preview.model import Edit, ProposedDocument
from query.preview.preview import Previews
from tests.support.query.library import Library

RESULTS = Path(__file__).parent / "results" / "preview.json"
TAG = f"{SOURCE}/staff"
TARGET_SECONDS = 30
REPLACED_SHARE = 1 / 3
COPY_COSINE = 0.8
"""Between the vector of a text and that of its copy."""
BULK_ENTRIES = 2_000
BATCH = 64
EDITS = 10


@dataclass(frozen=True, slots=True)
class Page:
    """A document with its chunks."""

    name: str
    title: str
    text: str
    manifest: Manifest
    vectors: Vectors

    @property
    def id(self) -> UUID:
        return document_id(TENANT, SOURCE, self.name)

    def texts(self) -> list[str]:
        return [cut(self.text, spans) for spans in self.manifest.spans]


async def originals(library: Library) -> list[Page]:
    """The topics, chunked and embedded as workers do it."""
    pages = []
    for name, text in collection().documents.items():
        if not name.startswith("topic."):
            continue
        title = name.removeprefix("topic.")
        manifest = build_manifest(
            document_id(TENANT, SOURCE, title),
            title,
            text,
            "text/plain",
            content_hash(text),
            library.generation,
            library.embedder.count_tokens,
        )
        texts = [cut(text, spans) for spans in manifest.spans]
        vectors = [
            (await library.embedder.embed_documents(texts[at : at + BATCH])).vectors
            for at in range(0, len(texts), BATCH)
        ]
        pages.append(Page(title, title, text, manifest, np.concatenate(vectors)))
    return pages


def copied(page: Page, number: int) -> Page:
    """A copy with other words of the same length, so that its chunks are at the same places."""
    dice = random.Random(f"{page.name} {number}")
    words: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        word = match[0]
        if word not in words:
            replaced = dice.random() < REPLACED_SHARE
            words[word] = "".join(dice.choices(string.ascii_lowercase, k=len(word))) if replaced else word
        return words[word]

    name, text = f"{page.name}-{number}", re.sub(r"[A-Za-z]{5,}", other, page.text)
    id_ = document_id(TENANT, SOURCE, name)
    texts = [cut(text, spans) for spans in page.manifest.spans]
    noise = np.random.default_rng(dice.getrandbits(32)).standard_normal(page.vectors.shape).astype(np.float32)
    noise -= (noise * page.vectors).sum(axis=1, keepdims=True) * page.vectors
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    manifest = Manifest(
        content_hash(text),
        chunk_ids(id_, texts),
        page.manifest.spans,
        page.manifest.token_counts,
        page.manifest.headings,
    )
    vectors = COPY_COSINE * page.vectors + np.sqrt(1 - COPY_COSINE**2) * noise
    return Page(name, f"{page.title} {number}", text, manifest, vectors)


def library_of(pages: Sequence[Page], chunks: int) -> Iterator[Page]:
    """Yield the pages and their copies, until there are so many chunks."""
    made = number = 0
    while made < chunks:
        for page in pages:
            yield page if number == 0 else copied(page, number)
            made += len(page.manifest.chunk_ids)
        number += 1


async def fill(library: Library, pages: Sequence[Page], chunks: int) -> int:
    """Fill the ledger and both stores. Returns the number of chunks."""
    generation, made = library.generation, 0
    async with library.pool.connection() as connection:
        await permit_long(connection)
        await connection.execute("SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0")
        await connection.execute("SET maintenance_work_mem = '1GB'; SET session_replication_role = replica")
        await connection.execute(f"DROP INDEX {generation.chunk_table}_hnsw".encode())
        await connection.execute(
            "INSERT INTO access_sets (id, tenant, digest, acl_tags, required_tags) OVERRIDING SYSTEM VALUE"
            " VALUES (1, %s, 'x', ARRAY[%s], '{}')",
            [TENANT, TAG],
        )
        operations: list[bytes] = []
        for number, page in enumerate(library_of(pages, chunks), 1):
            texts, m = page.texts(), page.manifest
            await connection.execute(
                "INSERT INTO documents (id, tenant, source, external_id, seq, announced_seq, version, observed_at,"
                " access_observed_at, access_id, content_hash, meta_hash, title, media_type)"
                " VALUES (%s, %s, %s, %s, %s, %s, 1, now(), now(), 1, %s, '', %s, 'text/plain')",
                [page.id, TENANT, SOURCE, page.name, number, number, m.content_hash, page.title],
            )
            await connection.execute(
                "INSERT INTO document_bodies (document_id, text, metadata) VALUES (%s, %s, %s)",
                [page.id, page.text, json.dumps({"path": page.name})],
            )
            await connection.execute(
                "INSERT INTO manifests (document_id, generation, content_hash, chunk_ids, token_counts, spans,"
                " headings) VALUES (%s, %s, %s, %s, %s, %s, %s)",
                [
                    page.id,
                    generation.name,
                    m.content_hash,
                    list(m.chunk_ids),
                    list(m.token_counts),
                    json.dumps(m.spans),
                    json.dumps(m.headings),
                ],
            )
            statement = f"COPY {generation.chunk_table} (id, document_id, access_id, text, embedding) FROM STDIN"
            async with connection.cursor().copy(f"{statement} (FORMAT BINARY)".encode()) as copy:
                copy.set_types(["uuid", "uuid", "int8", "text", generation.vector_type])
                for id_, text, vector in zip(m.chunk_ids, texts, page.vectors, strict=True):
                    await copy.write_row([id_, page.id, 1, text, HalfVector(vector)])
            for id_, headings, text in zip(m.chunk_ids, m.headings, texts, strict=True):
                action = {"index": {"_index": generation.keyword_index, "_id": str(id_)}}
                entry = keyword_entry(page.id, page.name, TAG, page.title, headings, text)
                operations += [json.dumps(action).encode(), json.dumps(entry).encode()]
            made += len(m.chunk_ids)
            if len(operations) >= 2 * BULK_ENTRIES or made >= chunks:
                await _bulk(library, operations)
                operations = []
        await connection.commit()
        await _bulk(library, operations)
        await library.es.options(request_timeout=300).indices.refresh(index=generation.keyword_index)
        _log(f"{made} chunks in both stores")
        await connection.execute("SET max_parallel_maintenance_workers = 2")
        await create_graph(connection, generation)
        await connection.commit()
        _log("graph built")
        for table in ("documents", "manifests", "access_sets", generation.chunk_table):
            await connection.execute(f"ANALYZE {table}".encode())
        await connection.commit()
    return made


async def _bulk(library: Library, operations: Sequence[bytes]) -> None:
    if operations:
        answer = await library.es.options(request_timeout=300).bulk(operations=list(operations))  # type: ignore[arg-type]  # bytes go as is
        assert not answer["errors"]


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def ask(library: Library, questions: int) -> int:
    """Store golden questions about the original topics. Returns their number."""
    queries = [query for query in collection().queries if query.kind in ("question", "heading") and query.relevant]
    async with library.pool.connection() as connection:
        for query in queries[::-1][:questions]:
            judged = tuple(Judged(SOURCE, name.removeprefix("topic.")) for name in sorted(query.relevant))
            await judgements.store(connection, Golden(TENANT, query.text, judged, (), (TAG,)))
    return min(questions, len(queries))


def edited(page: Page, dice: random.Random) -> str:
    """The page with another ending of one of its sentences."""
    sentences = [match.span() for match in re.finditer(r"[A-Z][^.!?\n]{40,}\.", page.text)]
    start, end = dice.choice(sentences)
    words = page.text[start:end].split()
    return page.text[:start] + " ".join(words[: len(words) // 2]) + " is described elsewhere." + page.text[end:]


async def measure(library: Library, pages: Sequence[Page], servers: Sequence[int]) -> list[dict[str, Any]]:
    caller = await library.caller(TENANT, "staff")
    dice = random.Random(7)
    previews = Previews(library.search, library.pool, library.es, QueryEmbedder(lambda: library.embedder))
    pages = [page for page in pages if re.search(r"[A-Z][^.!?\n]{40,}\.", page.text)]
    results = []
    for page in dice.sample(pages, EDITS):
        edit = Edit(SOURCE, [ProposedDocument(page.name, edited(page, dice), page.title, "text/plain")])
        before, own, began = processor_seconds(servers), process_time(), perf_counter()
        report = await previews.preview(edit, caller)
        [document] = report.documents
        results.append(
            {
                "page": page.name,
                "chunks": document.chunks,
                "new": document.new,
                "embedded": report.embedded,
                "questions": report.questions,
                "affected": report.affected,
                "skipped": report.skipped,
                "findings": len(report.findings),
                "seconds": round(perf_counter() - began, 2),
                "processor_seconds": round(process_time() - own + processor_seconds(servers) - before, 2),
            }
        )
        _log(json.dumps(results[-1]))
    return results


@asynccontextmanager
async def filled(stack: Stack, chunks: int, questions: int) -> AsyncIterator[tuple[Library, Sequence[Page], int]]:
    """A library with so many chunks, the pages that can be edited, and the number of its chunks."""
    model = embedder(EmbeddingSettings(), dist() / "models")
    try:
        async with Library.create(stack, model) as library:
            pages = await originals(library)
            _log(f"{len(pages)} pages embedded")
            made = await fill(library, pages, chunks)
            await ask(library, questions)
            yield library, pages, made
    finally:
        await model.aclose()


async def run(chunks: int, questions: int) -> dict[str, Any]:
    stack = Stack(home())
    servers = [server.pid for server in stack.services() if server.pid and server.name in ("postgres", "elasticsearch")]
    async with filled(stack, chunks, questions) as (library, pages, made):
        return summary(made, await measure(library, pages, servers))


def summary(chunks: int, edits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def spread(name: str) -> dict[str, Any]:
        values = [edit[name] for edit in edits]
        return {"median": round(median(values), 2), "most": max(values)}

    measured = ("embedded", "affected", "seconds", "processor_seconds")
    return {
        "chunks": chunks,
        **{name: spread(name) for name in measured},
        "target_seconds": TARGET_SECONDS,
        "edits": list(edits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the result goes")
    options = parser.parse_args()
    result = {"machine": description(), **asyncio.run(run(options.chunks, options.questions))}
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    main()
