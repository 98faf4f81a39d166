"""Each generation's own model for questions: a query embeds by that of the generation that it has pinned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Self

from pipeline.core.model import ChunkParams, Generation
from pipeline.embedding.port import Embedder
from pipeline.settings import EmbeddingSettings
from query.embedder import EMBED_SECONDS, QueryEmbedder
from query.telemetry import QueryMetrics

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
                embedder.on_request = metrics.embedding_asked
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
        wanted = {_model(generation) for generation in generations}
        now = monotonic()
        for model in self._open.keys() - wanted:
            self._leaving.append((now, self._open.pop(model)))
        gone = [one for one in self._leaving if now - one[0] >= self._leave_seconds]
        self._leaving = [one for one in self._leaving if one not in gone]
        await asyncio.gather(*(embedder.aclose() for _, embedder in gone))

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
        generation, name="", state="active", params=ChunkParams(), chunk_table="", keyword_index="",
        vector_type="halfvec",
    )  # fmt: skip
