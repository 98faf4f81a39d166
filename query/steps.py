"""What a search did, with times: shown to whoever asked."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from pipeline.core.errors import PenstockError
from query.model import Facts, Step

T = TypeVar("T")


def since(start: float) -> float:
    """Milliseconds since a ``perf_counter`` reading."""
    return round((perf_counter() - start) * 1000, 1)


class Steps:
    """One search's record. Facts may be added to a step after it ended."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self.done: list[Step] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Facts]:
        """Record what happens inside. A failure is recorded as degraded, with its reason, and goes on its way."""
        facts: Facts = {}
        start = perf_counter()
        try:
            yield facts
        except PenstockError as error:
            facts |= {"degraded": True, "reason": str(error)}
            raise
        finally:
            self.done.append(Step(name, since(start), facts))

    async def timed(self, name: str, work: Awaitable[T]) -> T:
        with self.step(name):
            return await work

    @property
    def took_ms(self) -> float:
        return since(self._began)
