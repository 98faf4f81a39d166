"""Pairs of a question and a passage, gathered across callers into batches for one model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

WINDOW_SECONDS = 0.005
"""How long a few pairs wait for company; 50 of one search wait for nobody."""
LEAST, MOST = 8, 16
"""Pairs of a batch: fewer than LEAST wait for company; MOST bounds what the pairs of one search pad and hold up."""


class _Waiting(NamedTuple, Generic[T]):
    item: T
    score: asyncio.Future[float]


class Batches(Generic[T]):
    """Laws: a caller that goes away takes its own pairs with it and no others; what fails, fails for those in the batch
    alone; whatever waits when a round begins is scored in it, however much comes later."""

    def __init__(self, work: Callable[[Sequence[T]], Awaitable[Sequence[float]]], size: Callable[[T], int]) -> None:
        """work: scores one batch, in its order. size: equal ones fit together without padding."""
        self._work = work
        self._size = size
        self._waiting: list[_Waiting[T]] = []
        self._working: asyncio.Task[None] | None = None

    async def scores(self, items: Sequence[T]) -> list[float]:
        """Raises what ``work`` raises."""
        loop = asyncio.get_running_loop()
        mine = [_Waiting(item, loop.create_future()) for item in items]
        self._waiting += mine
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._rounds(), name="rerank batches")
        try:
            return await asyncio.gather(*(one.score for one in mine))
        finally:
            for one in mine:
                one.score.cancel()

    async def aclose(self) -> None:
        """Whoever still waits is cancelled."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        for one in self._waiting:
            one.score.cancel()

    async def _rounds(self) -> None:
        while self._waiting:
            if len(self._waiting) < LEAST:
                await asyncio.sleep(WINDOW_SECONDS)
            left = sorted(self._waiting, key=lambda one: self._size(one.item))
            self._waiting = []
            try:
                while left := [one for one in left if not one.score.done()]:
                    await self._score(left[:MOST])
            finally:
                for one in left:
                    one.score.cancel()

    async def _score(self, batch: Sequence[_Waiting[T]]) -> None:
        try:
            scores = await self._work([one.item for one in batch])
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for it
            for one in batch:
                if not one.score.done():
                    one.score.set_exception(error)
            return
        for one, score in zip(batch, scores, strict=True):
            if not one.score.done():
                one.score.set_result(score)
