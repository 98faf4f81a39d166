"""Hybrid retrieval: ANN ∥ BM25 → verify against the ledger → fuse → a few passages a document.

Verified before fused, and enough asked for: ranks, scores and counts are as if what is withheld had never been there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.ledger import generations
from pipeline.settings import Settings
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection, Pool, open_pool, translated
from query import vectors
from query.access import Caller, Readable, identify, readable
from query.embedder import QueryEmbedder, bounded, require_same
from query.filters import NONE, Filters
from query.fusion import Ranking, diversify, fuse
from query.keywords import bm25
from query.model import (
    Candidate,
    Facts,
    Found,
    Mode,
    Passage,
    Ranker,
    Result,
    check,
)
from query.steps import Steps
from query.vectors import Tuning
from query.verify import verify

CANDIDATES = 50
"""Of each store that are fused."""
SPARE = 14
"""Asked for besides: one says where the ranking ends, the others stand in for what is withheld."""
MOST_CANDIDATES = 1000
"""Where asking for more ends, when much of what the stores offer is withheld."""

Embedding = asyncio.Task[tuple[Embedder, Vectors]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. A store that is slower is left out, and the answer says so."""

    keywords: float = 5.0
    vectors: float = 5.0
    ledger: float = 10.0


@dataclass(frozen=True, slots=True)
class _Scope:
    """What one query is asked within: pinned once, so that both stores answer for the same generation and access."""

    generation: Generation
    caller: Caller
    readable: Readable


@dataclass(slots=True)
class _Offer:
    """One store's candidates, best first, or why there are none."""

    candidates: list[Candidate] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    error: PenstockError | None = None

    def holds(self, depth: int, limit: int, passages: Mapping[UUID, Passage]) -> bool:
        """More than ``depth`` of what was offered may be shown, or there is no more to offer than was asked for."""
        return len(self.candidates) < limit or sum(c.chunk_id in passages for c in self.candidates) > depth

    def ranking(self, depth: int, passages: Mapping[UUID, Passage]) -> Ranking:
        shown = [c for c in self.candidates if c.chunk_id in passages]
        first = shown[:depth]
        following = shown[depth].score if len(shown) > depth else 0.0
        return Ranking([c.chunk_id for c in first], [c.score for c in first], following)


