"""Candidates of both stores for a query, verified against the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from uuid import UUID

from cachetools import TTLCache
from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import IndexFenced, Misconfigured, PenstockError, Retryable
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.runtime.tasks import gather_or_cancel, time_limit
from pipeline.stores import index_fence
from pipeline.stores.elasticsearch import translated as es_translated
from pipeline.stores.postgres import Connection, Pool, translated
from pipeline.stores.vectors import of_ids
from query.access.callers import Caller, Readable
from query.access.filters import Filters
from query.access.tenant_rows import NO_TENANT, read_rows_of
from query.access.verify import Detail, describe, verify
from query.embedding.embedders import require_same
from query.embedding.shared import Embedded
from query.model import Candidate, Facts, Mode, Passage, Ranker, Sort, SourceFreshness
from query.retrieval import vectors
from query.retrieval.cursor import search_digest
from query.retrieval.fusion import Ranking
from query.retrieval.keywords import bm25, bm25_scores
from query.retrieval.recall import RecallCheck
from query.retrieval.steps import Steps
from query.retrieval.vectors import NeighbourQuery, Scan, Tuning
from query.telemetry import QueryMetrics

SCAN_TIME_SHARE = 0.95
"""The share of a scan's time after which Postgres ends it by itself, before we would have to cancel it."""
MAX_CACHED_SCANS, SCAN_TTL_SECONDS = 1_000, 5.0
"""The cache of chosen scans: the best one depends on the size of the table and on its graph, which change slowly."""
INDEX_CHECK_SECONDS = 10.0
"""How long a successful check that a keyword index is the one that the ledger filled stays valid."""
INDEX_TRUST_SECONDS = 60.0
"""How long an index is still searched after its last successful check when new checks fail: a busy server is no reason
to assume that the index has changed."""
COMPARED_BY_WORDS = 250
"""How many passages that keyword search returns are compared by their vectors while these have no graph."""
NO_GRAPH = "the vectors have no graph yet: only passages that contain words of the query were compared"
MAX_CANDIDATES_PER_ROUND = 1000
"""The most candidates that one round requests from Elasticsearch when many of them are withheld."""

Embedding = asyncio.Future[Embedded]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds. A store that is slower is left out, and the response says so."""

    keywords: float = 5.0
    vectors: float = 5.0
    """The limit of each of two steps: counting what may be read, and the scan, which also gets what counting leaves."""
    ledger: float = 10.0
    embed: float = 65.0
    """The limit for the query's vector, including loading the model: a minute the first time on a machine, because the
    model is converted."""


@dataclass(frozen=True, slots=True)
class Query:
    text: str
    top: int
    mode: Mode
    rerank: bool
    sort: Sort = "relevance"


@dataclass(frozen=True, slots=True)
class Scope:
    """The generation and access of one query, read once so that both stores use the same."""

    generation: Generation
    caller: Caller
    readable: Readable
    filters: Filters
    snapshot: str
    """The ledger's pg_snapshot from before any store was queried."""
    access: bytes
    """The ``query.retrieval.cache.access_digest`` of ``readable``."""
    freshness: tuple[SourceFreshness, ...] = ()
    """From before any store was queried."""


@dataclass(slots=True)
class Offer:
    """One store's candidates, best first, or the error if there are none."""

    limit: int
    """How many candidates were requested."""
    candidates: list[Candidate] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    error: PenstockError | None = None
    withheld: frozenset[UUID] = frozenset()
    """Candidates of this round and earlier ones that the caller may not read."""

    def note_withheld(self, passages: Mapping[UUID, Passage]) -> None:
        """Record the candidates that are not among the verified passages."""
        self.withheld |= {c.chunk_id for c in self.candidates if c.chunk_id not in passages}

    def mark_timed_out(self, name: str, seconds: float) -> None:
        """Record a timeout, in the same words as any other, so that it does not reveal how much was withheld."""
        self.error = Retryable(f"{name} did not answer within {seconds:g} s")
        self.facts |= {"degraded": True, "reason": str(self.error)}

    def suffices(self, depth: int, passages: Mapping[UUID, Passage]) -> bool:
        """Whether more than ``depth`` candidates may be read, or the store has no more candidates."""
        return len(self.candidates) < self.limit or sum(c.chunk_id in passages for c in self.candidates) > depth

    def ranking(self, depth: int, passages: Mapping[UUID, Passage]) -> Ranking:
        verified = [c for c in self.candidates if c.chunk_id in passages]
        first = verified[:depth]
        following = verified[depth].score if len(verified) > depth else 0.0
        return Ranking([c.chunk_id for c in first], [c.score for c in first], following)


