"""vectors: make a generation's pgvector table hold exactly the wanted chunks.

Embedding happens outside any lock. Rows are written in transactions of at most WRITE_CHUNKS, each re-checking under
the documents' locks that nothing newer was accepted; what moved keeps its embeddings and is diffed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import structlog
from pgvector import HalfVector, Vector
from psycopg import sql

from pipeline.core.diff import diff_vectors
from pipeline.core.errors import PenstockError, Poison
from pipeline.core.model import Generation, Lane
from pipeline.core.retry import backoff
from pipeline.embedding.port import Embedder, Vectors
from pipeline.ledger import work
from pipeline.ledger.work import Work
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.hints import read_hint
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Connection, Pool, translated
from pipeline.telemetry import Metrics
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

log = structlog.get_logger()

WRITE_CHUNKS = 200
"""Most rows of one transaction: HNSW takes about 6 ms a row, and a revocation waits for the lock that long."""
KEPT_VECTORS = 20_000
"""Embeddings kept in memory until they are written, so that a database outage does not pay twice (≤ 120 MB at 1536)."""
SET_ASIDE_BASE_SECONDS, SET_ASIDE_CAP_SECONDS = 30.0, 3600.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one document still needs in the table."""

    work: Work
    missing: tuple[UUID, ...]
    gone: tuple[UUID, ...]


class VectorSink:
    """The stage. See pipeline.stages.stage.Stage for its law."""

    name = "vectors"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012

    def __init__(
        self,
        pool: Pool,
        embedder: Embedder,
        generations: Mapping[str, Generation],
        chunker: Chunker,
        announcer: Announcer,
        dead: DeadLetters,
        metrics: Metrics,
        *,
        batch_size: int,
    ) -> None:
        self._pool = pool
        self._embedder = embedder
        self._generations = generations
        self._chunker = chunker
        self._announcer = announcer
        self._dead = dead
        self._metrics = metrics
        self.batch_size = batch_size
        self._kept: OrderedDict[UUID, Vectors] = OrderedDict()

    async def handle(self, batch: Sequence[Incoming]) -> None:
        for generation, ids in by_generation(batch, self._generations):
            await self.converge(generation, ids)

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        try:
            document, generation = read_hint(record)
        except Poison:  # no hint at all
            await self._dead.bury(record, stage=self.name, error=error)
            return
        await set_aside(self._pool, self.name, document, generation, error, self._metrics)

    async def converge(self, generation: Generation, ids: Sequence[UUID]) -> None:
        """Make the table equal to the ledger for these documents. Raises Retryable."""
        open_ids = list(ids)
        embedded: dict[UUID, int] = {}
        refused: dict[UUID, set[UUID]] = {}
        while plans := await self._plan(generation, open_ids):  # every round writes, or meets something newer
            for group in _groups(plans):
                await self._embed(group, embedded, refused)
                await self._write(generation, group, embedded, refused)
            open_ids = [plan.work.identity.id for plan in plans]
        await self._announcer.announce(ids)

    async def _plan(self, generation: Generation, ids: Sequence[UUID]) -> list[_Plan]:
        with translated("vectors"):
            async with self._pool.connection() as connection:
                found = [w for w in await work.load(connection, generation.name, "vectors", ids) if not w.settled]
                found = await self._chunker.complete(connection, generation, found, "vectors")
                present = await _present(connection, generation, [w.identity.id for w in found])
        plans = []
        for w in found:
            diff = diff_vectors(w.chunk_ids, present.get(w.identity.id, ()), w.refused)
            plans.append(_Plan(w, diff.write, diff.delete))
        return plans

    async def _embed(self, plans: Sequence[_Plan], embedded: dict[UUID, int], refused: dict[UUID, set[UUID]]) -> None:
        """Embed what is missing and not kept from an earlier try, equal texts once."""
        wanted = [(p.work, i) for p in plans for i in p.missing[:WRITE_CHUNKS] if i not in self._kept]
        wanted = [(w, i) for w, i in wanted if i not in refused.get(w.identity.id, ())]
        if not wanted:
            return
        texts = await self._texts(wanted)
        unique = list(dict.fromkeys(texts.values()))
        result = await self._embedder.embed_documents(unique)
        self._metrics.embedding_tokens.inc(result.tokens)
        self._metrics.embedded.inc(len(unique) - len(result.refused))
        row = {text: n for n, text in enumerate(unique)}
        counted: set[int] = set()
        for w, chunk in wanted:
            n = row[texts[chunk]]
            if n in result.refused:
                refused.setdefault(w.identity.id, set()).add(chunk)
                log.warning("chunk_refused", document=str(w.identity.id), chunk=str(chunk), reason=result.refused[n])
                continue
            self._kept[chunk] = result.vectors[n]
            if n not in counted:
                counted.add(n)
                embedded[w.identity.id] = embedded.get(w.identity.id, 0) + 1
        while len(self._kept) > KEPT_VECTORS:
            self._kept.popitem(last=False)

    async def _texts(self, wanted: Sequence[tuple[Work, UUID]]) -> dict[UUID, str]:
        with translated("vectors"):
            async with self._pool.connection() as connection:
                bodies = await work.bodies(connection, {w.identity.id for w, _ in wanted})
        return {i: chunk_text(w, bodies[w.identity.id][0], i) for w, i in wanted}

    async def _write(
        self,
        generation: Generation,
        plans: Sequence[_Plan],
        embedded: dict[UUID, int],
        refused: Mapping[UUID, set[UUID]],
    ) -> None:
        """One transaction for a group of documents; whoever moved meanwhile is left for the next round."""
        texts = await self._texts([(p.work, i) for p in plans for i in p.missing[:WRITE_CHUNKS] if i in self._kept])
        with translated("vectors"):
            async with self._pool.connection() as connection, connection.transaction():
                wants = await work.lock_wants(
                    connection, generation.name, "vectors", [p.work.identity.id for p in plans]
                )
                still = [p for p in plans if wants.get(p.work.identity.id) == p.work.want_seq]
                self._metrics.moved.labels("vectors").inc(len(plans) - len(still))
                rows = [
                    (i, p.work.identity.id, p.work.access_id, texts[i], self._value(generation, self._kept[i]))
                    for p in still
                    for i in p.missing[:WRITE_CHUNKS]
                    if i in self._kept and i in texts
                ]
                await _insert(connection, generation, rows)
                await _delete(connection, generation, [i for p in still for i in p.gone])
                await _restamp_access(connection, generation, [p.work for p in still])
                written = {row[0] for row in rows}
                complete = [
                    (
                        p.work.identity.id,
                        p.work.want_seq,
                        sorted({*p.work.refused, *refused.get(p.work.identity.id, ())} & set(p.work.chunk_ids)),
                        embedded.get(p.work.identity.id, 0),
                        _partial_reason(refused.get(p.work.identity.id)),
                    )
                    for p in still
                    if written | refused.get(p.work.identity.id, set()) >= set(p.missing)
                ]
                await work.settle_vectors(connection, generation.name, complete)
        for id_, *_ in complete:
            embedded.pop(id_, None)
        for i in written:
            self._kept.pop(i, None)
        self._metrics.written.labels("vectors").inc(len(written))
        self._metrics.deleted.labels("vectors").inc(sum(len(p.gone) for p in still))

    @staticmethod
    def _value(generation: Generation, vector: Vectors) -> HalfVector | Vector:
        return HalfVector(vector) if generation.vector_type == "halfvec" else Vector(np.asarray(vector))


