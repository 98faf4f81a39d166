"""Query vectors, from models that are loaded once, in the background and on demand."""

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
LOAD_SECONDS = 60.0
"""Includes the conversion of a local model, which happens once on a machine."""


class Embedders(Protocol):
    """The embedders of generations. Law: the embedder that ``of`` returns is the generation's model, or its properties
    reveal that it is not; ``require_same`` is called before vectors are compared."""

    def of(self, generation: Generation) -> QueryEmbedder: ...

    async def keep(self, generations: Collection[Generation]) -> None:
        """Keep the models of these generations; the others may be closed."""
        ...

    async def aclose(self) -> None: ...


class QueryEmbedder:
    """Embeds queries with one model. Safe to share between tasks. The next query retries a failed load."""

    def __init__(self, load: Callable[[], Embedder], *, embed_seconds: float = EMBED_SECONDS) -> None:
        """load: a blocking function, which runs in a thread."""
        self._load = load
        self._embed_seconds = embed_seconds
        self._loading: asyncio.Task[Embedder] | None = None

    def of(self, generation: Generation) -> Self:
        """This embedder for every generation, so that it is an ``Embedders`` of a single model."""
        return self

    async def keep(self, generations: Collection[Generation]) -> None:
        """Keep the model in any case."""

    def start(self) -> None:
        """Begin to load the model, unless it is loaded or loading. Needs a running event loop."""
        failed = self._loading is not None and self._loading.done() and self._loading.exception() is not None
        if self._loading is None or failed:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load), name="load embedder")

    async def model(self) -> Embedder:
        """The model, which is loaded if necessary. Raises Retryable or Misconfigured."""
        self.start()
        assert self._loading is not None
        async with time_limit(LOAD_SECONDS, "loading the embedding model"):
            return await asyncio.shield(self._loading)  # a cancelled query must not cancel the load

    async def embed(self, text: str) -> tuple[Embedder, Vectors]:
        """The query as a vector, and the model that made it. Raises Retryable or Misconfigured."""
        embedder = await self.model()
        async with time_limit(self._embed_seconds, "the embedding model"):
            return embedder, await embedder.embed_query(text)

    async def aclose(self) -> None:
        if self._loading is not None:
            done = (await asyncio.gather(self._loading, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await done.aclose()


def is_same(embedder: Embedder, generation: Generation) -> bool:
    """True if the embedder is the model that the generation was built with."""
    mine = (embedder.model, embedder.dimensions, embedder.query_prefix)
    theirs = (generation.model, generation.dimensions, generation.query_prefix)
    # A remote model may not report its revision; the workers then compare a reference text.
    revisions = {embedder.revision, generation.revision} - {""}
    return mine == theirs and len(revisions) < 2


def require_same(embedder: Embedder, generation: Generation) -> None:
    """Raises Misconfigured unless the query's model is the one that the generation was built with."""
    if not is_same(embedder, generation):
        raise Misconfigured(
            f"settings name {embedder.model} ({embedder.dimensions} dimensions, query prefix"
            f" {embedder.query_prefix!r}), but generation {generation.name} was built with {generation.model}"
            f" ({generation.dimensions}, {generation.query_prefix!r}) or other weights of it: restore the settings"
        )


CHOOSE = "pipeline.embedding.choose"
"""A module that is slow to import: it is imported in a thread, and only on demand."""
RETIRE_SECONDS = 60.0
"""How long a model stays open after its generation has retired, for queries that still use that generation."""


class GenerationEmbedders:
    """An ``Embedders``. Generations that differ only in their tables share one model. Safe to share between tasks."""

    def __init__(
        self,
        load: Callable[[Generation], Embedder],
        *,
        embed_seconds: float = EMBED_SECONDS,
        retire_seconds: float = RETIRE_SECONDS,
    ) -> None:
        """load: a blocking function, which runs in a thread. embed_seconds: the time limit of one query."""
        self._load = load
        self._embed_seconds = embed_seconds
        self._retire_seconds = retire_seconds
        self._open: dict[Generation, QueryEmbedder] = {}
        self._retiring: list[tuple[float, QueryEmbedder]] = []
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
        """Embedders whose key and timeouts come from the settings, because a generation's row does not have them.
        models: the folder of converted models. metrics: records the use and cost of queries."""

        def load(generation: Generation) -> Embedder:
            embedder: Embedder = import_module(CHOOSE).for_generation(generation, settings, models)
            if metrics is not None:
                embedder.on_question = metrics.embedded
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
            self._retiring.append((now, self._open.pop(model)))
        expired = [entry for entry in self._retiring if now - entry[0] >= self._retire_seconds]
        self._retiring = [entry for entry in self._retiring if entry not in expired]
        await asyncio.gather(*(embedder.aclose() for _, embedder in expired))

    async def aclose(self) -> None:
        if self._importing is not None:
            await asyncio.gather(self._importing, return_exceptions=True)
        left = [*self._open.values(), *(embedder for _, embedder in self._retiring)]
        self._open.clear()
        self._retiring.clear()
        await asyncio.gather(*(embedder.aclose() for embedder in left))


def _model(generation: Generation) -> Generation:
    """The generation reduced to the fields that determine its model."""
    return replace(
        generation,
        name="",
        state="active",
        params=ChunkParams(),
        chunk_table="",
        keyword_index="",
        vector_type="halfvec",
        calibration=None,
    )
