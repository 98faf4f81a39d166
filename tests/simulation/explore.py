"""An explicit-state model checker: breadth first over hashable states, so that the first counterexample is a shortest.

A model says where it begins, which steps each state allows, and what is wrong with a state. Every reachable state is
visited once; a model bounds its own counters, so that the search ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

MAX_STATES = 2_000_000
"""More than any of our models has; a model without bounds is an error of the model."""


class Model(Protocol[S]):
    """The model whose states are searched."""

    def initial(self) -> S:
        """Return the state in which everything begins."""
        ...

    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """Return everything that may happen next, each with a name for the counterexample."""
        ...

    def violation(self, state: S) -> str | None:
        """Say what is wrong with this state; None: nothing."""
        ...


@dataclass(frozen=True)
class Explored:
    """The result of a search."""

    states: int
    violation: str | None
    path: tuple[str, ...]
    """The steps that lead to the violation: no shorter sequence does."""

    def __str__(self) -> str:
        if self.violation is None:
            return f"{self.states} states, no violation"
        steps = "\n".join(f"  {n}. {step}" for n, step in enumerate(self.path, 1))
        return f"{self.violation}, after\n{steps}"


class Explorer(Generic[S]):
    """Searches one model."""

    def __init__(self, model: Model[S]) -> None:
        self._model = model
        self._parents: dict[S, tuple[S, str] | None] = {}

    def run(self) -> Explored:
        """Visit every reachable state, or stop at the first violation."""
        start = self._model.initial()
        self._parents = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            if (violation := self._model.violation(state)) is not None:
                return Explored(len(self._parents), violation, self._path(state))
            for name, after in self._model.steps(state):
                if after not in self._parents:
                    self._parents[after] = (state, name)
                    queue.append(after)
            assert len(self._parents) <= MAX_STATES, "the model has no bounds"
        return Explored(len(self._parents), None, ())

    def _path(self, state: S) -> tuple[str, ...]:
        path: list[str] = []
        step = self._parents[state]
        while step is not None:
            state, name = step
            path.append(name)
            step = self._parents[state]
        return tuple(reversed(path))
