"""What both stores offer to a question, and how much of it may be shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from query.access.callers import Caller, Readable
from query.access.filters import Filters
from query.access.tenant_rows import NO_TENANT, rows_of
from query.access.verify import Detail, describe, verify
from query.embedding.embedders import require_same
from query.model import Candidate, Facts, Mode, Passage, Ranker
from query.retrieval import vectors
from query.retrieval.cache import Embedded
from query.retrieval.fusion import Ranking
from query.retrieval.keywords import bm25, relevance
from query.retrieval.steps import Steps
from query.retrieval.vectors import Asked, Scan, Tuning

SOONER = 0.95
"""Of the time that a scan has: Postgres ends it by itself, before we would have to cancel it."""
SCANS_KEPT, SCAN_KEPT_SECONDS = 1_000, 5.0
"""How neighbours are best looked for changes with the table's size and its graph, not from one question to the next."""
INDEX_LOOK_SECONDS = 10.0
"""A keyword index is searched when it was seen to be the one that the ledger filled at most so long ago."""
INDEX_KEPT_SECONDS = 60.0
"""So long it is searched when looking at it fails: a server that is too busy to be looked at is not a changed index."""
MOST_CANDIDATES = 1000
"""Of one round, when much of what Elasticsearch offers is withheld."""

_NAMES: Mapping[Ranker, str] = {"vector": "pgvector", "keyword": "Elasticsearch"}

Embedding = asyncio.Future[Embedded]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. A store that is slower is left out, and the answer says so."""

    keywords: float = 5.0
    vectors: float = 5.0
    """Of each of two steps: what the first, counting what may be read, leaves is the scan's."""
    ledger: float = 10.0
    embed: float = 65.0
    """The query's vector, the model's loading included: a minute the first time on a machine, when it is converted."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    top: int
    mode: Mode
    rerank: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """What one query is asked within: pinned once, so that both stores answer for the same generation and access."""

    generation: Generation
    caller: Caller
    readable: Readable
    filters: Filters
    snapshot: str
    """The ledger's, before any store was asked."""
    access: bytes
    """``query.retrieval.cache.access_of`` what is readable."""


@dataclass(slots=True)
class Offer:
    """One store's candidates, best first, or why there are none."""

    limit: int
    """How many it was asked for."""
    candidates: list[Candidate] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    error: PenstockError | None = None
    withheld: frozenset[UUID] = frozenset()
    """Chunks that it offered in vain, in this round or before."""

    def look(self, passages: Mapping[UUID, Passage]) -> None:
        """Remember what may not be shown."""
        self.withheld |= {c.chunk_id for c in self.candidates if c.chunk_id not in passages}

    def is_too_slow(self, name: str, seconds: float) -> None:
        """In the words of any other slowness: how much was withheld is not told."""
        self.error = Retryable(f"{name} did not answer within {seconds:g} s")
        self.facts |= {"degraded": True, "reason": str(self.error)}

    def holds(self, depth: int, passages: Mapping[UUID, Passage]) -> bool:
        """More than ``depth`` of what was offered may be shown, or there is no more to offer than was asked for."""
        return len(self.candidates) < self.limit or sum(c.chunk_id in passages for c in self.candidates) > depth

    def ranking(self, depth: int, passages: Mapping[UUID, Passage]) -> Ranking:
        shown = [c for c in self.candidates if c.chunk_id in passages]
        first = shown[:depth]
        following = shown[depth].score if len(shown) > depth else 0.0
        return Ranking([c.chunk_id for c in first], [c.score for c in first], following)


Offers = Mapping[Ranker, Offer]


