"""Real questions, asked of the generation that may take over, too: nobody waits for it, and nothing of it is shown.

On connections of its own, so that no question that somebody waits for ever finds one taken. The models are shared with
the service: they are asked one text at a time, as by any other question.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.settings import Settings
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool, translated
from pipeline.tasks import ended
from query.access import Caller
from query.charging import charge_to
from query.embedder import Embedders, bounded
from query.evaluation.agreement import DEPTH, documents, overlap, rank_biased
from query.evaluation.shadowed import keep
from query.filters import NONE, Filters
from query.following import Following
from query.model import Found, Mode
from query.offers import Timeouts
from query.retrieval import Search
from query.settings import RetrievalSettings, ShadowSettings
from query.telemetry import QueryMetrics

_log = structlog.get_logger(__name__)

KEEP_SECONDS = 5.0


class Searches(Protocol):
    """``query.retrieval.Search``."""

    async def search(
        self, query: str, caller: Caller, *, top: int, mode: Mode, filters: Filters, rerank: bool,
        generation: Generation | None,
    ) -> Found: ...  # fmt: skip


@dataclass(slots=True)
class Shadow:
    """Owns its tasks and nothing that it is given. Without a pool and a search it takes nothing."""

    settings: ShadowSettings
    following: Following
    metrics: QueryMetrics
    search: Searches | None = None
    pool: Pool | None = None
    dice: Callable[[], float] = random.random
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def offer(self, query: str, caller: Caller, *, mode: Mode = "hybrid", filters: Filters = NONE) -> None:
        """Take a question that was answered, or let it go. Returns at once and never raises."""
        seen = self.following.seen
        if self.search is None or self.pool is None or seen is None or seen.candidate is None:
            return
        if self.dice() >= self.settings.share:
            return
        if len(self._tasks) >= self.settings.at_once:
            self.metrics.shadow.labels("dropped").inc()
            return
        work = self._ask(self.search, self.pool, seen.active, seen.candidate, query, caller, mode, filters)
        task = asyncio.create_task(work, name="shadow")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, search: Searches, pool: Pool, active: Generation, candidate: Generation, query: str, caller: Caller,
        mode: Mode, filters: Filters,
    ) -> None:  # fmt: skip
        charge_to(None)  # who asked has nothing of it

        async def ask(generation: Generation) -> Found:
            return await search.search(
                query, caller, top=2 * DEPTH, mode=mode, filters=filters, rerank=False, generation=generation
            )

        measured = None
        try:
            one, other = await ask(active), await ask(candidate)
            if not one.degraded and not other.degraded:
                rankings = documents(one), documents(other)
                measured = overlap(*rankings), rank_biased(*rankings)
        except PenstockError:
            pass  # counted below
        except Exception as error:  # noqa: BLE001  (a mistake of ours; its text may quote the question)
            _log.error("shadow.broken", kind=type(error).__name__)
        self._count(measured)
        try:
            async with bounded(KEEP_SECONDS, "Postgres"):
                with translated("shadow"):
                    async with pool.connection() as connection:
                        await keep(connection, active.name, candidate.name, measured)
        except PenstockError as error:
            _log.warning("shadow.not_kept", reason=str(error))

    def _count(self, measured: tuple[float, float] | None) -> None:
        self.metrics.shadow.labels("failed" if measured is None else "measured").inc()
        if measured is not None:
            self.metrics.shadow_overlap.observe(measured[0])
            self.metrics.shadow_agreement.observe(measured[1])

    async def aclose(self) -> None:
        await ended(self._tasks)


@asynccontextmanager
async def open_shadow(
    settings: Settings,
    shadow: ShadowSettings,
    retrieval: RetrievalSettings,
    timeouts: Timeouts,
    embedders: Embedders,
    following: Following,
    metrics: QueryMetrics,
) -> AsyncIterator[Shadow]:
    """Connections are opened only where a share is set. Raises Retryable, Misconfigured."""
    if not shadow.share:
        yield Shadow(shadow, following, metrics)
        return
    async with AsyncExitStack() as closing:
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        few = settings.postgres.model_copy(update={"pool_max_size": 2 * shadow.at_once})
        pool = await closing.enter_async_context(open_pool(few, "queries"))
        forgetful = retrieval.model_copy(update={"cached_queries": 0})
        search = Search(pool, es, embedders, timeouts=timeouts, settings=forgetful)
        mine = Shadow(shadow, following, metrics, search, pool)
        closing.push_async_callback(mine.aclose)
        yield mine
