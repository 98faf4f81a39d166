"""Pairs gathered across callers: what is scored together, and who suffers when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query.rerank.cross_encoder import MAX_BATCH_PAIRS, MIN_BATCH_PAIRS, Batches


class Model:
    """Scores a text by its length; each batch waits until it is let go, if told so."""

    def __init__(self, *, held: bool = False) -> None:
        self.seen: list[list[str]] = []
        self.failing: Callable[[Sequence[str]], bool] = lambda batch: False
        self.free = asyncio.Event()
        if not held:
            self.free.set()

    async def __call__(self, batch: Sequence[str]) -> Sequence[float]:
        self.seen.append(list(batch))
        await self.free.wait()
        if self.failing(batch):
            raise RuntimeError("the model broke")
        return [float(len(text)) for text in batch]

    async def begun(self) -> None:
        while not self.seen:
            await asyncio.sleep(0)


async def test_concurrent_callers_share_a_rerank_batch() -> None:
    model = Model()
    batches = Batches(model, len)
    answers = await asyncio.gather(batches.scores(["a", "bbb"]), batches.scores(["cc"]), batches.scores([]))
    assert answers == [[1.0, 3.0], [2.0], []]
    assert model.seen == [["a", "cc", "bbb"]]  # by length: equal ones need no padding


async def test_a_large_search_is_split_into_batches_of_the_maximum_size() -> None:
    model = Model()
    texts = [str(n) * (n % 5 + 1) for n in range(50)]
    assert await Batches(model, len).scores(texts) == [float(len(text)) for text in texts]
    assert [len(batch) for batch in model.seen] == [MAX_BATCH_PAIRS, MAX_BATCH_PAIRS, MAX_BATCH_PAIRS, 2]
    assert MIN_BATCH_PAIRS <= MAX_BATCH_PAIRS


async def test_a_cancelled_caller_removes_only_its_own_pairs() -> None:
    model = Model(held=True)
    batches = Batches(model, len)
    blocking = asyncio.create_task(batches.scores(["first"]))
    await model.begun()
    leaving = asyncio.create_task(batches.scores(["gone"] * 20))
    staying = asyncio.create_task(batches.scores(["stays"] * 20))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    model.free.set()
    assert await blocking == [5.0]
    assert await staying == [5.0] * 20
    assert leaving.cancelled()
    assert not any("gone" in batch for batch in model.seen)


async def test_a_caller_cancelled_during_its_batch_does_not_affect_the_others() -> None:
    model = Model(held=True)
    batches = Batches(model, len)
    leaving = asyncio.create_task(batches.scores(["gone"]))
    staying = asyncio.create_task(batches.scores(["stays"]))
    await model.begun()
    leaving.cancel()
    model.free.set()
    assert await staying == [5.0]
    assert model.seen == [["gone", "stays"]]


async def test_a_failure_affects_only_its_own_batch() -> None:
    model = Model()
    model.failing = lambda batch: "bad" in batch
    batches = Batches(model, len)
    bad, good = await asyncio.gather(
        batches.scores(["bad"] * MAX_BATCH_PAIRS),
        batches.scores(["well then"] * MAX_BATCH_PAIRS),
        return_exceptions=True,
    )
    assert isinstance(bad, RuntimeError)
    assert good == [9.0] * MAX_BATCH_PAIRS
    assert await batches.scores(["x"]) == [1.0]


async def test_later_short_pairs_do_not_delay_earlier_long_ones() -> None:
    """Short pairs go first, but only among those that waited when the round began."""
    model = Model(held=True)
    batches = Batches(model, len)
    early = asyncio.create_task(batches.scores(["long passage"] * (MAX_BATCH_PAIRS + 1)))
    await model.begun()
    late = asyncio.create_task(batches.scores(["x"] * 40))
    await asyncio.sleep(0)
    model.free.set()
    await asyncio.gather(early, late)
    assert [batch[0] for batch in model.seen] == ["long passage", "long passage", "x", "x", "x"]


async def test_closing_cancels_every_waiting_caller() -> None:
    model = Model(held=True)
    batches = Batches(model, len)
    callers = [asyncio.create_task(batches.scores(["text"] * 20)) for _ in range(3)]
    await model.begun()
    await batches.aclose()
    assert all(
        isinstance(result, asyncio.CancelledError) for result in await asyncio.gather(*callers, return_exceptions=True)
    )


@given(st.lists(st.lists(st.text(max_size=30), max_size=30), max_size=6))
def test_every_caller_gets_exactly_its_own_scores(callers: list[list[str]]) -> None:
    async def run() -> list[list[float]]:
        batches = Batches(Model(), len)
        return await asyncio.gather(*(batches.scores(texts) for texts in callers))

    assert asyncio.run(run()) == [[float(len(text)) for text in texts] for texts in callers]


def test_no_texts_are_scored_without_a_batch() -> None:
    model_free = pytest.approx([])
    assert asyncio.run(Batches(Model(), len).scores([])) == model_free
