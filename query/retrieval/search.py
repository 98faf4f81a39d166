"""Hybrid retrieval: ANN ∥ BM25 → verify against the ledger → fuse → feedback → rerank → arrange.

Candidates are verified before they are fused, and a store is queried again if much is withheld. Ranks, scores and
counts are therefore the same as if the withheld passages did not exist.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.core.identifiers import identifiers
from pipeline.core.model import Generation
from pipeline.core.publication import Publication
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import time_limit
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool
from query.access.callers import Caller, identify, readable
from query.access.facets import count
from query.access.filters import NONE, Filters, require_declared
from query.access.filters import check as check_filters
from query.access.freshness import certificates
from query.access.published import wait_for
from query.access.verify import describe, verify
from query.embedding.embedders import Embedders
from query.embedding.shared import Embedded, SharedVectors
from query.model import (
    AtLeast,
    Facet,
    Mode,
    Passage,
    Result,
    SearchResults,
    Sort,
    SourceFreshness,
    check,
    check_sort,
)
from query.rerank.guarded import open_reranker
from query.rerank.reranker import Reranker, rerank
from query.retrieval import cursor as cursors
from query.retrieval.arrange import Group, Hit, arrange, by_time, exact_first, present, refreshed
from query.retrieval.cache import (
    Cache,
    CachedResults,
    Key,
    access_digest,
    changed_since,
    packed,
    snapshot,
    unpacked,
)
from query.retrieval.cursor import MAX_PAGED, Cursor, search_digest
from query.retrieval.feedback import rank_with_feedback
from query.retrieval.keywords import MAX_IDENTIFIERS
from query.retrieval.many import computed
from query.retrieval.ranking import floors_of, has_more, is_relevant, nearest_cosine, rank_candidates, weights_of
from query.retrieval.steps import Steps
from query.retrieval.stores import Embedding, Query, Scope, Stores, Timeouts
from query.retrieval.vectors import Tuning
from query.settings import QuerySettings, RerankSettings, RetrievalSettings
from query.telemetry import QueryMetrics

__all__ = ["Search", "Timeouts", "Tuning", "open_search"]

CANDIDATES = 64
"""How many candidates of each store are fused."""
MAX_DEPTH = 1_000
"""The most candidates of each store, when most of the candidates are duplicates and the search goes deeper."""
MAX_PAGE_CHARACTERS = 4_000_000
"""The most text of a page of results, which takes up to 80 MB as a response; the others come on the next page. A
hundred passages that were made to be long have three times as much."""
SPARE = 10
"""Candidates that are requested in addition: one marks where the ranking ends, the others replace withheld ones."""


class Search:
    """The search over both stores. Safe to share between tasks. ``aclose`` ends what it began, and does not close its
    arguments."""

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
        rerank_floor: float | None = None,
    ) -> None:
        """embedders: None means keyword search only. rerank_pool: how many passages the reranker reads. rerank_floor:
        replaces the calibrated one."""
        self._settings = settings or RetrievalSettings()
        tuning = tuning or Tuning(ef_search=self._settings.ef_search)
        self._stores = Stores(pool, es, timeouts or Timeouts(), tuning, metrics)
        self._metrics = metrics
        self._vectors = (
            SharedVectors(
                embedders, self._settings.cached_queries, on_lookup=lambda outcome: self._count("embeddings", outcome)
            )
            if embedders
            else None
        )
        self._reranker = reranker
        self._rerank_pool = rerank_pool
        self._rerank_floor = rerank_floor
        self._cache = Cache(self._settings.cached_queries)
        self._active_searches = 0
        self._pinned: Generation | None = None
        """The generation of the previous query, which is most likely that of the next one, too."""

    async def identify(self, tenant: str, *, principals: Sequence[str] = (), tags: Sequence[str] = ()) -> Caller:
        """See ``query.access.callers.identify``. Raises Retryable."""
        async with self._stores.connection(self._stores.timeouts.ledger, "search", tenant) as connection:
            return await identify(connection, tenant, principals=principals, tags=tags)

    async def wait_for(
        self,
        publications: Sequence[Publication],
        tenant: str,
        *,
        principals: Sequence[str] = (),
        tags: Sequence[str] = (),
        seconds: float,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> AtLeast | None:
        """Wait until this caller can see the changes; None if there are none. See ``query.access.published.wait_for``.
        Raises Retryable."""
        if not publications:
            return None
        connect = partial(self._stores.connection, self._stores.timeouts.ledger, "at-least", tenant)
        return await wait_for(
            connect, publications, tenant, principals=principals, tags=tags, seconds=seconds, pause=pause
        )

    def over(self, stores: Callable[[Stores], Stores]) -> Search:
        """The same search over other stores, with a cache of its own. stores: makes them from the live ones."""
        other = copy(self)
        other._stores = stores(self._stores)
        other._cache = Cache(0)
        other._active_searches = 0
        return other

    async def aclose(self) -> None:
        await self._stores.aclose()

    async def require_index(self, generation: Generation) -> None:
        """Raises IndexFenced, Retryable or Misconfigured while keyword search is not possible."""
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
        sort: Sort = "relevance",
        cursor: str | None = None,
        facets: Sequence[str] = (),
        generation: Generation | None = None,
        embedded: Embedded | None = None,
        certify: bool = True,
    ) -> SearchResults:
        """The best ``top`` passages that this caller may read now; none, if nothing is relevant to the query.

        rerank: whether the reranker, if one is configured, decides the order.
        sort: ``newest`` and ``oldest`` order the passages that have most of the query's words by their document's time;
        those without a time come last. cursor: that of the previous page; the other arguments are the same.
        facets: declared keys whose values are counted.
        embedded: the query's vector by the model of ``generation``; None: it is computed.
        certify: whether the results have freshness certificates.
        generation: None searches the active one. The model, table and index are always of the same generation.
        Law: there are fewer than ``top`` only if no more match, or their texts are very long (``of_a_page``). A store
        or model that fails is left out and named in ``steps``. Raises BadQuery; Retryable or Misconfigured when no
        store answers or the ledger is not available.
        """
        check_sort(sort, mode)
        question = Query(check(query, top, mode), top, mode if sort == "relevance" else "keyword", rerank, sort)
        check_filters(filters)
        before = cursors.read(
            cursor, search_digest([caller.tenant, question.text, question.mode, rerank, sort, filters])
        )
        steps = Steps()
        likely = generation or self._pinned
        embedding = None if likely is None else self._embedding(question, caller, likely, steps, embedded)
        self._active_searches += 1
        try:
            scope = await steps.timed("access", self._pin(caller, filters, generation, certify=certify))
            if scope.generation != likely:
                await _cancel(embedding)
                embedding = self._embedding(question, caller, scope.generation, steps)
            if generation is None:
                self._pinned = scope.generation
            key = Key(
                question.text, mode, top, filters, rerank, sort, cursor, scope.generation, caller.tenant, scope.access
            )
            outcome = await self._from_cache(key, scope, steps)
            if outcome is None:
                outcome = await self._search(question, scope, embedding, steps, key, before)
        finally:
            self._active_searches -= 1
            await _cancel(embedding)
        counted = await self.facets(caller, facets, filters)
        return replace(outcome, before=str(before), facets=counted, freshness=scope.freshness)

    async def freshness(self, caller: Caller, sources: Sequence[str] = ()) -> tuple[SourceFreshness, ...]:
        """See ``query.access.freshness.certificates``; none while the ledger does not answer."""
        try:
            async with self._stores.connection(self._stores.timeouts.ledger, "freshness", caller.tenant) as connection:
                access = await readable(connection, caller)
                active = await generations.active(connection)
                return await certificates(connection, caller.tenant, access, sources, active.name)
        except PenstockError:
            return ()

    async def facets(self, caller: Caller, names: Sequence[str], filters: Filters = NONE) -> dict[str, Facet]:
        """See ``query.access.facets.count``. Raises BadQuery and Retryable."""
        if not names:
            return {}
        check_filters(filters)
        async with self._stores.connection(self._stores.timeouts.ledger, "facets", caller.tenant) as connection:
            return await count(connection, caller, list(dict.fromkeys(names)), filters)

    def _embedding(
        self,
        question: Query,
        caller: Caller,
        generation: Generation,
        steps: Steps,
        embedded: Embedded | None = None,
    ) -> Embedding | None:
        if question.mode == "keyword" or self._vectors is None:
            return None
        return asyncio.create_task(steps.timed("embed", self.embed(question.text, caller, generation, embedded)))

    async def embed(
        self, text: str, caller: Caller, generation: Generation, embedded: Embedded | None = None
    ) -> Embedded:
        """The vector of a query, and the model that made it. embedded: is returned, if there is one. Raises Retryable
        or Misconfigured."""
        if embedded is not None:
            return embedded
        if self._vectors is None:
            raise Misconfigured("no embedding model is configured")
        async with time_limit(self._stores.timeouts.embed, "the embedding model"):
            return await self._vectors.embed(generation, caller, text)

    async def _pin(self, caller: Caller, filters: Filters, generation: Generation | None, *, certify: bool) -> Scope:
        """certify: whether freshness certificates are read, too."""
        async with self._stores.connection(self._stores.timeouts.ledger, "search", caller.tenant) as connection:
            access = await readable(connection, caller)
            await require_declared(connection, caller.tenant, filters)
            # Tags that no readable set mentions grant nothing: a caller in 5,000 groups does without them from here on.
            needed = Caller(caller.tenant, frozenset({*access.acl_tags, *access.required_tags}))
            pinned = generation or await generations.active(connection)
            before = await snapshot(connection)
            sources = filters.sources
            fresh = await certificates(connection, caller.tenant, access, sources, pinned.name) if certify else ()
        return Scope(pinned, needed, access, filters, before, access_digest(access), fresh)

    # The cache

    async def _from_cache(self, key: Key, scope: Scope, steps: Steps) -> SearchResults | None:
        """The cached results, if they are still valid."""
        cached = self._cache.results(key)
        if cached is not None:
            tenant = scope.caller.tenant
            async with self._stores.connection(self._stores.timeouts.ledger, "search", tenant) as connection:
                counted = unpacked(cached.counted)
                current = await verify(connection, scope.generation.name, scope.caller, counted, scope.filters)
                since = cached.snapshot, scope.generation.name, scope.caller, scope.readable
                if len(current) < len(counted) or await changed_since(connection, *since):
                    self._cache.forget(key)
                    cached = None
                else:  # a heading may have changed although the text below it is the same
                    below = [result.passage for result in cached.results if result.headings]
                    details = await describe(connection, scope.generation.name, below)
        self._count("results", "hit" if cached is not None else "miss")
        if cached is None:
            return None
        # The facts of the cached steps hold for this response, too; their times might reveal another caller's query.
        results = [refreshed(result, current, details) for result in cached.results]
        done = [replace(step, took_ms=0.0) for step in cached.steps if step.name not in {s.name for s in steps.done}]
        return SearchResults(results, [*steps.done, *done], steps.took_ms, cached.relevant, cached.cursor)

    def _cache_results(self, key: Key, results: SearchResults, passages: Mapping[UUID, Passage], before: str) -> None:
        if results.degraded:
            return
        counted = packed(passages.values())
        self._cache.store_results(
            key,
            CachedResults(results.results, results.steps, results.relevant, results.cursor, counted, before),
        )

    def _count(self, cache: str, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.cache.labels(cache, outcome).inc()

    # The search

    async def _search(
        self, question: Query, scope: Scope, embedding: Embedding | None, steps: Steps, key: Key, before: Cursor
    ) -> SearchResults:
        # A caller without access takes the same path as one without matches, so that times do not distinguish them.
        depth = min(MAX_DEPTH, max(CANDIDATES, 2 * question.top + len(before.chunks)))
        while True:
            offers, passages = await self._stores.offers(question, scope, embedding, steps, depth=depth, spare=SPARE)
            more = has_more(offers, passages, depth)
            hits = rank_candidates(offers, passages, steps, depth, weights_of(self._settings))
            if question.sort != "relevance":
                hits = by_time(hits, question.sort, complete=not more or depth >= MAX_DEPTH)
            if depth >= MAX_DEPTH or not more or await self._suffice(question, _unseen(hits, before)):
                break
            depth = min(MAX_DEPTH, 4 * depth)  # duplicates count once
        reranker = self._reranker if question.rerank else None
        floors = floors_of(
            scope.generation,
            self._settings,
            reranker=reranker.model if reranker else None,
            rerank=self._rerank_floor,
        )
        cosine = nearest_cosine(offers, passages)
        is_decided = question.sort != "relevance" or bool(before.chunks)  # an earlier page was relevant
        relevant = bool(hits)
        if not is_decided:
            relevant = await computed(hits, partial(is_relevant, question.text, hits, cosine, floors, steps))
        skipped_feedback = False
        if relevant and hits and embedding is not None and self._settings.feedback and question.mode == "hybrid":
            skipped_feedback = self._active_searches > self._settings.feedback_at_once
            if skipped_feedback:
                with steps.step("feedback") as facts:
                    facts["skipped"] = "too many concurrent searches"
            elif reranked := await rank_with_feedback(
                self._stores,
                question,
                scope,
                embedding,
                steps,
                offers,
                passages,
                hits,
                depth=depth,
                settings=self._settings,
            ):
                hits = reranked
        hits = _unseen(hits, before) if relevant or floors.rerank is not None else []
        hits = await self._ordered(question, scope, hits, steps)
        if not is_decided and any(hit.rerank_score is not None for hit in hits):
            relevant = await computed(hits, partial(is_relevant, question.text, hits, cosine, floors, steps))
        hits = hits if relevant else []
        results, is_full = await self._results(question, scope, hits, steps)
        following = _cursor_after(before, results, hits, full=is_full, more=more)
        outcome = SearchResults(results, steps.done, steps.took_ms, relevant, following)
        if not skipped_feedback:  # so that a later search, under less load, has the better ranking
            self._cache_results(key, outcome, passages, scope.snapshot)
        return outcome

    async def _suffice(self, question: Query, hits: Sequence[Hit]) -> bool:
        return len(await self._arranged(question, hits)) == question.top

    async def _arranged(self, question: Query, hits: Sequence[Hit]) -> list[Group]:
        per_document = self._settings.per_document
        return await computed(hits, partial(arrange, hits, top=question.top, per_document=per_document))

    async def _ordered(self, question: Query, scope: Scope, hits: Sequence[Hit], steps: Steps) -> list[Hit]:
        """The hits as they are shown: by time, or by the reranker, but those with an identifier of the query first."""
        by_relevance = question.sort == "relevance"
        named = identifiers(question.text)[:MAX_IDENTIFIERS] if by_relevance and question.mode != "vector" else ()
        hits = await computed(hits, partial(exact_first, hits, named))
        if by_relevance and question.rerank and self._reranker is not None:
            hits = await rerank(
                self._reranker, question.text, hits, tenant=scope.caller.tenant, pool=self._rerank_pool, steps=steps
            )
            # Again, because an identifier of the query outweighs similarity.
            hits = await computed(hits, partial(exact_first, hits, named))
        return list(hits)

    async def _results(
        self, question: Query, scope: Scope, hits: Sequence[Hit], steps: Steps
    ) -> tuple[list[Result], bool]:
        """The results of a page, and whether no further one has room in it."""
        with steps.step("arrange") as facts:
            groups = await self._arranged(question, hits)
            shown = [hit.passage for group in groups for hit in group.hits]
            details = await self._stores.describe(scope, shown)
            results = of_a_page([present(group, details) for group in groups])
            facts["results"] = len(results)
        return results, len(results) == question.top or len(results) < len(groups)


def of_a_page(results: Sequence[Result]) -> list[Result]:
    """The first results, up to MAX_PAGE_CHARACTERS of text; at least one."""
    total = list(accumulate(len(result.text) for result in results))
    return list(results[: max(1, bisect_right(total, MAX_PAGE_CHARACTERS))])


def _unseen(hits: Sequence[Hit], before: Cursor) -> list[Hit]:
    """The chunks that no earlier page returned."""
    return [hit for hit in hits if not before.shows(hit.passage.chunk_id)]


def _cursor_after(
    before: Cursor, results: Sequence[Result], hits: Sequence[Hit], *, full: bool, more: bool
) -> str | None:
    """The cursor of the next page, if there may be one. more: whether candidates were left out."""
    after = before.after(results)
    rest = more or any(not after.shows(hit.passage.chunk_id) for hit in hits)
    return str(after) if full and rest and after.results < MAX_PAGED and len(after.chunks) < MAX_DEPTH else None


async def _cancel(embedding: Embedding | None) -> None:
    if embedding is not None:
        embedding.cancel()
        await asyncio.gather(embedding, return_exceptions=True)


@asynccontextmanager
async def open_search(
    settings: Settings, embedders: Embedders | None, query: QuerySettings | None = None
) -> AsyncIterator[Search]:
    """A Search on connections of its own, closed at the end together with the embedders.

    query: None uses the default settings without a reranker. Raises Retryable when Postgres cannot be reached, and
    Misconfigured.
    """
    rerank = query.rerank if query else RerankSettings(url=None, onnx_path=None)
    async with AsyncExitStack() as closing:
        if embedders is not None:
            closing.push_async_callback(embedders.aclose)
        es = connect(settings.elasticsearch, reads_only=True)
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
            rerank_floor=rerank.floor,
        )
