"""The steps of a search with their times, which the response includes."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

from pipeline.core.errors import PenstockError
from pipeline.observability import tracing
from query.model import Facts, Step

T = TypeVar("T")

STORES: Mapping[str, tracing.Attributes] = {
    "access": {"db.system.name": "postgresql"},
    "vectors": {"db.system.name": "postgresql"},
    "verify": {"db.system.name": "postgresql"},
    "keywords": {"db.system.name": "elasticsearch"},
}
"""The span attributes of steps that query one store."""
TRACED = frozenset(
    {
        "answer_tokens",
        "claims",
        "first_token_ms",
        "left_out",
        "model",
        "passages",
        "prompt_tokens",
        "results",
        "tokens",
        "unsupported",
    }
)
"""Facts that are also recorded in spans: sizes and names of our own. Other facts may contain parts of the query."""


def milliseconds_since(start: float) -> float:
    """Milliseconds since a ``perf_counter`` reading."""
    return round((perf_counter() - start) * 1000, 1)


class Steps:
    """The record of one search. Facts may be added to a step after it has ended."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self.done: list[Step] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Facts]:
        """Record the body as a step. An error is recorded as degraded, with its reason, and is raised again.

        Repetitions of a step are one step, with the sum of the times and the facts of the last: how often a store was
        queried would reveal how much was withheld.
        """
        facts: Facts = {}
        start = perf_counter()
        with tracing.begin(name, "client" if name in STORES else "internal", attributes=STORES.get(name)) as span:
            try:
                yield facts
            except PenstockError as error:
                facts |= {"degraded": True, "reason": str(error)}
                raise
            finally:
                self._record(Step(name, milliseconds_since(start), facts))
                span.note({f"penstock.{key}": facts[key] for key in TRACED & facts.keys()})

    def _record(self, step: Step) -> None:
        for n, before in enumerate(self.done):
            if before.name == step.name:
                self.done[n] = replace(step, took_ms=round(before.took_ms + step.took_ms, 1))
                return
        self.done.append(step)

    async def timed(self, name: str, work: Awaitable[T]) -> T:
        with self.step(name):
            return await work

    @property
    def took_ms(self) -> float:
        return milliseconds_since(self._began)
