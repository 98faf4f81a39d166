"""Measures the cost of an edit with many standing questions: ``python -m bench.standing --questions 100000``.

It plants questions with random probes in an empty database of the local stack, then runs the analysis task's own
statements for edited documents: the questions behind a passage, and those whose context a new chunk would enter, by its
meaning and by its words. The words are those of ``bench.prose``, of which there are 2,000: in a larger vocabulary, a
chunk has words of fewer questions. The times are the processor time of both processes: what others do at that time
does not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from pgvector import HalfVector

from bench.prose import WORDS_A_CHUNK, sentences, text
from cli.stack import local_stack
from pipeline.core.model import ChunkParams
from pipeline.embedding.port import Embedded, Vectors
from pipeline.runtime.settings import ElasticsearchSettings, PostgresSettings, load
from pipeline.stores.postgres import permit_long
from query.evaluation.place import Place, empty
from query.standing import task
from query.standing.probe import make
from query.standing.word_index import WordIndexes
from query.standing.words import Words, of_passage, weight, words_of

TENANT = "acme"
PASSAGES = 8
"""The passages behind one answer."""
COVERAGE = 0.75
"""The least share of a question's words that a relevant passage has (``pipeline.core.relevance``)."""
TOPICS = 1_000
"""Questions and chunks lie around so many directions, as those of a real collection do."""


class Directions:
    """An embedder that embeds nothing: the rows are planted."""

    model = "planted"
    revision = "1"
    input_window = 254
    document_prefix = ""
    query_prefix = ""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def count_tokens(self, texts: Any) -> list[int]:
        return [len(text.split()) for text in texts]

    async def embed_documents(self, texts: Any) -> Embedded:
        return Embedded(np.eye(len(texts), self.dimensions, dtype=np.float32))

    async def embed_query(self, text: str) -> Vectors:
        return np.eye(1, self.dimensions, dtype=np.float32)[0]

    async def aclose(self) -> None:
        pass


async def measure(questions: int, documents: int, dimensions: int, rounds: int) -> dict[str, Any]:
    endpoints = local_stack().endpoints()
    settings = load().model_copy(
        update={
            "postgres": PostgresSettings(dsn=endpoints["postgres"]["dsn"]),
            "elasticsearch": ElasticsearchSettings(url=endpoints["elasticsearch"]["url"]),
        }
    )
    name = f"s{uuid.uuid4().hex[:10]}"
    async with empty(settings, Directions(dimensions), name, ChunkParams(200, 80, 254)) as place:
        began = perf_counter()
        vectors = await _plant(place, questions, documents, dimensions)
        planted = perf_counter() - began
        return {"questions": questions, "dimensions": dimensions, "planted_seconds": round(planted, 1)} | (
            await _edits(place, vectors, documents, rounds)
        )


async def _plant(place: Place, questions: int, documents: int, dimensions: int) -> Any:
    dice = np.random.default_rng(7)
    topics = dice.standard_normal((TOPICS, dimensions))

    def near(count: int) -> Any:
        vectors = topics[dice.integers(0, TOPICS, count)] + 0.8 * dice.standard_normal((count, dimensions))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    async with place.pool.connection() as connection:
        await permit_long(connection)
        await connection.execute("SET statement_timeout = 0")
        await connection.execute("SET idle_in_transaction_session_timeout = 0")
        await connection.execute("SET maintenance_work_mem = '1GB'")
        await connection.execute(
            "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES (%s, 'x', '{wiki/user:u}', '{}')",
            [TENANT],
        )
        await connection.execute(
            "INSERT INTO documents (id, tenant, source, external_id, seq, version, access_id, content_hash, title,"
            " media_type, received_at) SELECT md5('d' || n)::uuid, %s, 'wiki', n || '.md', n, 1, (SELECT max(id) FROM"
            " access_sets), '\\x00', 't', 'text/plain', now() FROM generate_series(0, %s) n",
            [TENANT, documents - 1],
        )
        await connection.execute("DROP INDEX standing_probes_g1")  # built at once below, which takes a minute, not ten
        ids = [uuid.uuid4() for _ in range(questions)]
        of_questions = list[Words]()
        probes = near(questions)
        floors = dice.uniform(0.45, 0.75, questions)
        async with connection.cursor().copy(
            "COPY standing_questions (tenant, id, principal, question, request, sentences, generation, probe,"
            " probe_generation, words, names, words_floor) FROM STDIN"
        ) as copy:
            for number, (id_, probe, floor) in enumerate(zip(ids, probes, floors, strict=True)):
                planted = make(probe, floor).to_text()
                question = _question(number)
                words = words_of(TENANT, question, (), is_full=False, coverage=COVERAGE)
                of_questions.append(words)
                of_words = (list(words.words), list(words.names), words.floor)
                cited = json.dumps([{"text": "It is so.", "cites": [n]} for n in range(1, PASSAGES + 1)])
                await copy.write_row([TENANT, id_, "u", question, "{}", cited, "g1", planted, "g1", *of_words])
        async with connection.cursor().copy(
            "COPY standing_passages (tenant, question_id, n, chunk_id, document_id) FROM STDIN"
        ) as copy:
            for id_ in ids:
                for n, of in enumerate(dice.integers(0, documents, PASSAGES), 1):
                    await copy.write_row([TENANT, id_, n, uuid.uuid4(), _document(int(of))])
        chunks = near(documents)
        async with connection.cursor().copy(
            f"COPY {place.generation.chunk_table} (id, document_id, access_id, created_at, text, embedding) FROM STDIN"
        ) as copy:
            at = datetime.now(UTC) + timedelta(minutes=1)
            for n, vector in enumerate(chunks):
                await copy.write_row(
                    [_chunk(n), _document(n), 1, at, text(n, WORDS_A_CHUNK), HalfVector(vector).to_text()]
                )
        await connection.execute("SELECT prepare_probes('g1', %s)", [dimensions])
        await connection.commit()
        for table in ("standing_questions", "standing_passages", "documents", place.generation.chunk_table):
            await connection.execute(f"ANALYZE {table}".encode())
    return (probes, floors, chunks, of_questions)


