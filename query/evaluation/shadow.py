"""Shadow queries: searches that are also run on the generation that may become active, and by the settings of ranking
that may take the place of the current ones, without delaying the response.

They have connections of their own, so that they never take one from a search that a caller waits for. The models are
shared with the service.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait, time_limit
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Connection, Pool, open_pool, translated
from query.access.callers import Caller
from query.access.filters import NONE, Filters
from query.embedding.embedders import Embedders
from query.embedding.generations import GenerationFollower
from query.evaluation.rankings import Rankings, open_rankings
from query.limits.charging import charge_to
from query.model import Mode, SearchResults
from query.rerank.reranker import Reranker
from query.retrieval.search import Search
from query.retrieval.stores import Timeouts
from query.settings import QuerySettings, ShadowSettings
from query.telemetry import QueryMetrics

_log = structlog.get_logger(__name__)

RECORD_SECONDS = 5.0


class Searcher(Protocol):
    """The search for shadow queries, such as ``query.retrieval.search.Search``."""

    async def search(
        self,
        query: str,
        caller: Caller,
        *,
        top: int,
        mode: Mode,
        filters: Filters,
        rerank: bool,
        generation: Generation | None,
    ) -> SearchResults: ...


Compared = Literal["generation", "ranking"]
"""The kinds of candidates."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A search that was answered."""

    query: str
    caller: Caller
    mode: Mode
    filters: Filters
    rerank: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """A candidate and the active one that it is compared with, by their names in ``shadow_agreement``."""

    compared: Compared
    active: str
    candidate: str
    both: Callable[[Searched], Awaitable[tuple[SearchResults, SearchResults]]]


@dataclass(slots=True)
class Shadow:
    """Runs shadow queries in background tasks. Without a pool and a search it does nothing."""

    settings: ShadowSettings
    following: GenerationFollower
    metrics: QueryMetrics
    search: Searcher | None = None
    pool: Pool | None = None
    rankings: Rankings | None = None
    """The candidate settings of ranking, if there are any."""
    dice: Callable[[], float] = random.random
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def offer(
        self, query: str, caller: Caller, *, mode: Mode = "hybrid", filters: Filters = NONE, rerank: bool = True
    ) -> None:
        """Run the shadow queries of a search that was answered, or drop them. It returns immediately and never
        raises."""
        if self.pool is None or not (pairs := self._pairs()) or self.dice() >= self.settings.share:
            return
        for pair in pairs:
            if len(self._tasks) >= self.settings.at_once:
                self.metrics.shadow.labels(pair.compared, "dropped").inc()
                continue
            work = self._ask(self.pool, pair, Searched(query, caller, mode, filters, rerank))
            task = asyncio.create_task(work, name="shadow")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pairs(self) -> list[Pair]:
        pairs: list[Pair] = []
        if self.search is None or (seen := self.following.seen) is None:
            return pairs
        active = seen.active
        if seen.candidate is not None:
            both = partial(_by_both_generations, self.search, active, seen.candidate)
            pairs.append(Pair("generation", active.name, seen.candidate.name, both))
        if self.rankings is not None:
            candidate = ranking_name(active, self.rankings.differences)
            pairs.append(Pair("ranking", active.name, candidate, partial(_by_both_rankings, self.rankings, active)))
        return pairs

    async def _ask(self, pool: Pool, pair: Pair, searched: Searched) -> None:
        charge_to(None)  # the caller does not pay for it
        measured = None
        try:
            async with time_limit(self.settings.seconds, "a shadow query"):
                one, other = await pair.both(searched)
            if not one.degraded and not other.degraded:
                rankings = documents(one), documents(other)
                measured = overlap(*rankings), rank_biased(*rankings)
        except PenstockError:
            pass  # counted below
        except Exception as error:  # noqa: BLE001  (a mistake of ours; its text may quote the question)
            _log.error("shadow_crashed", kind=type(error).__name__)
        self._count(pair.compared, measured)
        try:
            async with time_limit(RECORD_SECONDS, "Postgres"):
                with translated("shadow"):
                    async with pool.connection() as connection:
                        await record(connection, pair.active, pair.candidate, measured)
        except PenstockError as error:
            _log.warning("shadow_not_recorded", reason=str(error))

    def _count(self, compared: Compared, measured: tuple[float, float] | None) -> None:
        self.metrics.shadow.labels(compared, "failed" if measured is None else "measured").inc()
        if measured is not None:
            self.metrics.shadow_overlap.labels(compared).observe(measured[0])
            self.metrics.shadow_agreement.labels(compared).observe(measured[1])

    async def aclose(self) -> None:
        await cancel_and_wait(self._tasks)


async def _by_both_generations(
    search: Searcher, active: Generation, candidate: Generation, searched: Searched
) -> tuple[SearchResults, SearchResults]:
    async def ask(generation: Generation) -> SearchResults:
        return await search.search(
            searched.query,
            searched.caller,
            top=2 * DEPTH,
            mode=searched.mode,
            filters=searched.filters,
            rerank=False,
            generation=generation,
        )

    return await ask(active), await ask(candidate)


async def _by_both_rankings(
    rankings: Rankings, active: Generation, searched: Searched
) -> tuple[SearchResults, SearchResults]:
    return await rankings.both(
        searched.query,
        searched.caller,
        active,
        top=2 * DEPTH,
        mode=searched.mode,
        filters=searched.filters,
        rerank=searched.rerank,
    )


