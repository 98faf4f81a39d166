"""Embeds the chunks of members' histories in the background: after documents, at a limited rate, and whenever the model
answers.

A chunk waits until it is embedded, and nobody waits for it. Each is claimed with a lease, so that several workers share
the work and the chunks of a killed one are taken again. See docs/adr/0018-conversations.md.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from pgvector import HalfVector

from pipeline.core.conversations import made_by, pieces
from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.core.retry import backoff
from pipeline.embedding.port import Embedder, Models, Vectors
from pipeline.embedding.vectors import unit, usable
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import ConversationSettings
from pipeline.stores.postgres import Connection, Pool, translated

log = structlog.get_logger()

CLAIMED = 16
"""Chunks taken at once."""
REQUEST_INPUTS = 16
"""Texts of one call of the model, which a document that comes meanwhile has to wait for."""
LEASE_SECONDS = 30.0
"""The time after which another worker may claim a chunk. A call that takes longer pays for the same embedding twice."""
IDLE_SECONDS = 1.0
STARVED_SECONDS = 5.0
"""While documents are always being embedded, one call for conversations is made after so long."""
BUSY_POLL_SECONDS = 0.05
STALE_PAGE = 500
RETRY_BASE_SECONDS, RETRY_CAP_SECONDS = 1.0, 300.0
COUNTED = 100_000
"""Waiting chunks are counted up to this number."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    tenant: str
    member: str
    digest: bytes
    text: str
    attempts: int


