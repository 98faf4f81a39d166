"""A query's vector is computed once for all callers, and nobody notices by the time who else asked."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from pipeline.core.errors import Retryable
from pipeline.core.model import ChunkParams, Generation
from pipeline.embedding.port import Vectors
from query.access.callers import Caller
from query.embedding.embedders import QueryEmbedder
from query.embedding.shared import SharedVectors
from tests.support.query.library import WordEmbedder

pytestmark = pytest.mark.asyncio

SECONDS = 2.0
"""How long each computation takes, by the clock of the test."""
ANN, BOB, EVE = (Caller(tenant, frozenset({tag})) for tenant, tag in (("acme", "a"), ("acme", "b"), ("other", "a")))
GENERATION = Generation("g1", "active", "words", "1", 64, 254, ChunkParams(), "", "", "chunks", "index")


class Asking:
    """A model that takes a while for each query and fails as often as it should, and a clock that it moves."""

    def __init__(self, size: int = 10, failures: int = 0) -> None:
        self.now = 0.0
        self.texts: list[str] = []
        self.slept: list[float] = []
        self.failures = failures
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.outcomes: Counter[str] = Counter()
        self.model = WordEmbedder()
        self.model.embed_query = self.compute  # type: ignore[method-assign]
        self.vectors = SharedVectors(
            QueryEmbedder(lambda: self.model),
            size,
            on_lookup=lambda outcome: self.outcomes.update([outcome]),
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    async def compute(self, text: str) -> Vectors:
        self.texts.append(text)
        await self.may_end.wait()
        self.now += SECONDS
        if self.failures:
            self.failures -= 1
            raise Retryable("the model is overloaded (429)")
        return self.model._vector(text)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def ask(self, caller: Caller) -> None:
        _, vector = await self.vectors.embed(GENERATION, caller, "moss")
        assert np.allclose(vector, WordEmbedder()._vector("moss"))


async def ticks() -> None:
    """Let other tasks run until they wait."""
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_a_query_is_computed_once_for_callers_of_any_access_and_tenant() -> None:
    asking = Asking()
    for caller in (ANN, BOB, EVE, ANN, BOB, EVE):
        await asking.ask(caller)
    assert asking.texts == ["moss"]
    assert asking.outcomes == {"miss": 1, "shared": 2, "hit": 3}


async def test_a_caller_with_other_access_waits_for_as_long_as_the_computation_took() -> None:
    """Law: the time does not tell whether others asked before."""
    asking = Asking()
    for caller in (ANN, BOB, EVE, ANN, Caller("acme", frozenset({"a"})), BOB):
        await asking.ask(caller)
    assert asking.slept == [SECONDS, SECONDS], "Bob and Eve, once each"


async def test_a_caller_that_joins_a_computation_waits_for_a_whole_one() -> None:
    """Law: the time does not tell whether others ask now."""
    asking = Asking()
    asking.may_end.clear()
    first = asyncio.create_task(asking.ask(ANN))
    await ticks()
    asking.now += 1.5  # of the 3.5 that it takes
    second = asyncio.create_task(asking.ask(BOB))
    await ticks()
    asking.may_end.set()
    await asyncio.gather(first, second)
    assert (asking.texts, asking.slept) == (["moss"], [1.5])


async def test_a_caller_that_leaves_does_not_cancel_what_others_wait_for() -> None:
    asking = Asking()
    asking.may_end.clear()
    leaving, staying = asyncio.create_task(asking.ask(ANN)), asyncio.create_task(asking.ask(BOB))
    await ticks()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    asking.may_end.set()
    await staying
    assert asking.texts == ["moss"]


async def test_a_caller_that_leaves_is_charged_also_where_nothing_is_cached() -> None:
    """The embedding is charged at its end: whoever disconnected early had it for nothing."""
    asking = Asking(size=0)
    asking.may_end.clear()
    leaving = asyncio.create_task(asking.ask(ANN))
    await ticks()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    asking.may_end.set()
    await ticks()
    assert asking.now == SECONDS


async def test_a_failure_is_not_cached() -> None:
    asking = Asking(failures=1)
    with pytest.raises(Retryable, match="overloaded"):
        await asking.ask(ANN)
    await asking.ask(BOB)
    assert asking.texts == ["moss", "moss"]


@pytest.mark.parametrize("size", [0, 10])
async def test_the_vector_of_another_model_is_not_cached(size: int) -> None:
    asking = Asking(size)
    asking.model.revision = "2"
    for caller in (ANN, ANN):
        await asking.ask(caller)
    assert asking.texts == ["moss", "moss"]


async def test_without_a_cache_every_query_is_computed() -> None:
    asking = Asking(0)
    for caller in (ANN, ANN, BOB):
        await asking.ask(caller)
    assert len(asking.texts) == 3
    assert asking.outcomes == {}
