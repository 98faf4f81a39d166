"""One search by two settings of ranking: the current ones, and those that may take their place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import Misconfigured
from pipeline.core.model import Generation
from pipeline.stores.postgres import Pool
from query.access.callers import Caller
from query.access.filters import NONE, Filters
from query.embedding.embedders import Embedders
from query.model import Mode, SearchResults
from query.rerank.guarded import open_reranker
from query.rerank.reranker import Reranker
from query.retrieval.remembered import RememberingStores
from query.retrieval.search import Search
from query.retrieval.stores import Timeouts
from query.settings import QuerySettings, RerankSettings, differences


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
