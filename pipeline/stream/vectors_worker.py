"""The vectors worker: embeds chunks and keeps pgvector equal to the ledger; besides, it maintains the graphs,
calibrates the floors of relevance, embeds conversations, and records spending."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from pipeline.conversations.embed import ConversationVectors
from pipeline.core.model import Generation
from pipeline.generations.calibration import CalibrationKeeper
from pipeline.generations.models import Models
from pipeline.ledger import generations
from pipeline.maintenance.spending import Spending
from pipeline.runtime.settings import dist
from pipeline.stages.graph import GraphKeeper
from pipeline.stages.manifests import Chunker
from pipeline.stages.stage import Stage
from pipeline.stages.vectors import VectorSink
from pipeline.stream.consume import Consumption
from pipeline.stream.parts import MODELS, Parts


class VectorsWorker:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._models = Models(parts.pool, parts.settings.embedding, parts.metrics, dist() / MODELS)

    async def stages(self) -> list[Stage]:
        parts, models = self._parts, self._models
        parts.stack.push_async_callback(models.aclose)
        parts.metrics.embedding_price = parts.settings.embedding.price_per_million_tokens
        parts.metrics.embedding_budget.set(parts.settings.embedding.daily_budget)
        async with parts.pool.connection() as connection:
            active = await generations.active(connection)
        await models.of(active)  # a wrong model of the active generation must stop the start; others are checked later

        async def current_generations() -> dict[str, Generation]:
            generations_by_name = await parts.generations()
            await models.keep(generations_by_name.values())
            return generations_by_name

        stage = VectorSink(
            parts.pool,
            models,
            current_generations,
            Chunker(parts.counters),
            parts.announcer,
            parts.producer,
            parts.dead,
            parts.metrics,
            batch_size=parts.batch_size("vectors"),
        )
        return [stage]

    def background(self, consuming: Sequence[Consumption]) -> list[Coroutine[Any, Any, BaseException]]:
        parts, documents = self._parts, consuming[0]
        spending = Spending(parts.pool, parts.metrics)
        parts.stack.push_async_callback(spending.record)  # records the cost of batches that were drained at the end
        conversations = ConversationVectors(
            parts.pool,
            self._models,
            parts.metrics,
            parts.settings.conversations,
            busy=lambda: bool(documents.report()["in_flight"]),  # documents go first
        )
        graphs = GraphKeeper(parts.settings.postgres, parts.generations, parts.metrics)
        calibrations = CalibrationKeeper(parts.settings.postgres, self._models, parts.generations)
        return [conversations.run(), graphs.run(), calibrations.run(), spending.run()]
