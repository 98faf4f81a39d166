"""The vectors stage: make a generation's pgvector table hold exactly the desired chunks.

Chunks are embedded without any lock. Rows are written in transactions of at most WRITE_CHUNKS, each of which checks
under the documents' locks that nothing newer was accepted. A document for which something was is compared with the
table again, and its embeddings stay cached.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
import structlog

from pipeline.core.diff import diff_vectors
from pipeline.core.errors import Misconfigured, Poison, Retryable
from pipeline.core.model import Generation, Lane
from pipeline.core.titles import EmbeddedChunk, embedded_title, embedding_texts
from pipeline.embedding.failures import Alone
from pipeline.embedding.port import Models, Vectors
from pipeline.kafka.producer import Producer
from pipeline.ledger import builds, work
from pipeline.ledger.entry import cut
from pipeline.ledger.work import PendingWork, Work
from pipeline.observability.metrics import Metrics
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.hints import read_hint, send_hints
from pipeline.stages.manifests import Chunker
from pipeline.stages.sink import Generations, ModelBreaker, put_off, set_aside
from pipeline.stages.stage import FinalStage, Incoming, used
from pipeline.stores import chunk_rows, graph, vectors
from pipeline.stores.postgres import Connection, Pool, translated
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

log = structlog.get_logger()

WRITE_CHUNKS = 200
"""The most rows of one transaction. Where they enter the graph at once (a backfill into a large table, or an older
version's graph) each takes about 6 ms, and a revocation that needs the lock waits for all of them."""
MAX_CACHED_VECTORS = 20_000
"""The most embeddings in memory that are not written yet. They are cached so that nothing is embedded, and paid for,
twice when the database is down (at most 120 MB with 1,536 dimensions)."""


HINTED_AGAIN_SECONDS = 30.0
"""How long the sweeper leaves entries that shall carry vectors to the hint that is sent for them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The difference between one document and the table: rows to insert (missing) and to delete (gone)."""

    work: Work
    missing: tuple[UUID, ...]
    gone: tuple[UUID, ...]
    had_rows: bool
    """Whether the table already had rows of the document: their copies of its access may be out of date. Where it had
    none, whichever worker writes the rows writes the access of their ``want_seq`` with them."""


class VectorSink(FinalStage):
    """Embeds chunks and writes them to pgvector.

    Law (that of ``Stage``): ``handle`` may be called again with the same records, at any time, in any process.
    """

    name = "vectors"
    topics: dict[Lane, Topic] = {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL}  # noqa: RUF012

    def __init__(
        self,
        pool: Pool,
        models: Models,
        generations: Callable[[], Awaitable[Mapping[str, Generation]]],
        chunker: Chunker,
        announcer: Announcer,
        producer: Producer,
        dead: DeadLetters,
        metrics: Metrics,
        *,
        batch_size: int,
    ) -> None:
        self._pool = pool
        self._models = models
        self._generations = Generations("vectors", pool, generations, metrics)
        self._model_breaker = ModelBreaker(generations, self._set_all_aside)
        self._chunker = chunker
        self._announcer = announcer
        self._producer = producer
        self._dead = dead
        self._metrics = metrics
        self.batch_size = batch_size
        self._cached: OrderedDict[tuple[str, UUID], tuple[str, Vectors]] = OrderedDict()
        self._bills = Bills(pool, metrics)

    async def handle(self, batch: Sequence[Incoming]) -> None:
        await self._generations.serve(batch, self._converge)

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        try:
            document, generation = read_hint(record)
        except Poison:  # the record is no hint, and so names no document
            await self._dead.add(record, stage=self.name, error=error)
            return
        await set_aside(self._pool, "vectors", document, generation, error, self._metrics)

    async def put_off(self, record: Incoming, error: Retryable) -> bool:
        try:
            document, generation = read_hint(record)
        except Poison:
            return False
        await put_off(self._pool, "vectors", document, generation, error)
        return True

    async def _converge(self, generation: Generation, ids: Sequence[UUID]) -> None:
        await self._model_breaker.serve(generation, ids, self.converge)

    async def _set_all_aside(self, generation: Generation, ids: Sequence[UUID], error: Misconfigured) -> None:
        for id_ in ids:
            await set_aside(self._pool, "vectors", id_, generation.name, error, self._metrics)

    async def converge(self, generation: Generation, ids: Sequence[UUID]) -> None:
        """Make the table equal to the ledger for these documents, and announce those that both stores hold. Raises
        Retryable, and Poison when a round changes nothing."""
        open_ids = list(ids)
        embedded: dict[UUID, int] = {}
        refused: dict[UUID, set[UUID]] = {}
        last: list[_Plan] = []
        # Each round writes rows, or finds that something newer was accepted.
        while open_ids and (plans := await self._plan(generation, open_ids, refused)):
            if [(p.work.want_seq, p.missing) for p in plans] == [(p.work.want_seq, p.missing) for p in last]:
                raise Poison("no_progress", "nothing could be written: its text is not in the ledger (see the audit)")
            last = plans if all(p.missing for p in plans) else []
            finished: set[UUID] = set()
            for group in _groups(sorted(plans, key=lambda plan: len(plan.missing))):  # small ones wait for none
                ready: Sequence[_Plan] = group
                try:
                    await self._embed(generation, group, embedded, refused)
                except Alone:  # what is beside such a text waits for nothing, and is not paid for twice
                    ready = self._arrived(generation, group)
                    if not ready:
                        raise
                finished |= await self._write(generation, ready, embedded, refused)
            open_ids = [plan.work.identity.id for plan in plans if plan.work.identity.id not in finished]
        await self._announcer.announce(ids)

    def _arrived(self, generation: Generation, plans: Sequence[_Plan]) -> list[_Plan]:
        """Return what can be written of these plans with the vectors that are cached. The old passages of a document
        that is not complete stay."""
        ready = []
        for plan in plans:
            cached = [(generation.name, i) in self._cached for i in plan.missing]
            if all(cached):
                ready.append(plan)
            elif any(cached[:WRITE_CHUNKS]):
                ready.append(replace(plan, gone=()))
        return ready

    async def _plan(
        self, generation: Generation, ids: Sequence[UUID], refused: Mapping[UUID, set[UUID]]
    ) -> list[_Plan]:
        """Compare the ledger with the table; documents that are complete are absent. refused: chunks by document that
        the model has refused, besides those in the ledger."""
        with translated("vectors"):
            async with self._pool.connection() as connection:
                works = await work.load(connection, generation.name, "vectors", ids)
                works = await self._chunker.complete(connection, generation, works, "vectors")
                if not works:
                    return []  # all are complete, or the generation is retired and its table may have been dropped
                present = await chunk_rows.present(connection, generation, [w.identity.id for w in works])
        plans = []
        for w in works:
            rows = present.get(w.identity.id, set())
            diff = diff_vectors(w.chunk_ids, rows, {*w.refused, *refused.get(w.identity.id, ())})
            plans.append(_Plan(w, diff.write, diff.delete, bool(rows)))
        return plans

    async def _embed(
        self,
        generation: Generation,
        plans: Sequence[_Plan],
        embedded: dict[UUID, int],
        refused: dict[UUID, set[UUID]],
    ) -> None:
        """Embed the missing chunks that are not cached, equal texts once, and cache the result. Adds the number of
        newly embedded chunks to ``embedded``, and chunks that the model refuses to ``refused``, both by document.
        Raises Retryable, Misconfigured."""
        await self._bills.settle(generation)
        needed = [
            (p.work, i) for p in plans for i in p.missing[:WRITE_CHUNKS] if (generation.name, i) not in self._cached
        ]
        if needed and generation.state == "building":
            await self._copy_from_origin(generation, [i for _, i in needed])
            needed = [(w, i) for w, i in needed if (generation.name, i) not in self._cached]
        if not needed:
            return
        chunks = await self._reused(generation, await self._chunks(generation, needed))
        unique = list(dict.fromkeys(chunks.values()))
        if not unique:
            return  # the table had all of them, or their documents have changed: the next round loads the new ones
        model = await self._models.of(generation)
        count_tokens = self._chunker.counters(generation)
        texts, tokens = await asyncio.to_thread(embedding_texts, unique, generation, count_tokens)
        index = {chunk: n for n, chunk in enumerate(unique)}
        try:
            result = await model.embed_documents(texts)
        except (Retryable, Misconfigured) as error:
            counted_tokens = 0
            if isinstance(error, Alone):
                self._metrics.embedded.inc(len(error.arrived))
                counted_tokens = sum(unique[n].tokens for n in error.arrived)
                for _, id_ in needed:
                    if id_ in chunks and index[chunks[id_]] in error.arrived:
                        self._cache(generation, id_, chunks[id_].text, error.arrived[index[chunks[id_]]])
            await self._bills.add(generation, error.tokens, counted=counted_tokens)
            raise
        used("embedding")
        self._metrics.embedded.inc(len(unique) - len(result.refused))
        counted: set[int] = set()
        for w, id_ in needed:
            if id_ not in chunks:
                continue
            n = index[chunks[id_]]
            if n in result.refused:
                refused.setdefault(w.identity.id, set()).add(id_)
                log.warning("chunk_refused", document=str(w.identity.id), chunk=str(id_), reason=result.refused[n])
                continue
            self._cache(generation, id_, chunks[id_].text, result.vectors[n])
            if n not in counted:
                counted.add(n)
                embedded[w.identity.id] = embedded.get(w.identity.id, 0) + 1
        # Last, after the embeddings are cached, because it may raise.
        await self._bills.add(generation, result.tokens, counted=tokens)

    def _cache(self, generation: Generation, chunk: UUID, text: str, vector: Vectors) -> None:
        self._cached[generation.name, chunk] = (text, vector)
        while len(self._cached) > MAX_CACHED_VECTORS:
            self._cached.popitem(last=False)

    async def _reused(self, generation: Generation, chunks: Mapping[UUID, EmbeddedChunk]) -> dict[UUID, EmbeddedChunk]:
        """Cache the vectors of the chunks that the table already has, of whichever document; returns the others."""
        with translated("vectors"):
            async with self._pool.connection() as connection:
                known = await vectors.of_equal_chunks(connection, generation, list(dict.fromkeys(chunks.values())))
        for id_, chunk in chunks.items():
            if chunk in known:
                self._cache(generation, id_, chunk.text, known[chunk])
        self._metrics.reused.inc(sum(chunk in known for chunk in chunks.values()))
        return {id_: chunk for id_, chunk in chunks.items() if chunk not in known}

    async def _copy_from_origin(self, generation: Generation, chunks: Sequence[UUID]) -> None:
        """Cache the vectors that the generation's origin already has of these chunks."""
        with translated("vectors"):
            async with self._pool.connection() as connection:
                copied = await builds.origin_vectors(connection, generation.name, chunks)
        for chunk, text, vector in copied:
            self._cache(generation, chunk, text, np.asarray(vector, dtype=np.float32))

    async def _chunks(self, generation: Generation, needed: Sequence[tuple[Work, UUID]]) -> dict[UUID, EmbeddedChunk]:
        """The texts and titles of these chunks. Those of a document that has changed since it was loaded are
        absent."""
        works = {w.identity.id: w for w, _ in needed}
        with translated("vectors"):
            async with self._pool.connection() as connection:
                bodies = await work.bodies(connection, works.values())
        ids = {id_ for _, id_ in needed}
        chunks = {}
        for document, w in works.items():
            if document in bodies and (m := w.manifest) is not None:
                title = embedded_title(w.title, w.media_type, len(m.chunk_ids), generation.params)
                for id_, spans, tokens in zip(m.chunk_ids, m.spans, m.token_counts, strict=True):
                    if id_ in ids:
                        chunks[id_] = EmbeddedChunk(title, cut(bodies[document][0], spans), tokens)
        return chunks

    async def _write(
        self,
        generation: Generation,
        plans: Sequence[_Plan],
        embedded: dict[UUID, int],
        refused: Mapping[UUID, set[UUID]],
    ) -> set[UUID]:
        """Write a group of documents in one transaction, except those for which something newer was accepted: the next
        round plans them again. Returns the documents that are complete."""
        with translated("vectors"):
            async with self._pool.connection() as connection, connection.transaction():
                wants = await work.lock_wants(
                    connection, generation.name, "vectors", [p.work.identity.id for p in plans]
                )
                still = [p for p in plans if wants.get(p.work.identity.id) == p.work.want_seq]
                self._metrics.moved.labels(sink="vectors").inc(len(plans) - len(still))
                outside = await graph.writes_outside(connection, generation, {p.work.lane for p in still})
                rows = []
                for p in still:
                    for i in p.missing[:WRITE_CHUNKS]:
                        if cached := self._cached.get((generation.name, i)):
                            identity, in_graph = p.work.identity, p.work.lane not in outside
                            row = vectors.Row(i, identity.id, identity.tenant, p.work.access_id, *cached, in_graph)
                            rows.append(row)
                await vectors.insert(connection, generation, rows)
                await vectors.delete(connection, generation, [i for p in still for i in p.gone])
                stale = {p.work.identity.id: p.work.access_id for p in still if p.had_rows}
                unstamped = await vectors.restamp_access(connection, generation, stale, limit=WRITE_CHUNKS)
                written = {row.id for row in rows}
                complete = [
                    _settled(p.work, refused.get(p.work.identity.id, set()), embedded.get(p.work.identity.id, 0))
                    for p in still
                    if not unstamped and written | refused.get(p.work.identity.id, set()) >= set(p.missing)
                ]
                await work.settle_vectors(connection, generation.name, complete)
                carried = await self._reopen_entries(connection, generation, still, {id_ for id_, *_ in complete})
        if carried:
            await send_hints(self._producer, [(w.identity, w.generation, w.lane) for w in carried])
        for id_, *_ in complete:
            embedded.pop(id_, None)
        for i in written:
            self._cached.pop((generation.name, i), None)
        self._metrics.written.labels(sink="vectors").inc(len(written))
        self._metrics.deleted.labels(sink="vectors").inc(sum(len(p.gone) for p in still))
        return {id_ for id_, *_ in complete}

    async def _reopen_entries(
        self, connection: Connection, generation: Generation, plans: Sequence[_Plan], complete: Collection[UUID]
    ) -> list[PendingWork]:
        """Make the keyword entries of complete documents pending that carry vectors; returns the documents to hint."""
        carrying = [p.work.identity.id for p in plans if p.work.chunk_ids and p.work.identity.id in complete]
        if generation.vectors != "elasticsearch" or not carrying:
            return []
        return await work.reopen_for_vectors(
            connection, generation.name, carrying, again_in_seconds=HINTED_AGAIN_SECONDS
        )


def _groups(plans: Sequence[_Plan]) -> Iterator[list[_Plan]]:
    """Group documents so that the rows of a group fit into one transaction; a larger document is a group of its own."""
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


def _settled(w: Work, refused: set[UUID], embedded: int) -> tuple[UUID, int, list[UUID], int, str | None]:
    """A complete document, as ``work.settle_vectors`` takes it, with the chunks that the model has refused."""
    all_refused = sorted({*w.refused, *refused} & set(w.chunk_ids))
    reason = f"{len(all_refused)} of {len(w.chunk_ids)} chunks can not be embedded" if all_refused else None
    return w.identity.id, w.want_seq, all_refused, embedded, reason


class Bills:
    """Records the tokens that embedding has cost: in the metrics, and with the build that they were used for.

    Law: every token reaches the build's row once, whatever fails meanwhile, unless the process dies.
    """

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._owed: Counter[str] = Counter()
        """Tokens by generation that are not yet recorded with its build."""

    async def add(self, generation: Generation, billed: int, *, counted: int) -> None:
        """Record what one call has cost. billed: tokens according to the server; 0: it does not say. counted: tokens
        by our own count, used in that case. Raises Retryable when the row cannot be written; the tokens must not be
        added again, because the next ``settle`` writes them."""
        self._metrics.embedding_billed(
            billed, generation.service.price_per_million_tokens if generation.service else None
        )
        if generation.state == "building":
            self._owed[generation.name] += billed or counted
            await self.settle(generation)

    async def settle(self, generation: Generation) -> None:
        """Write the tokens that are not recorded with their build yet. Raises Retryable."""
        tokens = self._owed.pop(generation.name, 0)  # before the first await: two lanes may call this at once
        if not tokens:
            return
        try:
            with translated("vectors"):
                async with self._pool.connection() as connection:
                    await builds.add_tokens(connection, generation.name, tokens)
        except BaseException:  # a cancellation as well
            self._owed[generation.name] += tokens
            raise
