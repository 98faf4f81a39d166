"""Hybrid retrieval: ANN ∥ BM25 → verify against the ledger → fuse → second look → rerank → arrange.

Verified before fused, and asked again where much is withheld: ranks, scores and counts are as if what is withheld had
never been there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identifiers import identifiers
from pipeline.core.model import Generation
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import time_limit
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool
from query.access.callers import Caller, identify, readable
from query.access.filters import NONE, Filters
from query.access.filters import check as check_filters
from query.access.verify import verify
from query.embedding.embedders import Embedders, is_same
from query.model import Found, Mode, Passage, Result, check
from query.rerank.guarded import open_reranker
from query.rerank.reranker import Reranker, rerank
from query.retrieval.arrange import Hit, arrange, exact_first, present, renamed
from query.retrieval.cache import Cache, Embedded, Key, Ref, Remembered, access_of, changed_since, snapshot
from query.retrieval.feedback import second_look
from query.retrieval.ranking import ranked, reaches_further, relevant
from query.retrieval.steps import Steps
from query.retrieval.stores import Embedding, Question, Scope, Stores, Timeouts
from query.retrieval.vectors import Tuning
from query.settings import QuerySettings, RerankSettings, RetrievalSettings
from query.telemetry import QueryMetrics

__all__ = ["Search", "Timeouts", "Tuning", "open_search"]

CANDIDATES = 64
"""Of each store that are fused."""
DEEPEST = 1_000
"""Where looking for more passages ends, when those that were found are few and the same again and again."""
SPARE = 10
"""Asked for besides: one says where the ranking ends, the others stand in for what is withheld."""


class Search:
    """Safe to share between tasks. Owns nothing that it is given."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        embedders: Embedders | None,
        *,
        timeouts: Timeouts | None = None,
        tuning: Tuning | None = None,
        settings: RetrievalSettings | None = None,
        metrics: QueryMetrics | None = None,
        reranker: Reranker | None = None,
        rerank_pool: int = 50,
    ) -> None:
        """embedders: None answers by keyword alone. rerank_pool: passages that the reranker reads."""
        self._stores = Stores(
            pool,
            es,
            timeouts or Timeouts(),
            tuning or Tuning(),
            *([metrics.index_fenced.set] if metrics else []),
        )
        self._embedders = embedders
        self._settings = settings or RetrievalSettings()
        self._metrics = metrics
        self._reranker = reranker
        self._rerank_pool = rerank_pool
        self._cache = Cache(self._settings.cached_queries)
        self._under_way = 0
        self._pinned: Generation | None = None
        """By the query before: most likely the next one's, too."""

    async def identify(self, tenant: str, *, principals: Sequence[str] = (), tags: Sequence[str] = ()) -> Caller:
        """See ``query.access.callers.identify``. Raises Retryable."""
        async with self._stores.connection(self._stores.timeouts.ledger, "search", tenant) as connection:
            return await identify(connection, tenant, principals=principals, tags=tags)

    async def require_index(self, generation: Generation) -> None:
        """Raises IndexFenced, Retryable or Misconfigured when keywords cannot be searched for now."""
        await self._stores.require_index(generation)

    async def search(
        self,
        query: str,
        caller: Caller,
        *,
        top: int = 10,
        mode: Mode = "hybrid",
        filters: Filters = NONE,
        rerank: bool = True,
        generation: Generation | None = None,
    ) -> Found:
        """The best ``top`` passages that this caller may read now; none, where nothing is about the question.

        filters: what may be found besides. rerank: where a reranker is set, it has the last word on the order.
        generation: None asks the one that is active now; whichever it is, its model, table and index answer together.
        Law: fewer than ``top`` only when no more can be found. A store or model that fails is left out and named in
        ``steps``. Raises BadQuery; Retryable or Misconfigured when nothing can answer, or the ledger cannot be asked.
        """
        question = Question(check(query, top, mode), top, mode, rerank)
        check_filters(filters)
        steps = Steps()
        likely = generation or self._pinned
        embedding = None if likely is None else self._embedding(question, caller, likely, steps)
        self._under_way += 1
        try:
            scope = await steps.timed("access", self._pin(caller, filters, generation))
            if scope.generation != likely:
                await _give_up(embedding)
                embedding = self._embedding(question, caller, scope.generation, steps)
            if generation is None:
                self._pinned = scope.generation
            key = Key(question.text, mode, top, filters, rerank, scope.generation, caller.tenant, scope.access)
            if (known := await self._again(key, scope, steps)) is not None:
                return known
            return await self._find(question, scope, embedding, steps, key)
        finally:
            self._under_way -= 1
            await _give_up(embedding)

    def _embedding(self, question: Question, caller: Caller, generation: Generation, steps: Steps) -> Embedding | None:
        if question.mode == "keyword" or self._embedders is None:
            return None
        work = self._embed(question.text, caller, generation, self._embedders)
        return asyncio.create_task(steps.timed("embed", work))

    async def _embed(self, text: str, caller: Caller, generation: Generation, embedders: Embedders) -> Embedded:
        known = self._cache.vector(generation, caller, text)
        self._count("embeddings", hit=known is not None)
        if known is None:
            async with time_limit(self._stores.timeouts.embed, "the embedding model"):
                known = await embedders.of(generation).embed(text)
            if is_same(known[0], generation):
                self._cache.keep_vector(generation, caller, text, known)
        return known

    async def _pin(self, caller: Caller, filters: Filters, generation: Generation | None) -> Scope:
        async with self._stores.connection(self._stores.timeouts.ledger, "search", caller.tenant) as connection:
            may = await readable(connection, caller)
            # Tags that no readable set mentions open nothing: whoever is in 5,000 groups need not carry them along.
            needed = Caller(caller.tenant, frozenset({*may.acl_tags, *may.required_tags}))
            pinned = generation or await generations.active(connection)
            taken = await snapshot(connection)
        return Scope(pinned, needed, may, filters, taken, access_of(may))

    # What was answered before

    async def _again(self, key: Key, scope: Scope, steps: Steps) -> Found | None:
        """The remembered answer, if it is today's."""
        known = self._cache.answer(key)
        if known is not None:
            tenant = scope.caller.tenant
            async with self._stores.connection(self._stores.timeouts.ledger, "search", tenant) as connection:
                current = await verify(connection, scope.generation.name, scope.caller, known.counted, scope.filters)
                since = known.snapshot, scope.generation.name, scope.caller, scope.readable
                if len(current) < len(known.counted) or await changed_since(connection, *since):
                    self._cache.forget(key)
                    known = None
        self._count("results", hit=known is not None)
        if known is None:
            return None
        # Of what was done then the facts are told, which are this answer's, and no times: whose question it was that
        # is remembered is nobody's business.
        results = [renamed(result, current) for result in known.results]
        done = [replace(step, took_ms=0.0) for step in known.steps if step.name not in {s.name for s in steps.done}]
        return Found(results, [*steps.done, *done], steps.took_ms, known.relevant)

    def _keep(self, key: Key, found: Found, passages: Mapping[UUID, Passage], taken: str) -> None:
        if found.degraded:
            return
        counted = [Ref(passage.chunk_id, passage.document_id) for passage in passages.values()]
        self._cache.keep_answer(key, Remembered(found.results, found.steps, found.relevant, counted, taken))

    def _count(self, cache: str, *, hit: bool) -> None:
        if self._metrics is not None:
            self._metrics.cache.labels(cache, "hit" if hit else "miss").inc()

    # What is worked out

    async def _find(
        self, question: Question, scope: Scope, embedding: Embedding | None, steps: Steps, key: Key
    ) -> Found:
        # Who may read nothing goes the same way as who finds nothing: a shortcut would tell them apart.
        depth = max(CANDIDATES, 2 * question.top)
        while True:
            offers, passages = await self._stores.offers(question, scope, embedding, steps, depth=depth, spare=SPARE)
            hits = ranked(offers, passages, steps, depth)
            if depth >= DEEPEST or not reaches_further(offers, passages, depth) or self._suffice(question, hits):
                break
            depth = min(DEEPEST, 4 * depth)  # a hundred copies of one passage are one passage
        about = relevant(question.text, hits, offers, passages, scope.generation.model, steps)
        in_haste = False
        if about and hits and embedding is not None and self._settings.feedback and question.mode == "hybrid":
            in_haste = self._under_way > self._settings.feedback_at_once
            if in_haste:
                with steps.step("feedback") as facts:
                    facts["skipped"] = "many ask at this moment"
            elif again := await second_look(
                self._stores, question, scope, embedding, steps, offers, passages, hits, depth=depth
            ):
                hits = again
        results = await self._results(question, scope, hits if about else [], steps)
        outcome = Found(results, steps.done, steps.took_ms, about)
        if not in_haste:  # who asks again in a calmer moment shall have the better answer
            self._keep(key, outcome, passages, scope.snapshot)
        return outcome

    def _suffice(self, question: Question, hits: Sequence[Hit]) -> bool:
        return len(arrange(hits, top=question.top, per_document=self._settings.per_document)) == question.top

    async def _results(self, question: Question, scope: Scope, hits: Sequence[Hit], steps: Steps) -> list[Result]:
        named = identifiers(question.text) if question.mode != "vector" else ()
        hits = exact_first(hits, named)
        if question.rerank and self._reranker is not None:
            hits = await rerank(
                self._reranker, question.text, hits, tenant=scope.caller.tenant, pool=self._rerank_pool, steps=steps
            )
            hits = exact_first(hits, named)  # what a question names by its identifier, no likeness outweighs
        with steps.step("arrange") as facts:
            groups = arrange(hits, top=question.top, per_document=self._settings.per_document)
            shown = [hit.passage for group in groups for hit in group.hits]
            details = await self._stores.describe(scope, shown)
            results = [present(group, details) for group in groups]
            facts["results"] = len(results)
        return results


async def _give_up(embedding: Embedding | None) -> None:
    if embedding is not None:
        embedding.cancel()
        await asyncio.gather(embedding, return_exceptions=True)


@asynccontextmanager
async def open_search(
    settings: Settings, embedders: Embedders | None, query: QuerySettings | None = None
) -> AsyncIterator[Search]:
    """A Search on connections of its own, closed at the end together with the embedders. query: None reranks nothing
    and takes the defaults. Raises Retryable when Postgres cannot be reached, Misconfigured."""
    rerank = query.rerank if query else RerankSettings(url=None, onnx_path=None)
    async with AsyncExitStack() as closing:
        if embedders is not None:
            closing.push_async_callback(embedders.aclose)
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        reranker = await open_reranker(rerank)
        if reranker is not None:
            closing.push_async_callback(reranker.aclose)
        pool = await closing.enter_async_context(open_pool(settings.postgres, "queries"))
        yield Search(
            pool,
            es,
            embedders,
            settings=query.retrieval if query else None,
            reranker=reranker,
            rerank_pool=rerank.pool,
        )