Offers = Mapping[Ranker, Offer]


Compared = dict[UUID, Passage | None]
"""The candidates of one round that were compared with the ledger, whichever store returned them; None: this caller may
not read it."""


class Stores:
    """The queries that a search makes to both stores and the ledger. A pool connection is held only for one store's
    statements, never while waiting for a model or Elasticsearch."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        timeouts: Timeouts,
        tuning: Tuning,
        metrics: QueryMetrics | None = None,
    ) -> None:
        """metrics: show whether the keyword index is fenced, and the recall of sampled searches. None: no search is
        sampled."""
        self._pool = pool
        self._metrics = metrics
        self._recall = RecallCheck(self.connection, tuning, metrics) if metrics else None
        self._index_checked_at: dict[str, float] = {}
        """The time (time.monotonic()) of the last successful check of each keyword index."""
        self._checks: dict[str, asyncio.Task[None]] = {}
        """The running check of each keyword index, which all searches share."""
        self._es = es.options(request_timeout=timeouts.keywords)  # here, because options() copies the client
        self.timeouts = timeouts
        self._tuning = tuning
        self._scans: TTLCache[bytes, Scan] = TTLCache(MAX_CACHED_SCANS, SCAN_TTL_SECONDS)

    async def offers(
        self,
        question: Query,
        scope: Scope,
        embedding: Embedding | None,
        steps: Steps,
        *,
        depth: int,
        spare: int,
    ) -> tuple[Offers, Mapping[UUID, Passage]]:
        """The candidates of this mode's stores, and the passages among them that may be read: ``depth`` of each store
        and one more, unless there are no more. Raises Retryable or Misconfigured when no store answers.

        A store with too few readable candidates is queried again: the index without the withheld ones, and the vector
        table with a check of each row against the ledger.
        """
        rankers: tuple[Ranker, ...] = ("vector", "keyword") if question.mode == "hybrid" else (question.mode,)
        offers = {ranker: Offer(0) for ranker in rankers}
        short: Sequence[Ranker] = rankers
        deadline = perf_counter() + self.timeouts.ledger
        first = True

        async def query(ranker: Ranker) -> None:
            """Query one store and verify its candidates, concurrently with the other store."""
            if ranker in short:
                withheld = offers[ranker].withheld
                limit = depth + spare
                if ranker == "keyword" or scope.generation.vectors == "elasticsearch":
                    limit = max(limit, min(MAX_CANDIDATES_PER_ROUND, offers[ranker].limit * 4))
                if ranker == "vector":
                    offer = self._vectors(
                        question, scope, embedding, steps, limit, withheld, compared, verified=not first
                    )
                else:
                    offer = self._keywords(question, scope, steps, limit, withheld)
                offers[ranker] = await offer
            with steps.step("verify"):
                await self._compare(scope, offers[ranker].candidates, compared)

        while True:
            compared: Compared = {}
            await gather_or_cancel(*(query(ranker) for ranker in rankers))
            passages = {id_: passage for id_, passage in compared.items() if passage is not None}
            _require_answer(offers)
            for ranker in short:
                offers[ranker].note_withheld(passages)
            short = [ranker for ranker, offer in offers.items() if not offer.suffices(depth, passages)]
            if not short:
                return offers, passages
            if perf_counter() > deadline:
                for ranker in short:
                    offers[ranker].mark_timed_out(_name(ranker, scope.generation), self.timeouts.ledger)
                _require_answer(offers)
                return offers, passages
            first = False

    async def _vectors(
        self,
        question: Query,
        scope: Scope,
        embedding: Embedding | None,
        steps: Steps,
        limit: int,
        withheld: frozenset[UUID],
        compared: Compared,
        *,
        verified: bool,
    ) -> Offer:
        """withheld: candidates of earlier rounds that the caller may not read. compared: rows of the chunk table are
        added, because their verification needs no connection of its own."""
        seconds = 2 * self.timeouts.vectors
        offer = Offer(limit, withheld=withheld)
        try:
            if embedding is None:
                raise Misconfigured("no embedding model is configured: only keyword search is possible")
            made_by, vector = await asyncio.shield(embedding)
            with steps.step("vectors") as offer.facts:
                require_same(made_by, scope.generation)
                deadline = monotonic() + seconds
                async with self.connection(seconds, "vector search", scope.caller.tenant) as connection:
                    query = NeighbourQuery(scope.generation, scope.caller, scope.readable, scope.filters, verified)
                    scan = await self._scan(connection, query, scope.access, limit)
                    if scan not in ("index", "words"):
                        # The kind of scan is no fact of the step: it would reveal how much the caller may not read.
                        offer.candidates, scan = await vectors.nearest(
                            connection,
                            query,
                            vector,
                            scan,
                            limit=limit,
                            timeout_seconds=SCAN_TIME_SHARE * (deadline - monotonic()),
                            tuning=self._tuning,
                        )
                        await self._compare(scope, offer.candidates, compared, connection)
                if scan in ("graph", "whole graph", "sketched") and self._recall is not None:
                    self._recall.offer(query, vector, scan, limit=limit)
                if scan in ("index", "words"):
                    await self._indexed(question if scan == "words" else None, scope, vector, offer)
        except PenstockError as error:
            offer.candidates, offer.error = [], error
        return offer

    async def _indexed(self, question: Query | None, scope: Scope, vector: Vectors, offer: Offer) -> None:
        """Fill an offer with the nearest passages among those that the keyword index returns: for a question by its
        words, for None by its own graph. Raises Retryable or Misconfigured."""
        generation = scope.generation
        async with time_limit(self.timeouts.vectors, "Elasticsearch"):
            await self.require_index(generation)
            if question is None:
                query = NeighbourQuery(generation, scope.caller, scope.readable, scope.filters)
                ids = await vectors.indexed(self._es, query, vector, excluded=offer.withheld, limit=offer.limit)
            else:
                offer.limit = max(offer.limit, COMPARED_BY_WORDS)
                offer.facts |= {"degraded": True, "reason": NO_GRAPH}
                ids = [candidate.chunk_id for candidate in await self._bm25(question, scope, offer)]
        async with self.connection(self.timeouts.vectors, "vector search", scope.caller.tenant) as connection:
            offer.candidates = await vectors.of_entries(connection, generation, ids, vector, limit=offer.limit)
        if len(ids) == offer.limit:  # otherwise the index has no more
            offer.withheld |= set(ids) - {c.chunk_id for c in offer.candidates}
            offer.limit = len(offer.candidates)

    async def _scan(self, connection: Connection, query: NeighbourQuery, access: bytes, limit: int) -> Scan:
        # A digest, because filters may take a megabyte.
        key = search_digest([query.generation.chunk_table, query.caller.tenant, access, query.filters, limit])
        if (scan := self._scans.get(key)) is None:
            scan = self._scans[key] = await vectors.choose_scan(connection, query, limit=limit, tuning=self._tuning)
        return scan

    async def _keywords(
        self,
        question: Query,
        scope: Scope,
        steps: Steps,
        limit: int,
        withheld: frozenset[UUID],
    ) -> Offer:
        seconds = self.timeouts.keywords
        offer = Offer(limit, withheld=withheld)
        try:
            with steps.step("keywords") as offer.facts:
                async with time_limit(seconds, "Elasticsearch"):
                    await self.require_index(scope.generation)
                    offer.candidates = await self._bm25(question, scope, offer)
        except PenstockError as error:
            offer.error = error
        return offer

    async def _bm25(self, question: Query, scope: Scope, offer: Offer) -> list[Candidate]:
        return await bm25(
            self._es,
            scope.generation,
            scope.caller,
            scope.readable,
            question.text,
            filters=scope.filters,
            sort=question.sort,
            excluded=offer.withheld,
            limit=offer.limit,
        )

    async def require_index(self, generation: Generation) -> None:
        """Raises IndexFenced while the keyword index is not the one that the ledger filled. Raises Misconfigured, or
        Retryable INDEX_TRUST_SECONDS after the last successful check, when it cannot be checked."""
        index = generation.keyword_index
        if self._checked_within(INDEX_CHECK_SECONDS, index):
            return
        if (check := self._checks.get(index)) is None:
            check = self._checks[index] = asyncio.create_task(self._check_index(index))
            check.add_done_callback(lambda done: self._index_checked(index, done))
        trusted = self._checked_within(INDEX_TRUST_SECONDS, index)
        # A cancelled search leaves the check to the others. With a recent check, half of the time is left for the
        # search.
        await asyncio.wait({check}, timeout=self.timeouts.keywords / 2 if trusted else None)
        if not check.done():
            return
        try:
            check.result()
        except IndexFenced:
            raise
        except Retryable:
            if not self._checked_within(INDEX_TRUST_SECONDS, index):
                raise

    def _index_checked(self, index: str, check: asyncio.Task[None]) -> None:
        del self._checks[index]
        if not check.cancelled():
            check.exception()  # retrieved even if no search waits any more, else asyncio logs it

    def _checked_within(self, seconds: float, index: str) -> bool:
        return monotonic() - self._index_checked_at.get(index, float("-inf")) < seconds

    async def _check_index(self, index: str) -> None:
        """Raises as ``require_index``."""
        began = monotonic()
        async with self.connection(self.timeouts.ledger, "search", NO_TENANT) as connection:
            known = await index_fence.load(connection, index)
        try:
            if known is not None:  # else no worker has recorded it yet
                with es_translated(f"search {index}"):
                    await index_fence.require(known, self._es)
        except IndexFenced:
            self._index_checked_at.pop(index, None)
            self._show_fence(fenced=True)
            raise
        self._show_fence(fenced=False)
        self._index_checked_at[index] = began

    def _show_fence(self, *, fenced: bool) -> None:
        if self._metrics is not None:
            self._metrics.index_fenced.set(fenced)

    async def _compare(
        self,
        scope: Scope,
        candidates: Sequence[Candidate],
        compared: Compared,
        connection: Connection | None = None,
    ) -> None:
        """Verify those that have not been compared yet."""
        new = [candidate for candidate in candidates if candidate.chunk_id not in compared]
        passages = await self.verify(scope, new, connection)
        compared.update((candidate.chunk_id, passages.get(candidate.chunk_id)) for candidate in new)

    async def verify(
        self, scope: Scope, candidates: Sequence[Candidate], connection: Connection | None = None
    ) -> dict[UUID, Passage]:
        """See ``query.access.verify.verify``. connection: of ``self.connection``; None: another one."""
        if not candidates:
            return {}
        if connection is not None:
            return await verify(connection, scope.generation.name, scope.caller, candidates, scope.filters)
        async with self.connection(self.timeouts.ledger, "search", scope.caller.tenant) as another:
            return await verify(another, scope.generation.name, scope.caller, candidates, scope.filters)

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        """See ``pipeline.stores.vectors.of_ids``."""
        if not ids:
            return {}
        async with self.connection(self.timeouts.vectors, "vector search", scope.caller.tenant) as connection:
            return await of_ids(connection, scope.generation, ids)

    async def bm25_scores(
        self, scope: Scope, ids: Sequence[UUID], text: str, more: Mapping[str, float]
    ) -> dict[UUID, float]:
        """See ``query.retrieval.keywords.bm25_scores``."""
        return await bm25_scores(self._es, scope.generation, ids, text, more) if ids else {}

    async def describe(self, scope: Scope, passages: Sequence[Passage]) -> dict[UUID, Detail]:
        async with self.connection(self.timeouts.ledger, "search", scope.caller.tenant) as connection:
            return await describe(connection, scope.generation.name, passages)

    async def aclose(self) -> None:
        """Cancel what runs in the background. The pool and the client stay open."""
        if self._recall is not None:
            await self._recall.aclose()

    @asynccontextmanager
    async def connection(self, seconds: float, doing: str, tenant: str) -> AsyncIterator[Connection]:
        """A connection that reads only the rows of this tenant: see ``query.access.tenant_rows.read_rows_of``."""
        async with time_limit(seconds, "Postgres"):
            with translated(doing):
                async with read_rows_of(self._pool, tenant) as connection:
                    yield connection


class DerivedStores(Stores):
    """Stores that change or keep what the live ones return. They share the pool and the client of these, which they do
    not close, and what is known of indexes and scans."""

    def __init__(self, live: Stores) -> None:
        super().__init__(live._pool, live._es, live.timeouts, live._tuning)
        self._index_checked_at, self._checks = live._index_checked_at, live._checks
        self._scans = live._scans


def _name(ranker: Ranker, generation: Generation) -> str:
    """Where a ranker's candidates come from, for people."""
    return "pgvector" if ranker == "vector" and generation.vectors == "pgvector" else "Elasticsearch"


def _require_answer(offers: Offers) -> None:
    """Raise the stores' errors if no store answered."""
    errors = [offer.error for offer in offers.values() if offer.error is not None]
    if len(errors) == len(offers):
        if len(errors) == 1 and isinstance(errors[0], IndexFenced):
            raise errors[0]
        kind = Retryable if any(isinstance(error, Retryable) for error in errors) else Misconfigured
        raise kind("; ".join(dict.fromkeys(str(error) for error in errors))) from errors[0]
