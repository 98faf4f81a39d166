"""Embeds standing questions again once another generation is active: their probes are of the model before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.runtime.settings import EmbeddingSettings, dist
from pipeline.stores.postgres import Connection, Pool, translated
from query.embedding.embedders import Embedders, GenerationEmbedders, require_same
from query.settings import RetrievalSettings
from query.standing import table
from query.standing.probe import probe
from query.standing.words import words_of

log = structlog.get_logger()

QUESTIONS_AT_ONCE = 50
SECONDS = 60.0
"""How long questions are embedded at once: less than a task of the analysis worker may take for its messages."""

_OUTDATED = """
    SELECT q.id, q.question, q.is_full, coalesce(p.chunks, '{}'), coalesce(p.documents, '{}')
    FROM standing_questions q LEFT JOIN LATERAL (
        SELECT array_agg(p.chunk_id) AS chunks, array_agg(p.document_id) AS documents FROM standing_passages p
        WHERE p.tenant = q.tenant AND p.question_id = q.id
    ) p ON true
    WHERE q.tenant = %(tenant)s AND (q.probe_generation IS DISTINCT FROM %(generation)s OR q.words IS NULL)
    ORDER BY q.asked_at DESC LIMIT %(most)s
"""


@dataclass(frozen=True, slots=True)
class Outdated:
    """A standing question whose probe is of another generation, or that has none."""

    id: UUID
    question: str
    is_full: bool
    """Whether a further passage would take the place of one of these."""
    chunks: Sequence[UUID]
    documents: Sequence[UUID]


async def embed_again(
    connect: Callable[[], AbstractAsyncContextManager[Connection]],
    tenant: str,
    generation: Generation,
    outdated: Outdated,
    vector: Vectors,
    settings: RetrievalSettings,
) -> None:
    """Store the probe of a question by a newer generation, and its words where it has none. vector: of the question,
    by the generation's model. Raises what ``connect`` raises, and psycopg.Error."""
    words = await asyncio.to_thread(
        words_of, tenant, outdated.question, (), is_full=False, coverage=settings.coverage_floor
    )
    async with connect() as connection:
        made = await probe(
            connection,
            generation,
            vector,
            outdated.chunks,
            outdated.documents,
            settings,
            is_full=outdated.is_full,
        )
        await table.embed_again(connection, tenant, outdated.id, made, generation.name, words)


class Renewal:
    """Safe to share between tasks."""

    def __init__(
        self,
        pool: Pool,
        settings: EmbeddingSettings,
        retrieval: RetrievalSettings,
        *,
        embedders: Embedders | None = None,
    ) -> None:
        """embedders: replace those of the settings."""
        self._pool = pool
        self._embedders = embedders or GenerationEmbedders.by_settings(settings, dist() / "models")
        self._retrieval = retrieval

    async def of_tenant(self, tenant: str, generation: Generation) -> None:
        """Embed the tenant's outdated questions, those that were asked last first. While their model is away, they stay
        as they are: the next call tries it again. Raises Retryable when Postgres is away, and when the time is over
        before all are embedded; what was embedded stays."""
        until = monotonic() + SECONDS
        while rows := await self._outdated(tenant, generation):
            try:
                for row in rows:
                    embedder, vector = await self._embedders.of(generation).embed(row.question)
                    require_same(embedder, generation)
                    await embed_again(self._connection, tenant, generation, row, vector, self._retrieval)
            except PenstockError as error:
                if getattr(error, "service", None) == "postgres":
                    raise
                log.warning("standing_question_not_embedded", reason=str(error)[:200])
                return
            if monotonic() > until:
                raise Retryable("standing questions are embedded by the active generation's model", service="embedding")

    async def _outdated(self, tenant: str, generation: Generation) -> list[Outdated]:
        async with self._connection() as connection:
            await self._embedders.keep([generation])
            values = {"tenant": tenant, "generation": generation.name, "most": QUESTIONS_AT_ONCE}
            return [Outdated(*row) for row in await (await connection.execute(_OUTDATED, values)).fetchall()]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        with translated("standing questions"):
            async with self._pool.connection() as connection:
                yield connection