def chunk_text(w: Work, body: str, chunk: UUID) -> str:
    """A chunk's text, cut from the body by its spans."""
    assert w.manifest is not None
    spans = w.manifest.spans[w.manifest.chunk_ids.index(chunk)]
    return "".join(body[start:end] for start, end in spans)


def by_generation(
    batch: Sequence[Incoming], generations: Mapping[str, Generation]
) -> Iterator[tuple[Generation, list[UUID]]]:
    """A batch of hints as documents by generation; one hint each is enough."""
    ids: dict[str, dict[UUID, None]] = {}
    for record in batch:
        document, generation = read_hint(record)
        ids.setdefault(generation, {})[document] = None
    for name, documents in ids.items():
        if name in generations:
            yield generations[name], list(documents)


async def set_aside(
    pool: Pool, store: str, document: UUID, generation: str, error: Exception, metrics: Metrics
) -> None:
    """Record one document's failure with its reason; the sweeper brings it back, later and later."""
    reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__} in {store}"
    with translated(store):
        async with pool.connection() as connection:
            found = await work.load(connection, generation, store, [document])  # type: ignore[arg-type]  # a stage's name
            for w in found:
                wait = backoff(
                    w.attempts + 1, base=SET_ASIDE_BASE_SECONDS, cap=SET_ASIDE_CAP_SECONDS, retry_after=None, random=1.0
                )
                await work.failed(connection, generation, store, document, error=reason, retry_in_seconds=wait)  # type: ignore[arg-type]
    metrics.failed_documents.labels(store).inc()
    log.error("document_set_aside", store=store, document=str(document), reason=reason, exc_info=error)


def _groups(plans: Sequence[_Plan]) -> Iterator[list[_Plan]]:
    """Documents together while their rows fit one transaction."""
    group: list[_Plan] = []
    rows = 0
    for plan in plans:
        size = len(plan.missing)
        if group and rows + size > WRITE_CHUNKS:
            yield group
            group, rows = [], 0
        group.append(plan)
        rows += size
    if group:
        yield group


def _partial_reason(refused: set[UUID] | None) -> str | None:
    return f"{len(refused)} chunks can not be embedded" if refused else None


async def _present(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> dict[UUID, set[UUID]]:
    cursor = await connection.execute(
        sql.SQL("SELECT document_id, id FROM {} WHERE document_id = ANY(%s)").format(
            sql.Identifier(generation.chunk_table)
        ),
        [list(ids)],
    )
    present: dict[UUID, set[UUID]] = {}
    for document, chunk in await cursor.fetchall():
        present.setdefault(document, set()).add(chunk)
    return present


async def _insert(connection: Connection, generation: Generation, rows: Sequence[tuple[object, ...]]) -> None:
    if rows:
        await connection.cursor().executemany(
            sql.SQL(
                "INSERT INTO {} (id, document_id, access_id, text, embedding) VALUES (%s, %s, %s, %s, %s)"
                " ON CONFLICT (id) DO NOTHING"
            ).format(sql.Identifier(generation.chunk_table)),
            rows,
        )


async def _delete(connection: Connection, generation: Generation, ids: Sequence[UUID]) -> None:
    if ids:
        await connection.execute(
            sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(sql.Identifier(generation.chunk_table)), [list(ids)]
        )


async def _restamp_access(connection: Connection, generation: Generation, works: Sequence[Work]) -> None:
    """access_id on the rows is a hint for filtering: follow the document's. Unchanged rows are not touched."""
    if works:
        await connection.execute(
            sql.SQL(
                "UPDATE {} c SET access_id = w.access_id FROM unnest(%s::uuid[], %s::bigint[]) AS w (id, access_id)"
                " WHERE c.document_id = w.id AND c.access_id <> w.access_id"
            ).format(sql.Identifier(generation.chunk_table)),
            [[w.identity.id for w in works], [w.access_id for w in works]],
        )
