"""The models that a worker holds: each generation is embedded by its own, and no other process has to be told."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.embedding import choose
from pipeline.embedding.port import Embedder
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import EmbeddingSettings
from pipeline.stores.postgres import Pool, translated

AWAY_SECONDS = 5.0
"""A model that did not answer is not asked again for so long: all lanes wait for one answer, not one after another."""
LEAVE_SECONDS = 300.0
"""A batch of a generation that was retired meanwhile has embedded, or failed, by then."""


class Models:
    """Made when the first work of a generation comes, and kept until ``keep`` no longer names one of it, and a while
    longer: a generation that is retired may have a batch at work still. Generations of one model share it."""

    def __init__(
        self,
        pool: Pool,
        settings: EmbeddingSettings,
        metrics: Metrics,
        models: Path,
        make: Callable[[Generation, EmbeddingSettings, Path], Embedder] = choose.for_generation,
        *,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        """models: the folder that converted models are kept in."""
        self._leave_seconds = leave_seconds
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._models = models
        self._make = make
        self._made: dict[tuple[object, ...], Embedder] = {}
        self._checked: dict[str, Embedder] = {}
        self._making: defaultdict[tuple[object, ...], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._leaving: list[tuple[float, Embedder]] = []
        """Models of no generation that there is, and since when."""
        self._away: dict[tuple[object, ...], tuple[float, Retryable]] = {}
        """When a model last did not answer, and what it said."""

    async def of(self, generation: Generation) -> Embedder:
        """The generation's own model, compared with what filled it. Raises Misconfigured when it cannot be had or is
        another one, Retryable when it does not answer."""
        if (known := self._checked.get(generation.name)) is not None:
            return known
        key = _key(generation)
        async with self._making[key]:
            if (known := self._checked.get(generation.name)) is not None:
                return known
            if (away := self._away.get(key)) is not None and monotonic() - away[0] < AWAY_SECONDS:
                raise _again(away[1]) from away[1]
            try:
                embedder = self._made.get(key) or await self._new(generation)
                with translated("generations"):
                    async with self._pool.connection() as connection:
                        await generations.check_model(connection, generation, embedder)
            except Misconfigured as error:
                raise Misconfigured(str(error), service=error.service or "embedding") from error
            except Retryable as error:  # the embedder does not always say that it is itself that is away
                if error.service != "postgres":
                    self._away[key] = monotonic(), error
                raise _again(error) from error
            self._checked[generation.name] = embedder
            return embedder

    async def _new(self, generation: Generation) -> Embedder:
        embedder = await asyncio.to_thread(self._make, generation, self._settings, self._models)
        embedder.on_truncated = self._metrics.truncated.inc
        embedder.on_request = self._metrics.embedding_request
        self._made[_key(generation)] = embedder
        return embedder

    async def keep(self, there: Collection[Generation]) -> None:
        """Let go of the models that none of these generations is of."""
        keys, now = {_key(generation) for generation in there}, monotonic()
        names = {generation.name for generation in there}
        self._checked = {name: embedder for name, embedder in self._checked.items() if name in names}
        for key in self._made.keys() - keys:
            self._leaving.append((now, self._made.pop(key)))
            self._away.pop(key, None)
        gone = [leaving for leaving in self._leaving if now - leaving[0] >= self._leave_seconds]
        self._leaving = [leaving for leaving in self._leaving if leaving not in gone]
        for _, embedder in gone:
            await embedder.aclose()

    async def aclose(self) -> None:
        for embedder in (*self._made.values(), *(embedder for _, embedder in self._leaving)):
            await embedder.aclose()


def _again(error: Retryable) -> Retryable:
    """Its like, of the embedder's unless it says otherwise."""
    return type(error)(str(error), retry_after=error.retry_after, service=error.service or "embedding")


def _key(generation: Generation) -> tuple[object, ...]:
    """The fields of a generation that its model depends on."""
    return (
        generation.model,
        generation.revision,
        generation.dimensions,
        generation.input_window,
        generation.document_prefix,
        generation.query_prefix,
        generation.service,
    )