class ConversationVectors:
    """Runs in every vectors worker. Law: a chunk without embedding is tried again after every failure, at growing
    intervals, and vectors of other models than the active generation's are never searched."""

    def __init__(
        self,
        pool: Pool,
        models: Models,
        metrics: Metrics,
        settings: ConversationSettings,
        *,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """busy: whether documents wait for the same model."""
        self._pool = pool
        self._models = models
        self._metrics = metrics
        self._rate = settings.embeddings_per_second
        self._busy = busy
        self._failures = 0
        self._called = time.monotonic()

    async def run(self) -> BaseException:
        """Embed until cancelled. Outages are waited for."""
        while True:
            wait = IDLE_SECONDS
            try:
                if await self.turn():
                    wait = 0.0
                self._failures = 0
            except PenstockError as error:
                wait = backoff(
                    self._failures,
                    base=RETRY_BASE_SECONDS,
                    cap=RETRY_CAP_SECONDS / 10,
                    random=random.random(),  # noqa: S311  jitter
                    retry_after=error.retry_after if isinstance(error, Retryable) else None,
                )
                self._failures += 1
                log.warning("conversations_delayed", reason=str(error)[:200], seconds=round(wait, 1))
            await asyncio.sleep(wait)

    async def turn(self) -> bool:
        """Embed some chunks; False: there is nothing to do. Raises Retryable, Misconfigured."""
        with translated("conversations"):
            async with self._pool.connection() as connection:
                generation = await generations.active(connection)
                self._metrics.conversation_waiting.set(await _count(connection))
        embedder = await self._models.of(generation)
        if not _serves(embedder, generation):
            return False  # another worker has its model
        maker = made_by(generation)
        with translated("conversations"):
            async with self._pool.connection() as connection:
                if await _drop_stale(connection, maker):
                    return True
                claimed = await _claim(connection)
        groups = _groups(claimed)
        while groups:
            group = groups.pop(0)
            try:
                await self._group(embedder, maker, group)
            except PenstockError:
                with translated("conversations"):
                    async with self._pool.connection() as connection:
                        await _put_off(connection, group)
                        await _release(connection, [chunk for others in groups for chunk in others])
                raise
        return bool(claimed)

    async def _group(self, embedder: Embedder, maker: str, group: Sequence[_Waiting]) -> None:
        embedded_chunks = await self._embed(embedder, [chunk.text for chunk in group])
        with translated("conversations"):
            async with self._pool.connection() as connection:
                await _save(connection, maker, list(zip(group, embedded_chunks, strict=True)))
        self._metrics.conversation_chunks.inc(sum(vector is not None for vector in embedded_chunks))
        for chunk, vector in zip(group, embedded_chunks, strict=True):
            if vector is None:
                log.warning("conversation_chunk_refused", chunk=chunk.digest.hex())

    async def _embed(self, embedder: Embedder, texts: Sequence[str]) -> list[Vectors | None]:
        """Embed texts. One that is longer than the model's window gets the mean of its parts, weighted by their tokens.
        None: the model refuses all of it."""
        prefix = sum(embedder.count_tokens([embedder.document_prefix]))
        parts: list[tuple[int, str, int]] = []
        for n, text in enumerate(texts):
            cut = await asyncio.to_thread(
                pieces, text, window=embedder.input_window - prefix, count_tokens=embedder.count_tokens
            )
            parts += [(n, part, tokens) for part, tokens in cut]
        sums = np.zeros((len(texts), embedder.dimensions), dtype=np.float32)
        for start in range(0, len(parts), REQUEST_INPUTS):
            some = parts[start : start + REQUEST_INPUTS]
            await self._wait_for_documents()
            embedded = await embedder.embed_documents([part for _, part, _ in some])
            self._metrics.embedding_billed(embedded.tokens, purpose="conversation")
            for row, (n, _, tokens) in enumerate(some):
                if row not in embedded.refused:
                    sums[n] += tokens * embedded.vectors[row]
            await asyncio.sleep(len(some) / self._rate)
        good = usable(sums)
        return [unit(sums[n : n + 1])[0] if good[n] else None for n in range(len(texts))]

    async def _wait_for_documents(self) -> None:
        """Wait while documents are embedded, up to STARVED_SECONDS after the last call."""
        while self._busy() and time.monotonic() - self._called < STARVED_SECONDS:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(BUSY_POLL_SECONDS)
        self._called = time.monotonic()


def _serves(mine: Embedder, theirs: Generation) -> bool:
    same = (mine.model, mine.dimensions, mine.document_prefix) == (
        theirs.model,
        theirs.dimensions,
        theirs.document_prefix,
    )
    return same and (not mine.revision or not theirs.revision or mine.revision == theirs.revision)


async def _count(connection: Connection) -> int:
    cursor = await connection.execute(
        "SELECT count(*) FROM (SELECT FROM conversation_chunks WHERE made_by IS NULL LIMIT %s) waiting", [COUNTED]
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def _drop_stale(connection: Connection, maker: str) -> int:
    """Drop the embeddings that another model made, so that their chunks wait again."""
    cursor = await connection.execute(
        "UPDATE conversation_chunks SET made_by = NULL, embedding = NULL, attempts = 0, next_at = now()"
        " WHERE ctid = ANY(ARRAY(SELECT ctid FROM conversation_chunks WHERE made_by < %(maker)s OR made_by > %(maker)s"
        "  LIMIT %(page)s FOR UPDATE SKIP LOCKED))",
        {"maker": maker, "page": STALE_PAGE},
    )
    return cursor.rowcount


async def _claim(connection: Connection) -> list[_Waiting]:
    """Claim the chunks that have waited longest."""
    cursor = await connection.execute(
        "UPDATE conversation_chunks SET next_at = now() + make_interval(secs => %s), attempts = attempts + 1"
        " WHERE ctid = ANY(ARRAY(SELECT ctid FROM conversation_chunks WHERE made_by IS NULL AND next_at <= now()"
        "  ORDER BY next_at LIMIT %s FOR UPDATE SKIP LOCKED))"
        " RETURNING tenant, member, digest, text, attempts",
        [LEASE_SECONDS, CLAIMED],
    )
    return [_Waiting(*row) for row in await cursor.fetchall()]


def _groups(claimed: Sequence[_Waiting]) -> list[list[_Waiting]]:
    """Chunks to embed in one call. One that has failed before is tried alone: it may have made the others fail."""
    fresh = [chunk for chunk in claimed if chunk.attempts == 1]
    return [*([fresh] if fresh else []), *([chunk] for chunk in claimed if chunk.attempts > 1)]


async def _put_off(connection: Connection, chunks: Sequence[_Waiting]) -> None:
    await connection.cursor().executemany(
        "UPDATE conversation_chunks SET next_at = now() + make_interval(secs => %s)"
        " WHERE tenant = %s AND member = %s AND digest = %s AND made_by IS NULL",
        [
            (min(RETRY_CAP_SECONDS, RETRY_BASE_SECONDS * 2.0 ** min(c.attempts, 30)), c.tenant, c.member, c.digest)
            for c in chunks
        ],
    )


async def _release(connection: Connection, chunks: Sequence[_Waiting]) -> None:
    """Return claimed chunks that were not tried."""
    await connection.cursor().executemany(
        "UPDATE conversation_chunks SET next_at = now(), attempts = attempts - 1"
        " WHERE tenant = %s AND member = %s AND digest = %s AND made_by IS NULL",
        [(c.tenant, c.member, c.digest) for c in chunks],
    )


async def _save(connection: Connection, maker: str, embedded_chunks: Sequence[tuple[_Waiting, Vectors | None]]) -> None:
    """Store embeddings. A chunk that was removed meanwhile (regrouped, forgotten) is not added again."""
    await connection.cursor().executemany(
        "UPDATE conversation_chunks SET embedding = %s, made_by = %s, attempts = 0"
        " WHERE tenant = %s AND member = %s AND digest = %s AND made_by IS NULL",
        [
            (None if vector is None else HalfVector(vector), maker, c.tenant, c.member, c.digest)
            for c, vector in embedded_chunks
        ],
    )
