"""Calibrating a generation's floor of relevance on its own vectors (``pipeline.core.relevance``)."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from secrets import token_bytes
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import numpy as np
import structlog
from psycopg import sql
from psycopg.errors import UndefinedTable

from pipeline.core.errors import PenstockError, Poison
from pipeline.core.graph import BUSY_AT_MOST_SECONDS, BUSY_DOCUMENTS
from pipeline.core.model import Generation
from pipeline.core.relevance import EVERYDAY, GROWTH, Calibration, Measured, is_due, known_item, measure
from pipeline.core.retry import backoff
from pipeline.core.throttle import rest_after
from pipeline.embedding.port import Embedder, Models, Vectors
from pipeline.ledger import generations, work
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import graph
from pipeline.stores.leader import lead_session
from pipeline.stores.postgres import CALIBRATION_LOCK, Connection, translated, unlimited
from pipeline.stores.vectors import sketches_of, value, with_centre

if TYPE_CHECKING:  # vectors workers have no access to it
    from elasticsearch import AsyncElasticsearch

log = structlog.get_logger()

WALKED = 100
"""The size of a walk's candidate list, and the rows that it fetches from a graph of bits: whole vectors decide."""
SAMPLED_CHUNKS = 300
"""The passages of the random pairs, of which some are known items."""
RUN_CHUNKS = 10
"""The sample of a larger collection consists of runs of so many that begin at random ids, because whoever writes
documents finds texts whose ids are as low as it likes (docs/adr/0116-sampled-passages.md)."""
KNOWN_ITEMS = 120
AT_ONCE = 8
"""Questions that a command embeds at the same time. A worker embeds one after another: documents come first."""
WORKER_SHARE = 0.25
"""The share of its time in which a worker reads what is nearest to the questions. It leaves the database to others in
the rest: each question reads a small table whole, right after the load that filled it."""
RERANKED_QUESTIONS = 40
"""Questions of each kind that a reranker scores: an expensive model takes a second for five passages."""
RERANKED_PASSAGES = 5
"""How many of the nearest passages a reranker scores of each question."""
COUNTED = 300_000
"""Chunks are counted up to this number, which takes 0.1 s; a larger collection is calibrated when it is built, and by
`penstock generation calibrate`."""
CHECK_SECONDS = 10.0
LOAD_SECONDS = 600.0
"""How long a collection that is due waits for the end of a load; a load of days is not waited for."""
GRAPH_SECONDS = 3_600.0
"""How long it waits for the graph: each of 240 questions would read the whole table."""
RETRY_BASE_SECONDS, RETRY_CAP_SECONDS = 1.0, 300.0


class Scorer(Protocol):
    """A reranker, as ``query.rerank.reranker.Reranker``."""

    @property
    def model(self) -> str: ...

    async def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    vector: Vectors