class Stores:
    """Both stores and the ledger, as a search asks them. A pool connection is held for one store's statements, never
    while a model or Elasticsearch is waited for."""

    def __init__(
        self,
        pool: Pool,
        es: AsyncElasticsearch,
        timeouts: Timeouts,
        tuning: Tuning,
        on_index_fence: Callable[[bool], None] = lambda fenced: None,
    ) -> None:
        """on_index_fence: told at every look whether the keyword index is refused."""
        self._pool = pool
        self._on_index_fence = on_index_fence
        self._looked: dict[str, float] = {}
        """Keyword index → when it was last seen to be the one that the ledger filled, on time.monotonic()."""
        self._looking: dict[str, asyncio.Task[None]] = {}
        """Keyword index → the look that is under way, which all questions share."""
        self._es = es.options(request_timeout=timeouts.keywords)  # once: it copies the client
        self.timeouts = timeouts
        self._tuning = tuning
        self._scans: TTLCache[tuple[object, ...], Scan] = TTLCache(SCANS_KEPT, SCAN_KEPT_SECONDS)

    async def offers(
        self,
        question: Question,
        scope: Scope,
        embedding: Embedding | None,
        steps: Steps,
        *,
        depth: int,
        spare: int,
    ) -> tuple[Offers, Mapping[UUID, Passage]]:
        """What the stores of this mode offer, and all of it that may be shown: ``depth`` of each and one more, unless
        there are no more. Raises Retryable or Misconfigured when nothing can answer.

        Who offered too little is asked again, and then what was withheld is excluded or the ledger asked on the way.
        """
        rankers: tuple[Ranker, ...] = ("vector", "keyword") if question.mode == "hybrid" else (question.mode,)
        offers = {ranker: Offer(0) for ranker in rankers}
        short: Sequence[Ranker] = rankers
        give_up = perf_counter() + self.timeouts.ledger
        first = True

        async def seen(ranker: Ranker) -> None:
            """What it offers, and what the ledger says of it, while the other one is still at work."""
            if ranker in short:
                if ranker == "vector":
                    asked = self._vectors(scope, embedding, steps, depth + spare, proven=not first)
                else:
                    limit = max(depth + spare, min(MOST_CANDIDATES, offers[ranker].limit * 4))
                    asked = self._keywords(question.text, scope, steps, limit, offers[ranker].withheld)
                offers[ranker] = await asked
            with steps.step("verify"):
                new = [c for c in offers[ranker].candidates if c.chunk_id not in passages]
                passages.update(await self.verify(scope, new))

        while True:
            passages: dict[UUID, Passage] = {}
            await gather_or_cancel(*(seen(ranker) for ranker in rankers))
            _require_one(offers)
            for ranker in short:
                offers[ranker].look(passages)
            short = [ranker for ranker, offer in offers.items() if not offer.holds(depth, passages)]
            if not short:
                return offers, passages
            if perf_counter() > give_up:
                for ranker in short:
                    offers[ranker].is_too_slow(_NAMES[ranker], self.timeouts.ledger)
                _require_one(offers)
                return offers, passages
            first = False

    async def _vectors(
        self, scope: Scope, embedding: Embedding | None, steps: Steps, limit: int, *, proven: bool
    ) -> Offer:
        seconds = 2 * self.timeouts.vectors
        offer = Offer(limit)
        try:
            if embedding is None:
                raise Misconfigured("no embedding model is set: only keyword search can answer")
            made_by, vector = await asyncio.shield(embedding)
            with steps.step("vectors") as offer.facts:
                require_same(made_by, scope.generation)
                ends = perf_counter() + seconds
                async with self.connection(seconds, "vector search", scope.caller.tenant) as connection:
                    asked = Asked(scope.generation, scope.caller, scope.readable, scope.filters, proven)
                    scan = await self._scan(connection, asked, scope.access, limit)
                    offer.candidates, _ = await vectors.nearest(  # how it scanned would tell how much others have
                        connection,
                        asked,
                        vector,
                        scan,
                        limit=limit,
                        timeout_seconds=SOONER * (ends - perf_counter()),
                        tuning=self._tuning,
                    )
        except PenstockError as error:
            offer.error = error
        return offer

    async def _scan(self, connection: Connection, asked: Asked, access: bytes, limit: int) -> Scan:
        key = asked.generation.chunk_table, asked.caller.tenant, access, asked.filters, limit
        if (scan := self._scans.get(key)) is None:
            scan = self._scans[key] = await vectors.choose(connection, asked, limit=limit, tuning=self._tuning)
        return scan

    async def _keywords(
        self,
        text: str,
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
                    offer.candidates = await bm25(
                        self._es,
                        scope.generation,
                        scope.caller,
                        scope.readable,
                        text,
                        filters=scope.filters,
                        excluded=withheld,
                        limit=limit,
                    )
        except PenstockError as error:
            offer.error = error
        return offer

    async def require_index(self, generation: Generation) -> None:
        """Raises IndexFenced while the keyword index is not the one that the ledger filled; Misconfigured, or Retryable
        for longer than INDEX_KEPT_SECONDS, when that cannot be found out."""
        index = generation.keyword_index
        if self._looked_within(INDEX_LOOK_SECONDS, index):
            return
        if (looking := self._looking.get(index)) is None:
            looking = self._looking[index] = asyncio.create_task(self._look(index))
            looking.add_done_callback(lambda done: self._looked_at(index, done))
        kept = self._looked_within(INDEX_KEPT_SECONDS, index)
        # Who is cancelled leaves the look to the others. Where there is something to go by, half of the time is left
        # for the search.
        await asyncio.wait({looking}, timeout=self.timeouts.keywords / 2 if kept else None)
        if not looking.done():
            return
        try:
            looking.result()
        except IndexFenced:
            raise
        except Retryable:
            if not self._looked_within(INDEX_KEPT_SECONDS, index):
                raise

    def _looked_at(self, index: str, looking: asyncio.Task[None]) -> None:
        del self._looking[index]
        if not looking.cancelled():
            looking.exception()  # seen, even if everybody who asked has gone

    def _looked_within(self, seconds: float, index: str) -> bool:
        return monotonic() - self._looked.get(index, float("-inf")) < seconds

    async def _look(self, index: str) -> None:
        """Raises as ``require_index``."""
        began = monotonic()
        async with self.connection(self.timeouts.ledger, "search", NO_TENANT) as connection:
            known = await index_fence.load(connection, index)
        try:
            if known is not None:  # else no worker has looked at it yet
                with es_translated(f"search {index}"):
                    await index_fence.require(known, self._es)
        except IndexFenced:
            self._looked.pop(index, None)
            self._on_index_fence(True)
            raise
        self._on_index_fence(False)
        self._looked[index] = began

    async def verify(self, scope: Scope, candidates: Sequence[Candidate]) -> dict[UUID, Passage]:
        if not candidates:
            return {}
        async with self.connection(self.timeouts.ledger, "search", scope.caller.tenant) as connection:
            return await verify(connection, scope.generation.name, scope.caller, candidates, scope.filters)

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        async with self.connection(self.timeouts.vectors, "vector search", scope.caller.tenant) as connection:
            return await vectors.embeddings(connection, scope.generation, ids)

    async def likeness(self, scope: Scope, ids: Sequence[UUID], vector: Vectors) -> dict[UUID, float]:
        """See ``query.retrieval.vectors.likeness``."""
        if not ids:
            return {}
        async with self.connection(self.timeouts.vectors, "vector search", scope.caller.tenant) as connection:
            return await vectors.likeness(connection, scope.generation, ids, vector)

    async def relevance(
        self, scope: Scope, ids: Sequence[UUID], text: str, more: Mapping[str, float]
    ) -> dict[UUID, float]:
        """See ``query.retrieval.keywords.relevance``."""
        return await relevance(self._es, scope.generation, ids, text, more) if ids else {}

    async def describe(self, scope: Scope, passages: Sequence[Passage]) -> dict[UUID, Detail]:
        async with self.connection(self.timeouts.ledger, "search", scope.caller.tenant) as connection:
            return await describe(connection, scope.generation.name, passages)

    @asynccontextmanager
    async def connection(self, seconds: float, doing: str, tenant: str) -> AsyncIterator[Connection]:
        """It shows the rows of this tenant alone."""
        async with time_limit(seconds, "Postgres"):
            with translated(doing):
                async with rows_of(self._pool, tenant) as connection:
                    yield connection


def _require_one(offers: Offers) -> None:
    """Raise when no store answered."""
    errors = [offer.error for offer in offers.values() if offer.error is not None]
    if len(errors) == len(offers):
        if len(errors) == 1 and isinstance(errors[0], IndexFenced):
            raise errors[0]
        kind = Retryable if any(isinstance(error, Retryable) for error in errors) else Misconfigured
        raise kind("; ".join(dict.fromkeys(str(error) for error in errors))) from errors[0]