def ranking_name(generation: Generation, differences: Sequence[str]) -> str:
    """The name of candidate settings in ``shadow_agreement``: sums of other settings stay apart."""
    return f"{generation.name} with {', '.join(differences)}"


@asynccontextmanager
async def open_shadow(
    settings: Settings,
    query: QuerySettings,
    timeouts: Timeouts,
    embedders: Embedders,
    following: GenerationFollower,
    metrics: QueryMetrics,
    reranker: Reranker | None,
) -> AsyncIterator[Shadow]:
    """Open a Shadow, with connections only if a share is configured. reranker: the current one, whose cached scores
    serve shadow queries, too; it is not closed here. Raises Retryable and Misconfigured."""
    shadow = query.shadow
    if not shadow.share:
        yield Shadow(shadow, following, metrics)
        return
    async with AsyncExitStack() as closing:
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        few = settings.postgres.model_copy(update={"pool_max_size": 2 * shadow.at_once})
        pool = await closing.enter_async_context(open_pool(few, "queries"))
        forgetful = query.retrieval.model_copy(update={"cached_queries": 0})
        search = Search(pool, es, embedders, timeouts=timeouts, settings=forgetful)
        rankings = None
        if (candidate := query.candidate()) is not None:
            rankings = await closing.enter_async_context(
                open_rankings(
                    query, candidate, pool, es, embedders, timeouts, reranker, seconds=shadow.seconds / 2, threads=1
                )
            )
        mine = Shadow(shadow, following, metrics, search, pool, rankings)
        closing.push_async_callback(mine.aclose)
        yield mine


RETENTION_DAYS = 90


@dataclass(frozen=True, slots=True)
class Shadowed:
    queries: int
    overlap: float
    """Mean of ``agreement.overlap``; 0 of no queries."""
    agreement: float
    """Mean of ``agreement.rank_biased``; 0 of no queries."""
    failed: int
    """The number of shadow queries that failed or were incomplete in either generation."""


async def record(connection: Connection, active: str, candidate: str, measured: tuple[float, float] | None) -> None:
    """Add a shadow query to the hourly sums. measured: its overlap and rank-biased agreement; None: it failed. Raises
    psycopg.Error."""
    overlap, agreement = measured or (0.0, 0.0)
    async with connection.transaction():
        cursor = await connection.execute(
            "INSERT INTO shadow_agreement AS s VALUES (%s, %s, date_trunc('hour', now()), %s, %s, %s, %s)"
            " ON CONFLICT (active, candidate, hour) DO UPDATE SET queries = s.queries + excluded.queries,"
            " overlap = s.overlap + excluded.overlap, agreement = s.agreement + excluded.agreement,"
            " failed = s.failed + excluded.failed RETURNING queries + failed = 1",
            [active, candidate, int(measured is not None), overlap, agreement, int(measured is None)],
        )
        if (row := await cursor.fetchone()) and row[0]:  # once an hour
            await connection.execute(
                "DELETE FROM shadow_agreement WHERE hour < now() - make_interval(days => %s)", [RETENTION_DAYS]
            )


async def shadowed(connection: Connection, active: str, candidate: str) -> Shadowed:
    """The recorded agreement of both generations, whichever was the active one. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT coalesce(sum(queries), 0)::bigint, coalesce(sum(overlap) / nullif(sum(queries), 0), 0),"
        " coalesce(sum(agreement) / nullif(sum(queries), 0), 0), coalesce(sum(failed), 0)::bigint"
        " FROM shadow_agreement WHERE (active, candidate) IN ((%(one)s, %(other)s), (%(other)s, %(one)s))",
        {"one": active, "other": candidate},
    )
    [row] = await cursor.fetchall()
    return Shadowed(*row)


DEPTH = 10
PERSISTENCE = 0.9
"""p of rank-biased overlap: the first ten ranks have 86 % of the weight (Webber, Moffat and Zobel 2010)."""


def documents(results: SearchResults) -> list[str]:
    """The first DEPTH documents by their best passages. Passages are not compared, because generations may chunk
    differently."""
    ranked = {str(result.passage.document_id): None for result in results.results}
    return list(ranked)[:DEPTH]


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """The share of the first DEPTH documents that both rankings have, in any order; relative to the longer ranking if
    both are shorter. Two empty rankings agree."""
    first, second = set(one[:DEPTH]), set(other[:DEPTH])
    longest = max(len(first), len(second))
    return len(first & second) / longest if longest else 1.0


def rank_biased(one: Sequence[str], other: Sequence[str], p: float = PERSISTENCE) -> float:
    """Extrapolated rank-biased overlap (Webber, Moffat and Zobel 2010, equation 32), from 0 to 1: like ``overlap``, but
    higher ranks count more. No ranking may contain duplicates."""
    short, long = sorted((one, other), key=len)
    s, l = len(short), len(long)  # noqa: E741  (the paper's names)
    if not s:
        return 0.0 if l else 1.0
    common = [len(set(short[:d]) & set(long[:d])) for d in range(l + 1)]
    total = sum(common[d] / d * p**d for d in range(1, l + 1))
    total += sum(common[s] * (d - s) / (s * d) * p**d for d in range(s + 1, l + 1))
    return (1 - p) / p * total + ((common[l] - common[s]) / l + common[s] / s) * p**l