async def calibrate(
    connection: Connection,
    generation: Generation,
    embedder: Embedder,
    *,
    scorer: Scorer | None = None,
    at_once: int = AT_ONCE,
    share: float = 1.0,
    es: AsyncElasticsearch | None = None,
) -> Calibration | None:
    """Measure the floor of a generation and store it. None: it has no chunk to measure on, or the model refuses all
    questions.

    120 short questions are embedded, the first time another 120, whose vectors are stored with the generation; 80 are
    reranked. connection: reads vectors (pgvector's types are registered). scorer: the reranker to calibrate as well.
    at_once: questions that are embedded at the same time. share: of its time, in which what is nearest to them is read.
    es: searches the vectors of a generation that has them in its keyword index; None: all its rows are read, for each
    question. Raises Retryable and Misconfigured as the models do, and psycopg.Error.
    """
    texts, vectors = await _sample(connection, generation)
    if not texts:
        return None
    everyday = await _everyday(connection, generation, embedder, at_once)
    spread = [texts[n * len(texts) // KNOWN_ITEMS] for n in range(KNOWN_ITEMS)] if len(texts) > KNOWN_ITEMS else texts
    known = await _embedded(embedder, [known_item(text, seed) for seed, text in enumerate(spread)], at_once)
    if not everyday or not known:
        return None
    near = _Nearest(connection, await with_centre(connection, generation), es, share)
    measured = measure(
        [await near.best_cosine(question) for question in everyday],
        [await near.best_cosine(question) for question in known],
    )
    calibration = Calibration(
        cosine=measured.floor,
        unrelated=measured.unrelated,
        known=measured.known,
        random=_mean_cosine(vectors),
        chunks=await graph.rows(connection, generation, most=COUNTED),
        questions=measured.questions,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if scorer is not None:
        reranked = await _measure_reranker(near, scorer, everyday, known)
        calibration = replace(calibration, reranker=scorer.model, rerank=reranked.floor)
    await generations.record_calibration(connection, generation.name, calibration)
    log.info("generation_calibrated", generation=generation.name, cosine=round(calibration.cosine, 3))
    return calibration


async def _sample(connection: Connection, generation: Generation) -> tuple[list[str], Vectors]:
    chunks = sql.Identifier(generation.chunk_table)
    if await graph.rows(connection, generation, most=SAMPLED_CHUNKS) < SAMPLED_CHUNKS:
        statement, values = sql.SQL("SELECT text, embedding FROM {chunks} ORDER BY id"), []
    else:
        statement = _RUNS
        values = [[UUID(bytes=token_bytes(16)) for _ in range(SAMPLED_CHUNKS // RUN_CHUNKS)], RUN_CHUNKS]
    cursor = await connection.execute(statement.format(chunks=chunks), values, binary=True)
    rows = await cursor.fetchall()
    vectors = [v.to_numpy() if hasattr(v, "to_numpy") else v for _, v in rows]
    return [text for text, _ in rows], np.asarray(vectors, dtype=np.float32)


_RUNS = sql.SQL("""
    SELECT DISTINCT ON (c.id) c.text, c.embedding FROM unnest(%s::uuid[]) AS p (place)
    CROSS JOIN LATERAL (SELECT id, text, embedding FROM {chunks} WHERE id >= p.place ORDER BY id LIMIT %s) c
    ORDER BY c.id
""")


def _mean_cosine(vectors: Vectors) -> float:
    """The mean cosine of each sampled passage to the next one, which is a random one."""
    if len(vectors) < 2:
        return 1.0
    return float((vectors * np.roll(vectors, 1, axis=0)).sum(axis=1).mean())


_QUESTIONS = hashlib.sha256("\n".join(EVERYDAY).encode()).digest()


async def _everyday(
    connection: Connection, generation: Generation, embedder: Embedder, at_once: int
) -> list[_Question]:
    """The everyday questions with their vectors, which are embedded once for each generation. They are stored after the
    digest of the questions, in their order, as float32; a question that the model refuses has NaN."""
    stored = await generations.everyday(connection, generation.name) or b""
    if stored[: len(_QUESTIONS)] == _QUESTIONS:
        vectors = np.frombuffer(stored, np.float32, offset=len(_QUESTIONS)).reshape(len(EVERYDAY), -1)
        pairs = zip(EVERYDAY, vectors, strict=True)
        return [_Question(text, vector) for text, vector in pairs if not np.isnan(vector[0])]
    questions = await _embedded(embedder, EVERYDAY, at_once)
    by_text = {question.text: question.vector for question in questions}
    refused = np.full(generation.dimensions, np.nan, np.float32)
    vectors = np.asarray([by_text.get(text, refused) for text in EVERYDAY], np.float32)
    await generations.record_everyday(connection, generation.name, _QUESTIONS + vectors.tobytes())
    return questions


async def _embedded(embedder: Embedder, texts: Sequence[str], at_once: int) -> list[_Question]:
    """The questions with their vectors, without those that the model refuses."""
    limit = asyncio.Semaphore(at_once)

    async def embed(text: str) -> _Question | None:
        async with limit:
            try:
                return _Question(text, await embedder.embed_query(text))
            except Poison:
                return None

    embedded = await asyncio.gather(*(embed(text) for text in texts))
    return [question for question in embedded if question is not None]


_NEAREST = """
    SELECT text, cosine FROM (
        (SELECT text, 1 - (embedding <=> %(vector)s) AS cosine FROM {chunks}
            WHERE {inside} ORDER BY {order} LIMIT %(walked)s)
        UNION ALL
        (SELECT text, 1 - (embedding <=> %(vector)s) AS cosine FROM {chunks}
            WHERE {outside} ORDER BY embedding <=> %(vector)s LIMIT %(limit)s)
    ) nearest ORDER BY cosine DESC LIMIT %(limit)s
"""
"""Through the graph, where there is one, and among the rows outside of it."""


_OF_ENTRIES = """
    SELECT text, 1 - (embedding <=> %(vector)s) AS cosine FROM {chunks} WHERE id = ANY(%(ids)s::uuid[])
    ORDER BY cosine DESC LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class _Nearest:
    """Finds the passages of a generation that are nearest to a question."""

    connection: Connection
    generation: Generation
    es: AsyncElasticsearch | None
    share: float
    """The share of its time in which it reads."""

    async def __call__(self, question: _Question, limit: int) -> list[tuple[str, float]]:
        """(text, cosine) of each, nearest first."""
        began = monotonic()
        near = await self._read(question, limit)
        await asyncio.sleep(rest_after(monotonic() - began, self.share))
        return near

    async def _read(self, question: _Question, limit: int) -> list[tuple[str, float]]:
        generation, chunks = self.generation, sql.Identifier(self.generation.chunk_table)
        values: dict[str, Any] = {"vector": value(generation, question.vector), "limit": limit}
        if self.es is not None and generation.vectors == "elasticsearch":
            from pipeline.stores import dense  # here: vectors workers need not import the client

            near = await dense.nearest(self.es, generation, question.vector, [], limit=limit)
            statement, values = (
                sql.SQL(_OF_ENTRIES).format(chunks=chunks),
                values | {"ids": [entry.chunk for entry in near]},
            )
        else:
            held = sql.SQL(graph.column(generation))
            values["walked"] = limit if generation.quantisation == "halfvec" else WALKED
            if generation.graph_of_sketches:
                [values["sketch"]] = sketches_of(generation, [question.vector])
            of_question = sql.SQL("%(sketch)s" if generation.graph_of_sketches else "%(vector)s")
            statement = sql.SQL(_NEAREST).format(
                chunks=chunks,
                inside=graph.inside(generation),
                outside=graph.outside(generation),
                order=graph.distance(generation, held, of_question),
            )
        async with self.connection.transaction():
            await self.connection.execute(f"SET LOCAL hnsw.ef_search = {WALKED}")
            cursor = await self.connection.execute(statement, values)
            return await cursor.fetchall()

    async def best_cosine(self, question: _Question) -> float:
        nearest = await self(question, 1)
        return nearest[0][1] if nearest else -1.0


async def _measure_reranker(
    near: _Nearest, scorer: Scorer, everyday: Sequence[_Question], known: Sequence[_Question]
) -> Measured:
    async def best(question: _Question) -> float:
        nearest = await near(question, RERANKED_PASSAGES)
        return max(await scorer.rerank(question.text, [text for text, _ in nearest]))

    def every(questions: Sequence[_Question]) -> Sequence[_Question]:
        return questions[:: max(1, len(questions) // RERANKED_QUESTIONS)]

    return measure([await best(q) for q in every(everyday)], [await best(q) for q in every(known)])


class CalibrationKeeper:
    """Calibrates every generation that searches may use, once it has chunks and whenever it has grown much, after the
    load that made it grow. It runs in every vectors worker; an advisory lock makes one of them the leader."""

    def __init__(
        self,
        settings: PostgresSettings,
        models: Models,
        current: Callable[[], Awaitable[Mapping[str, Generation]]],
    ) -> None:
        """current: returns the generations that are not retired, by name."""
        self._settings = settings
        self._models = models
        self._current = current
        self._failures = 0
        self._waiting_since: dict[str, float] = {}
        """Since when a generation has waited for the end of a load or for its graph, on time.monotonic()."""

    async def run(self) -> BaseException:
        """Work until cancelled. After a failure it waits, and tries again."""
        while True:
            wait = CHECK_SECONDS
            try:
                async with unlimited(self._settings, "calibration") as connection:
                    if await lead_session(connection, CALIBRATION_LOCK):
                        await self.turn(connection)
                self._failures = 0
            except Exception as error:  # noqa: BLE001 # searches do without it; documents must go on
                wait = backoff(
                    self._failures,
                    base=RETRY_BASE_SECONDS,
                    cap=RETRY_CAP_SECONDS,
                    random=random.random(),  # noqa: S311  jitter
                    retry_after=None,
                )
                self._failures += 1
                reason = str(error)[:200] if isinstance(error, PenstockError) else type(error).__name__
                log.warning("calibration_delayed", reason=reason, seconds=round(wait, 1))
            await asyncio.sleep(wait)

    async def turn(self, connection: Connection) -> list[str]:
        """Calibrate what is due; returns the names of the calibrated generations. Raises Retryable, Misconfigured."""
        calibrated = []
        with translated("calibration"):
            for generation in (await self._current()).values():
                if generation.state == "building":  # the command that builds it calibrates it when it is complete
                    continue
                before = generation.calibration
                try:
                    most = GROWTH * before.chunks if before else COUNTED
                    chunks = await graph.rows(connection, generation, most=min(most, COUNTED))
                    if not is_due(before, chunks) or await self._has_to_wait(connection, generation):
                        continue
                    if await calibrate(
                        connection,
                        generation,
                        await self._models.of(generation),
                        at_once=1,
                        share=WORKER_SHARE,
                    ):
                        calibrated.append(generation.name)
                except UndefinedTable:  # the generation was retired meanwhile
                    continue
        return calibrated

    async def _has_to_wait(self, connection: Connection, generation: Generation) -> bool:
        """Whether to wait, because many documents are being written, or because the table has no graph yet: at most
        LOAD_SECONDS or GRAPH_SECONDS."""
        pending = await work.pending(
            connection, generation.name, within_seconds=BUSY_AT_MOST_SECONDS, most=BUSY_DOCUMENTS + 1
        )
        waited = monotonic() - self._waiting_since.setdefault(generation.name, monotonic())
        if pending > BUSY_DOCUMENTS and waited < LOAD_SECONDS:
            return True
        if waited < GRAPH_SECONDS and await graph.is_missed(connection, generation):
            return True
        del self._waiting_since[generation.name]
        return False
