"""The query's vector: from a model that is loaded in the background, once, and only if somebody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Protocol, Self

from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams, Generation
from pipeline.embedding.port import Embedder, Vectors
from pipeline.runtime.settings import EmbeddingSettings
from pipeline.runtime.tasks import time_limit
from query.telemetry import QueryMetrics

EMBED_SECONDS = 5.0


class Embedders(Protocol):
    """Law: what ``of`` gives embeds as the generation's own model does, or by another one that does not hide it:
    ``require_same`` is asked before any two vectors are compared."""

    def of(self, generation: Generation) -> QueryEmbedder: ...

    async def keep(self, generations: Collection[Generation]) -> None:
        """Models of these are needed; others may be let go."""
        ...

    async def aclose(self) -> None: ...


class QueryEmbedder:
    """Safe to share between tasks. A load that failed is tried again by the next query."""

    def __init__(
        self, load: Callable[[], Embedder], *, load_seconds: float = 60.0, embed_seconds: float = EMBED_SECONDS
    ) -> None:
        """load: blocking; runs in a thread. load_seconds: the very first time on a machine, the local model is
        converted."""
        self._load = load
        self._load_seconds = load_seconds
        self._embed_seconds = embed_seconds
        self._loading: asyncio.Task[Embedder] | None = None

    def of(self, generation: Generation) -> Self:
        """One model, whatever it is asked for: ``Embedders``, where there is no other."""
        return self

    async def keep(self, generations: Collection[Generation]) -> None:
        """It stays."""

    def start(self) -> None:
        """Begin to load, unless that is done or under way. Needs a running event loop."""
        failed = self._loading is not None and self._loading.done() and self._loading.exception() is not None
        if self._loading is None or failed:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load), name="load embedder")

    async def embed(self, text: str) -> tuple[Embedder, Vectors]:
        """The query as a vector, and the model that made it. Raises Retryable or Misconfigured."""
        self.start()
        assert self._loading is not None
        async with time_limit(self._load_seconds, "loading the embedding model"):
            embedder = await asyncio.shield(self._loading)  # my cancellation is not the other queries'
        async with time_limit(self._embed_seconds, "the embedding model"):
            return embedder, await embedder.embed_query(text)

    async def aclose(self) -> None:
        if self._loading is not None:
            done = (await asyncio.gather(self._loading, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await done.aclose()


def is_same(embedder: Embedder, generation: Generation) -> bool:
    """Whether it is the model that filled the generation."""
    mine = (embedder.model, embedder.dimensions, embedder.query_prefix)
    theirs = (generation.model, generation.dimensions, generation.query_prefix)
    # A served model may not name its revision: then the workers' comparison of a reference text has to do.
    revisions = {embedder.revision, generation.revision} - {""}
    return mine == theirs and len(revisions) < 2


def require_same(embedder: Embedder, generation: Generation) -> None:
    """Models never mix: the query's must be the one that filled the generation. Raises Misconfigured."""
    if not is_same(embedder, generation):
        raise Misconfigured(
            f"settings name {embedder.model} ({embedder.dimensions} dimensions, query prefix"
            f" {embedder.query_prefix!r}), but generation {generation.name} was built with {generation.model}"
            f" ({generation.dimensions}, {generation.query_prefix!r}) or other weights of it: put the settings back"
        )


CHOOSE = "pipeline.embedding.choose"
"""Slow to import: in a thread, if at all."""
LEAVE_SECONDS = 60.0
"""A query that pinned a generation before it was retired has embedded its question by then."""


class GenerationEmbedders:
    """An ``Embedders``. Generations that differ in their tables alone share one model. Safe to share between tasks."""

    def __init__(
        self,
        load: Callable[[Generation], Embedder],
        *,
        embed_seconds: float = EMBED_SECONDS,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        """load: blocking; runs in a thread. embed_seconds: for one question."""
        self._load = load
        self._embed_seconds = embed_seconds
        self._leave_seconds = leave_seconds
        self._open: dict[Generation, QueryEmbedder] = {}
        self._leaving: list[tuple[float, QueryEmbedder]] = []
        self._importing: asyncio.Task[object] | None = None

    @classmethod
    def by_settings(
        cls,
        settings: EmbeddingSettings,
        models: Path,
        *,
        embed_seconds: float = EMBED_SECONDS,
        metrics: QueryMetrics | None = None,
    ) -> Self:
        """What a generation's row does not say (the key, timeouts) is the settings'. models: the folder that converted
        models are kept in. metrics: told what questions cost."""

        def load(generation: Generation) -> Embedder:
            embedder: Embedder = import_module(CHOOSE).for_generation(generation, settings, models)
            if metrics is not None:
                embedder.on_question = metrics.question_embedded
                embedder.on_request = metrics.question_embedding_timed
            return embedder

        return cls(load, embed_seconds=embed_seconds)

    def start(self) -> None:
        """Begin to import what every model needs, which takes a second. Needs a running event loop."""
        self._importing = asyncio.create_task(asyncio.to_thread(import_module, CHOOSE), name="import models")

    def of(self, generation: Generation) -> QueryEmbedder:
        model = _model(generation)
        if model not in self._open:
            self._open[model] = QueryEmbedder(lambda: self._load(generation), embed_seconds=self._embed_seconds)
        return self._open[model]

    async def keep(self, generations: Collection[Generation]) -> None:
        needed = {_model(generation) for generation in generations}
        now = monotonic()
        for model in self._open.keys() - needed:
            self._leaving.append((now, self._open.pop(model)))
        expired = [entry for entry in self._leaving if now - entry[0] >= self._leave_seconds]
        self._leaving = [entry for entry in self._leaving if entry not in expired]
        await asyncio.gather(*(embedder.aclose() for _, embedder in expired))

    async def aclose(self) -> None:
        if self._importing is not None:
            await asyncio.gather(self._importing, return_exceptions=True)
        left = [*self._open.values(), *(embedder for _, embedder in self._leaving)]
        self._open.clear()
        self._leaving.clear()
        await asyncio.gather(*(embedder.aclose() for embedder in left))


def _model(generation: Generation) -> Generation:
    """Of a generation, what its model depends on."""
    return replace(
        generation,
        name="",
        state="active",
        params=ChunkParams(),
        chunk_table="",
        keyword_index="",
        vector_type="halfvec",
    )
