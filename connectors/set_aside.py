"""Sets aside what a source cannot return, so that one bad document, space or channel does not stop all others.

Nothing that was set aside counts as deleted, all of it is read again by later runs, and ``penstock connector status``
shows the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from heapq import nsmallest
from typing import TypeVar

from connectors.errors import Answered, Denied, Forbidden, ServerFailed, TooLarge
from connectors.protocol import Problem
from pipeline.core.errors import PenstockError

T = TypeVar("T")
MAX_NAMED_PARTS = 20
"""The parts that a status names."""
MAX_HELD_PARTS = 1_000
"""The parts of a scope whose reasons are held; the others are counted."""
MAX_FAILING = 10_000
"""The names whose failures are counted, those that failed last."""
MAX_FAILURES = 3
"""Failures of one request (each after the client's own attempts) before what it reads is taken to be the reason."""


class SetAside:
    """The parts of a source that cannot be read at the moment, with the reasons. Each scope (``listing``, ``access``)
    is replaced as a whole by the next run that reads it."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}
        self._others: Counter[str] = Counter()
        """By scope: the parts that are not held."""
        self._messages: list[str] | None = None
        """The messages of the problems, which a status shows every second; None: something has changed."""

    def add(self, scope: str, part: str, reason: object) -> None:
        """part: such as ``space ENG``. reason: an error, or a text without content."""
        held = self._reasons.setdefault(scope, {})
        if part in held or len(held) < MAX_HELD_PARTS:
            held[part] = str(reason)
        else:
            self._others[scope] += 1
        self._messages = None

    def replace(self, scope: str, reasons: Mapping[str, str]) -> None:
        self._reasons[scope] = dict(nsmallest(MAX_HELD_PARTS, reasons.items()))
        self._others[scope] = len(reasons) - len(self._reasons[scope])
        self._messages = None

    def problems(self, source: str) -> list[Problem]:
        """Return one problem for each part, at most MAX_NAMED_PARTS, and one for the others."""
        if self._messages is None:
            reasons = self.reasons()
            named = list(reasons.items())[:MAX_NAMED_PARTS]
            self._messages = [f"{part} is set aside, and is tried again: {reason}" for part, reason in named]
            if (more := len(reasons) - len(named) + self._others.total()) > 0:
                self._messages.append(f"{more} more parts are set aside")
        return [Problem(source, "set_aside", message) for message in self._messages]

    def reasons(self) -> Mapping[str, str]:
        """Return the reasons by part, in the order of the parts; of a scope, MAX_HELD_PARTS at most."""
        return dict(sorted(pair for scope in self._reasons.values() for pair in scope.items()))


def may_be_set_aside(error: BaseException) -> bool:
    """Return whether the reason of an error may be what was requested. A refused credential, a rate limit and a server
    that does not respond are reasons that concern every request."""
    if isinstance(error, Denied):
        return error.status != 401
    return isinstance(error, Answered | Forbidden | ServerFailed | TooLarge)


class Failures:
    """Counts failures of single requests in a row, by what they read."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[int, int]] = {}
        """By name: the failures in a row, and ``_successes`` at the first. The one that failed last is the last."""
        self._successes = 0

    def succeed(self, name: str | None = None) -> None:
        """Record that something was read: ``name``, or anything else."""
        self._successes += 1
        if name is not None:
            self._failing.pop(name, None)

    def fail(self, name: str, error: PenstockError) -> bool:
        """Record a failure. Returns whether ``name`` is now taken to be the reason: the request cannot
        succeed, or it failed MAX_FAILURES times while other requests succeeded."""
        if isinstance(error, Answered | Forbidden | TooLarge):
            return True
        times, since = self._failing.pop(name, (0, self._successes))
        self._failing[name] = times + 1, since
        if len(self._failing) > MAX_FAILING:
            del self._failing[next(iter(self._failing))]
        return times + 1 >= MAX_FAILURES and self._successes > since


async def read_isolated(
    names: Sequence[str], read: Callable[[Sequence[str]], Awaitable[Sequence[T]]]
) -> tuple[list[T], dict[str, PenstockError]]:
    """Read several things with one request. Where it fails, read the halves, and so on: only what fails by itself is
    returned among the errors. Raises errors that do not concern what was requested."""
    if not names:
        return [], {}
    try:
        return list(await read(names)), {}
    except PenstockError as error:
        if not may_be_set_aside(error):
            raise
        if len(names) == 1:
            return [], {names[0]: error}
    middle = len(names) // 2
    first, first_errors = await read_isolated(names[:middle], read)
    second, second_errors = await read_isolated(names[middle:], read)
    return [*first, *second], {**first_errors, **second_errors}
