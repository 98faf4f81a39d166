"""All parts of the query service, opened from the settings and closed in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from elasticsearch import AsyncElasticsearch

from pipeline.diagnosis.pipeline_view import PipelineView
from pipeline.runtime.settings import Settings, dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool
from pipeline.trail import Trail, open_trail
from query.answers import chat as chats
from query.answers.answers import Answers
from query.answers.understanding import REWRITE_SECONDS
from query.embedding.embedders import Embedders, GenerationEmbedders
from query.embedding.generations import GenerationFollower
from query.evaluation.shadow import Shadow, open_shadow
from query.modes.gather import Modes
from query.preview.preview import Previews
from query.preview.turns import Turns
from query.rerank.guarded import open_reranker
from query.retrieval.search import Search, Timeouts
from query.retrieval.timeouts import TimeBudget, time_budget
from query.settings import QuerySettings
from query.standing.questions import StandingQuestions
from query.telemetry import QueryMetrics

GATHER_SECONDS = 10.0
"""Time to decide on a mode and to read whole documents, in addition to a search."""


@dataclass(slots=True)
class Service:
    """The query service's parts, which it owns. Safe to share between tasks."""

    settings: Settings
    query: QuerySettings
    budget: TimeBudget
    metrics: QueryMetrics
    pool: Pool
    es: AsyncElasticsearch
    embedders: Embedders
    following: GenerationFollower
    shadow: Shadow
    search: Search
    answers: Answers
    standing: StandingQuestions
    pipeline: PipelineView
    previews: Previews
    trail: Trail
    previewing: Turns = field(default_factory=Turns)
    """One preview runs at a time, because each asks hundreds of questions."""

    @property
    def uses_remote_models(self) -> bool:
        """Whether a search waits for a remote server that embeds or reranks."""
        return self.settings.embedding.provider != "local" or self.query.rerank.url is not None

    @property
    def answer_seconds(self) -> float:
        """The time limit of a whole answer: understanding a follow-up, gathering its material, then writing it."""
        return REWRITE_SECONDS + GATHER_SECONDS + self.budget.total + self.query.chat.timeout_seconds


@asynccontextmanager
async def open_service(
    settings: Settings,
    query: QuerySettings,
    *,
    embedders: Embedders | None = None,
    name: str = "query",
) -> AsyncIterator[Service]:
    """Open the service and close it at the end.

    embedders: replace the embedders of the settings; they are closed at the end in either case.
    name: the name of this process in the audit trail.
    Raises Retryable when Postgres cannot be reached, and Misconfigured.
    """
    metrics = QueryMetrics()
    reranks = bool(query.rerank.url or query.rerank.onnx_path)
    budget = time_budget(query.serve.search_seconds, query.rerank.timeout_seconds if reranks else 0.0)
    async with AsyncExitStack() as closing:
        embedders = embedders or GenerationEmbedders.by_settings(settings.embedding, dist() / "models", metrics=metrics)
        closing.push_async_callback(embedders.aclose)
        es = connect(settings.elasticsearch, reads_only=True)
        closing.push_async_callback(es.close)
        pool = await closing.enter_async_context(
            open_pool(settings.postgres, "queries", on_fence=metrics.ledger_fenced.set)
        )
        price = query.rerank.price_per_thousand_searches
        reranker = await open_reranker(query.rerank, lambda outcome: metrics.reranked(outcome, price))
        if reranker is not None:
            closing.push_async_callback(reranker.aclose)
        chat = chats.by_settings(query.chat)
        if chat is not None:
            closing.push_async_callback(chat.aclose)
        timeouts = Timeouts(keywords=budget.keywords, vectors=budget.vectors, ledger=budget.ledger, embed=budget.embed)
        search = Search(
            pool,
            es,
            embedders,
            timeouts=timeouts,
            settings=query.retrieval,
            metrics=metrics,
            reranker=reranker,
            rerank_pool=query.rerank.pool,
            rerank_floor=query.rerank.floor,
        )
        closing.push_async_callback(search.aclose)
        modes = Modes(search, pool, query.retrieval, query.chat, rerank=query.rerank, metrics=metrics)
        answers = Answers(modes, chat, pool, query.chat, metrics=metrics)
        standing = StandingQuestions(
            pool,
            search,
            query.retrieval,
            most=query.serve.standing_questions,
            ledger_seconds=budget.ledger,
        )
        view = PipelineView(pool, es, settings)
        previews = Previews(search, pool, es, embedders, on_embedded=metrics.embedded)
        following = GenerationFollower(pool, embedders, metrics)
        closing.push_async_callback(following.aclose)
        shadow = await closing.enter_async_context(
            open_shadow(settings, query, timeouts, embedders, following, metrics, reranker)
        )
        trail = await closing.enter_async_context(open_trail(settings, name, count=metrics.trail_counted))
        metrics.trail_waiting.set_function(lambda: trail.oldest_seconds)
        yield Service(
            settings,
            query,
            budget,
            metrics,
            pool,
            es,
            embedders,
            following,
            shadow,
            search,
            answers,
            standing,
            view,
            previews,
            trail,
        )
