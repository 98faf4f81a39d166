"""The objects that every kind of worker is built from, and the interface of a kind."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from pipeline.core.model import CountTokens, Generation
from pipeline.embedding.choose import token_counter
from pipeline.kafka.producer import Producer
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import Settings, dist
from pipeline.stages.admission import admission
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import DeadLetters
from pipeline.stages.stage import Stage
from pipeline.stores.postgres import Pool, translated
from pipeline.stream.consume import Consumption

MODELS = "models"
"""Folder under dist() that holds converted models."""

BATCH_FACTOR = {"detect": 1.0, "vectors": 1.0, "keywords": 2.0}
"""The size of each stage's batches, as a multiple of settings.stream.batch_size. A vectors batch is smaller than one of
keywords because it is embedded as a whole before any of it is written."""


def _counter(generation: Generation) -> CountTokens:
    """A token counter for this generation. It loads the tokenizer, which takes up to half a second, at its first call
    and not at the start of the worker."""
    loaded = cache(partial(token_counter, generation, dist() / MODELS))
    return lambda texts: loaded()(texts)


@dataclass
class Parts:
    """The objects that the stages of a worker share. stack: closes what they open, when the worker ends."""

    settings: Settings
    pool: Pool
    producer: Producer
    metrics: Metrics
    stack: AsyncExitStack

    def __post_init__(self) -> None:
        self.counters: Callable[[Generation], CountTokens] = cache(_counter)
        self.dead = DeadLetters(
            self.pool, self.producer, self.metrics, per_minute=self.settings.stream.dead_letters_per_minute
        )
        self.admission = admission(self.pool, self.metrics, self.settings.producers)
        self.announcer = Announcer(self.pool, self.producer, self.metrics)

    def batch_size(self, name: str) -> int:
        return max(1, round(self.settings.stream.batch_size * BATCH_FACTOR[name]))

    async def generations(self) -> dict[str, Generation]:
        with translated("generations"):
            async with self.pool.connection() as connection:
                return {g.name: g for g in await generations.writable(connection)}


class Kind(Protocol):
    """The stages and background tasks of a worker of one name."""

    async def stages(self) -> list[Stage]:
        """Build the stages. Raises Misconfigured when the settings make all of their work impossible."""
        ...

    def background(self, consuming: Sequence[Consumption]) -> list[Coroutine[Any, Any, BaseException]]:
        """Coroutines that run alongside the stages until the worker stops. consuming: the stages' consumption, in the
        order of ``stages``."""
        ...
