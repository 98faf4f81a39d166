"""One search by two settings of ranking: the current ones, and those that may take their place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Misconfigured
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Pool
from query.access.callers import Caller
from query.access.filters import NONE, Filters
from query.embedding.embedders import Embedders
from query.model import Mode, Passage, SearchResults
from query.rerank.guarded import open_reranker
from query.rerank.reranker import Reranker
from query.retrieval.search import Search
from query.retrieval.steps import Steps
from query.retrieval.stores import DerivedStores, Embedding, Offers, Query, Scope, Stores, Timeouts
from query.settings import QuerySettings, RerankSettings, differences


class RememberingStores(DerivedStores):
    """The live stores for one question of one caller, which rankings ask one after the other. Each ranking checks by
    itself what the caller may read: where that has changed, its candidates are read again."""

    def __init__(self, live: Stores) -> None:
        super().__init__(live)
        self._offers: dict[tuple[object, ...], tuple[Offers, Mapping[UUID, Passage]]] = {}
        self._embeddings: dict[tuple[str, UUID], Vectors] = {}
        self._word_scores: dict[tuple[object, ...], dict[UUID, float]] = {}

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
        search = question.text, question.mode, question.sort, depth, spare
        key = *search, scope.generation.name, scope.caller, scope.access, scope.filters
        if key not in self._offers:
            self._offers[key] = await super().offers(question, scope, embedding, steps, depth=depth, spare=spare)
        return self._offers[key]

    async def embeddings(self, scope: Scope, ids: Sequence[UUID]) -> dict[UUID, Vectors]:
        name = scope.generation.name
        missing = [id_ for id_ in ids if (name, id_) not in self._embeddings]
        for id_, vector in (await super().embeddings(scope, missing)).items():
            self._embeddings[name, id_] = vector
        return {id_: self._embeddings[name, id_] for id_ in ids if (name, id_) in self._embeddings}

    async def bm25_scores(
        self, scope: Scope, ids: Sequence[UUID], text: str, more: Mapping[str, float]
    ) -> dict[UUID, float]:
        key = scope.generation.name, text, tuple(ids), tuple(sorted(more.items()))
        if key not in self._word_scores:
            self._word_scores[key] = await super().bm25_scores(scope, ids, text, more)
        return self._word_scores[key]


@dataclass(frozen=True, slots=True)
class Rankings:
    """Safe to share between tasks. It owns nothing that it is given."""

    current: Search
    candidate: Search
    differences: tuple[str, ...]
    """The settings that differ, for people."""
    share_candidates: bool
    """Whether both need the same candidates of the stores."""

    async def both(
        self,
        query: str,
        caller: Caller,
        generation: Generation,
        *,
        top: int,
        mode: Mode = "hybrid",
        filters: Filters = NONE,
        rerank: bool = True,
    ) -> tuple[SearchResults, SearchResults]:
        """The results by the current settings and by the candidate ones. The question is embedded once, and what both
        need alike is read once; ``degraded`` of the first covers it. Raises as ``Search.search``."""
        current = self.current.over(RememberingStores)
        candidate = self.candidate.over(
            lambda live: current._stores if self.share_candidates else RememberingStores(live)
        )
        embedded = None if mode == "keyword" else await current.embed(query, caller, generation)

        async def ask(search: Search) -> SearchResults:
            return await search.search(
                query,
                caller,
                top=top,
                mode=mode,
                filters=filters,
                rerank=rerank,
                generation=generation,
                embedded=embedded,
                certify=False,
            )

        return await ask(current), await ask(candidate)


@asynccontextmanager
async def open_rankings(
    query: QuerySettings,
    candidate: QuerySettings,
    pool: Pool,
    es: AsyncElasticsearch,
    embedders: Embedders,
    timeouts: Timeouts,
    reranker: Reranker | None,
    *,
    seconds: float,
    threads: int | None = None,
) -> AsyncIterator[Rankings]:
    """Open the candidate reranker, if it is another one, and close it at the end.

    reranker: that of ``query``. seconds: how long the candidate one may take. threads: of its local model. Raises
    Misconfigured.
    """
    async with AsyncExitStack() as closing:
        other = reranker
        if _named(candidate.rerank) != _named(query.rerank):
            patient = candidate.rerank.model_copy(update={"timeout_seconds": seconds, "cached_pairs": 0})
            try:
                other = await open_reranker(patient, threads=threads)
            except Misconfigured as error:
                raise Misconfigured(f"candidate settings of ranking (PENSTOCK_SHADOW_RERANK_*): {error}") from error
            if other is not None:
                closing.push_async_callback(other.aclose)

        def search(by: QuerySettings, using: Reranker | None) -> Search:
            return Search(
                pool,
                es,
                embedders,
                timeouts=timeouts,
                settings=by.retrieval.model_copy(update={"cached_queries": 0}),
                reranker=using,
                rerank_pool=by.rerank.pool,
                rerank_floor=by.rerank.floor,
            )

        yield Rankings(
            search(query, reranker),
            search(candidate, other),
            differences(query, candidate),
            query.retrieval.ef_search == candidate.retrieval.ef_search,
        )


def _named(settings: RerankSettings) -> tuple[object, ...]:
    return settings.url, settings.flavour, settings.api_key, settings.model, settings.onnx_path, settings.plugin
