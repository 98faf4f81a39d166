"""Everything that answers a question, opened by settings and closed in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from elasticsearch import AsyncElasticsearch

from pipeline.core.errors import PenstockError
from pipeline.settings import Settings, dist
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import Pool, open_pool
from query.answers.answers import Answers
from query.answers.chat import OpenAIChat
from query.budget import Budget, share
from query.embedder import QueryEmbedder
from query.modes import Modes
from query.pipeline_view import PipelineView
from query.rerank.choose import open_reranker
from query.retrieval import Search, Timeouts
from query.settings import QuerySettings
from query.telemetry import QueryMetrics

GATHER_SECONDS = 10.0
"""For deciding on a mode and reading whole documents, besides a search."""


@dataclass(slots=True)
class Service:
    """Owns what it holds; safe to share between tasks."""

    settings: Settings
    query: QuerySettings
    budget: Budget
    metrics: QueryMetrics
    pool: Pool
    es: AsyncElasticsearch
    embedder: QueryEmbedder
    search: Search
    answers: Answers
    pipeline: PipelineView
    is_warm: bool = False
    """Whether the model has answered once, or failed to: it is not waited for any longer."""
    model_error: PenstockError | None = None
    """Why the model did not answer when it was last tried by ``warm``."""
    _warming: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def answer_seconds(self) -> float:
        """For a whole answer: what it is made from is found, then it is written."""
        return GATHER_SECONDS + self.budget.total + self.query.chat.timeout_seconds

    def warm(self) -> None:
        """Load the model and ask it once, in the background: the first question need not wait for that."""
        if self._warming is None or self._warming.done():
            self._warming = asyncio.create_task(self._embed_once(), name="warm up")

    async def _embed_once(self) -> None:
        try:
            await self.embedder.embed("warm up")
            self.model_error = None
        except PenstockError as error:
            self.model_error = error
        self.is_warm = True

    async def _stop_warming(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)


@asynccontextmanager
async def open_service(
    settings: Settings,
    query: QuerySettings,
    *,
    embedder: QueryEmbedder | None = None,
    metrics: QueryMetrics | None = None,
) -> AsyncIterator[Service]:
    """embedder: instead of the one that the settings name; closed at the end either way. Raises Retryable when Postgres
    cannot be reached, Misconfigured."""
    metrics = metrics or QueryMetrics()
    reranks = bool(query.rerank.url or query.rerank.onnx_path)
    budget = share(query.serve.search_seconds, query.rerank.timeout_seconds if reranks else 0.0)
    async with AsyncExitStack() as closing:
        embedder = embedder or QueryEmbedder.by_settings(settings.embedding, dist() / "models")
        closing.push_async_callback(embedder.aclose)
        es = connect(settings.elasticsearch)
        closing.push_async_callback(es.close)
        pool = await closing.enter_async_context(open_pool(settings.postgres))
        reranker = await open_reranker(query.rerank, lambda outcome: metrics.rerank.labels(outcome).inc())
        if reranker is not None:
            closing.push_async_callback(reranker.aclose)
        chat = OpenAIChat.by_settings(query.chat)
        if chat is not None:
            closing.push_async_callback(chat.aclose)
        search = Search(
            pool, es, embedder,
            timeouts=Timeouts(
                keywords=budget.keywords, vectors=budget.vectors, ledger=budget.ledger, embed=budget.embed
            ),
            settings=query.retrieval, metrics=metrics, reranker=reranker, rerank_pool=query.rerank.pool,
        )  # fmt: skip
        modes = Modes(search, pool, query.retrieval, query.chat, rerank=query.rerank, query_embedder=embedder)
        answers = Answers(modes, chat, pool, query.chat, metrics=metrics)
        view = PipelineView(pool, es, settings)
        service = Service(settings, query, budget, metrics, pool, es, embedder, search, answers, view)
        closing.push_async_callback(service._stop_warming)
        yield service