def _question(number: int) -> str:
    dice = random.Random(f"question {number}")
    return " ".join(dice.sample(dice.choice(sentences()).split(), 5) + dice.sample(dice.choice(sentences()).split(), 5))


def _document(n: int) -> uuid.UUID:
    return uuid.UUID(hashlib.md5(f"d{n}".encode(), usedforsecurity=False).hexdigest())


def _chunk(n: int) -> uuid.UUID:
    return uuid.uuid5(_document(n), "chunk")


async def _edits(place: Place, vectors: Any, documents: int, rounds: int) -> dict[str, Any]:
    probes, floors, chunks, of_questions = vectors
    async with place.pool.connection() as connection:
        server = psutil.Process(connection.info.backend_pid)

        async def cpu(work: Callable[[int], Awaitable[Any]]) -> tuple[list[float], list[Any]]:
            """The milliseconds of both processes for each edit, and what each returned."""
            times, results = [], []
            for n in range(rounds):
                before = sum(server.cpu_times()[:2]) + process_time()
                for _ in range(REPEATED):
                    result = await work(n % documents)
                times.append((sum(server.cpu_times()[:2]) + process_time() - before) * 1000 / REPEATED)
                results.append(result)
            return times, results

        async def behind(n: int) -> Any:
            return await task._questions(connection, task._BY_DOCUMENT, {"tenant": TENANT, "ids": [_document(n)]})

        async def entered(n: int) -> Any:
            return await task._nearest(connection, place.generation, TENANT, [(_chunk(n), _document(n))])

        async def shared_words(n: int) -> Any:
            indexes = await words.of(connection, TENANT)
            return await task._with_its_words(connection, place.generation, TENANT, [_chunk(n)], indexes)

        words = WordIndexes()
        began = process_time()
        await words.of(connection, TENANT)
        indexed = process_time() - began
        by_document, concerned = await cpu(behind)
        by_probe, entering = await cpu(entered)
        by_words, sharing = await cpu(shared_words)
    whole = [sum(parts) for parts in zip(by_document, by_probe, by_words, strict=True)]
    exact = [(probes @ chunks[n] > floors).sum() for n in range(rounds)]
    counted = [_with_words_of(n, of_questions) for n in range(min(rounds, COUNTED))]
    return {
        "edit_ms": _spread(whole),
        "passages_ms": _spread(by_document),
        "questions_of_a_document": median(len(rows) for rows in concerned),
        "new_chunk_ms": _spread(by_probe),
        "questions_of_a_new_chunk": median(len(rows) for rows in entering),
        "words_of_new_chunk_ms": _spread(by_words),
        "questions_of_its_words": median(len(rows) for rows in sharing),
        "index_of_words_seconds": round(indexed, 2),
        "recall_by_words": round(sum(map(len, sharing[:COUNTED])) / max(1, sum(counted)), 3),
        "recall": round(sum(map(len, entering)) / max(1, sum(min(task.NEAREST, int(count)) for count in exact)), 3),
    }


def _with_words_of(chunk: int, questions: Sequence[Words]) -> int:
    """How many questions are to be announced that a chunk has enough words of, counted one by one."""
    contents = of_passage(TENANT, f"t\n{text(chunk, WORDS_A_CHUNK)}")
    return min(task.NEAREST, sum(weight(of.words, of.names, contents) > of.floor for of in questions))


COUNTED = 10
"""For so many chunks all questions are counted one by one, to compare."""
REPEATED = 5
"""The operating system counts processor time in hundredths of a second: each edit is measured so often."""


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": round(median(ordered), 2), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2)}


def main(
    questions: Annotated[int, typer.Option(help="Number of standing questions.")] = 100_000,
    documents: Annotated[int, typer.Option(help="Number of documents, each with one new chunk.")] = 20_000,
    dimensions: Annotated[int, typer.Option(help="Dimensions of the vectors.")] = 384,
    rounds: Annotated[int, typer.Option(help="Number of edits.")] = 50,
) -> None:
    """Measure what an edit costs with many standing questions, on the running local stack."""
    typer.echo(json.dumps(asyncio.run(measure(questions, documents, dimensions, rounds)), indent=2))


if __name__ == "__main__":
    typer.run(main)