class Search:
    """Safe to share between tasks. Owns nothing that it is given."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        query_embedder: QueryEmbedder | None,
        *,
        timeouts: Timeouts | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """query_embedder: None answers by keyword alone."""
        self._pool = pool
        self._es = es
        self._embedder = query_embedder
        self._timeouts = timeouts or Timeouts()
        self._tuning = tuning or Tuning()

    async def identify(self, tenant: str, *, principals: Sequence[str] = (), tags: Sequence[str] = ()) -> Caller:
        """See ``query.access.identify``. Raises Retryable."""
        async with self._connection(self._timeouts.ledger, "search") as connection:
            return await identify(connection, tenant, principals=principals, tags=tags)

    async def search(
        self,
        query: str,
        caller: Caller,
        *,
        top: int = 10,
        mode: Mode = "hybrid",
        filters: Filters = NONE,
        rerank: bool = True,
    ) -> Found:
        """The best ``top`` passages that this caller may read now.

        filters: what may be found besides. rerank: where a reranker is set, it has the last word on the order.
        Law: fewer than ``top`` only when no more can be found. A store or model that fails is left out and named in
        ``steps``. Raises BadQuery; Retryable or Misconfigured when nothing can answer, or the ledger cannot be asked.
        """
        text = check(query, top, mode)
        steps = Steps()
        embedding: Embedding | None = None
        if mode != "keyword" and self._embedder is not None:
            embedding = asyncio.create_task(steps.timed("embed", self._embedder.embed(text)))
        try:
            scope = await steps.timed("access", self._pin(caller))
            results = await self._retrieve(text, scope, embedding, steps, top, mode)
        finally:
            if embedding is not None:
                embedding.cancel()
                await asyncio.gather(embedding, return_exceptions=True)
        return Found(results, steps.done, steps.took_ms)

    async def _pin(self, caller: Caller) -> _Scope:
        async with self._connection(self._timeouts.ledger, "search") as connection:
            may = await readable(connection, caller)
            # Tags that no readable set mentions open nothing: whoever is in 5,000 groups need not carry them along.
            needed = Caller(caller.tenant, frozenset({*may.acl_tags, *may.required_tags}))
            return _Scope(await generations.active(connection), needed, may)

    async def _retrieve(
        self, text: str, scope: _Scope, embedding: Embedding | None, steps: Steps, top: int, mode: Mode
    ) -> list[Result]:
        # Who may read nothing goes the same way as who finds nothing: a shortcut would tell them apart.
        depth = max(CANDIDATES, 2 * top)
        limit = depth + SPARE
        while True:
            asked: dict[Ranker, Awaitable[_Offer]] = {}
            if mode != "keyword":
                asked["vector"] = self._vectors(scope, embedding, steps, limit)
            if mode != "vector":
                asked["keyword"] = self._keywords(text, scope, steps, limit)
            offers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
            _require_one(offers)
            passages = await self._verify(scope, offers, steps)
            if limit == MOST_CANDIDATES or all(o.holds(depth, limit, passages) for o in offers.values()):
                return _ranked(offers, passages, steps, depth, top)
            limit = min(MOST_CANDIDATES, limit * 4)

    async def _vectors(self, scope: _Scope, embedding: Embedding | None, steps: Steps, limit: int) -> _Offer:
        seconds = self._timeouts.vectors
        offer = _Offer()
        try:
            if embedding is None:
                raise Misconfigured("no embedding model is set: only keyword search can answer")
            made_by, vector = await asyncio.shield(embedding)
            with steps.step("vectors") as offer.facts:
                require_same(made_by, scope.generation)
                async with self._connection(2 * seconds, "vector search") as connection:
                    asked = connection, scope.generation, scope.caller, scope.readable
                    scan = await vectors.choose(*asked, limit=limit, tuning=self._tuning)
                    offer.candidates, _ = await vectors.nearest(  # how it scanned would tell how much others have
                        *asked, vector, scan, limit=limit, timeout_seconds=seconds, tuning=self._tuning
                    )
        except PenstockError as error:
            offer.error = error
        return offer

    async def _keywords(self, text: str, scope: _Scope, steps: Steps, limit: int) -> _Offer:
        seconds = self._timeouts.keywords
        offer = _Offer()
        try:
            with steps.step("keywords") as offer.facts:
                async with bounded(seconds, "Elasticsearch"):
                    offer.candidates = await bm25(
                        self._es, scope.generation, scope.caller, scope.readable, text,
                        limit=limit, timeout_seconds=seconds,
                    )  # fmt: skip
        except PenstockError as error:
            offer.error = error
        return offer

    async def _verify(self, scope: _Scope, offers: Mapping[Ranker, _Offer], steps: Steps) -> dict[UUID, Passage]:
        with steps.step("verify"):
            async with self._connection(self._timeouts.ledger, "search") as connection:
                passages = await verify(
                    connection, scope.generation.name, scope.caller,
                    (c for offer in offers.values() for c in offer.candidates),
                )  # fmt: skip
        return passages

    @asynccontextmanager
    async def _connection(self, seconds: float, doing: str) -> AsyncIterator[Connection]:
        async with bounded(seconds, "Postgres"):
            with translated(doing):
                async with self._pool.connection() as connection:
                    yield connection


def _require_one(offers: Mapping[Ranker, _Offer]) -> None:
    """Raise when no store answered."""
    errors = [offer.error for offer in offers.values() if offer.error is not None]
    if len(errors) == len(offers):
        kind = Retryable if any(isinstance(error, Retryable) for error in errors) else Misconfigured
        raise kind("; ".join(dict.fromkeys(str(error) for error in errors))) from errors[0]


def _ranked(
    offers: Mapping[Ranker, _Offer], passages: Mapping[UUID, Passage], steps: Steps, depth: int, top: int
) -> list[Result]:
    with steps.step("fuse") as facts:
        texts = {c.chunk_id: c.text for offer in offers.values() for c in offer.candidates}
        rankings = {ranker: offer.ranking(depth, passages) for ranker, offer in offers.items() if offer.error is None}
        for ranker, ranking in rankings.items():
            offers[ranker].facts["passages"] = len(ranking.ids)
        first = diversify(fuse(rankings), lambda i: passages[i].document_id, top)
        facts["results"] = len(first)
    return [Result(passages[f.chunk_id], texts[f.chunk_id], f.score, f.ranks) for f in first]


@asynccontextmanager
async def open_search(settings: Settings, query_embedder: QueryEmbedder | None) -> AsyncIterator[Search]:
    """A Search on connections of its own, closed at the end together with the embedder. Raises Retryable when Postgres
    cannot be reached."""
    es = connect(settings.elasticsearch)
    try:
        async with open_pool(settings.postgres) as pool:
            yield Search(pool, es, query_embedder)
    finally:
        if query_embedder is not None:
            await query_embedder.aclose()
        await es.close()
