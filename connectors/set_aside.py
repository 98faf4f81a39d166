"""Sets aside what a source cannot return, so that one bad document, space or channel does not stop all others.

Nothing that was set aside counts as deleted, all of it is read again by later runs, and ``penstock connector status``
shows the reasons.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from connectors.errors import Answered, Denied, Forbidden, ServerFailed, TooLarge
from connectors.protocol import Problem
from pipeline.core.errors import PenstockError

T = TypeVar("T")
MAX_NAMED_PARTS = 20
"""The parts that a status names."""
MAX_FAILURES = 3
"""Failures of one request (each after the client's own attempts) before what it reads is taken to be the reason."""


class SetAside:
    """The parts of a source that cannot be read at the moment, with the reasons. Each scope (``listing``, ``access``)
    is replaced as a whole by the next run that reads it."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}

    def add(self, scope: str, part: str, reason: object) -> None:
        """part: such as ``space ENG``. reason: an error, or a text without content."""
        self._reasons.setdefault(scope, {})[part] = str(reason)

    def replace(self, scope: str, reasons: Mapping[str, str]) -> None:
        self._reasons[scope] = dict(reasons)

    def problems(self, source: str) -> list[Problem]:
        """Return one problem for each part, at most MAX_NAMED_PARTS, and one for the others."""
        reasons = [f"{part} is set aside, and is tried again: {reason}" for part, reason in self.reasons().items()]
        if (more := len(reasons) - MAX_NAMED_PARTS) > 0:
            reasons[MAX_NAMED_PARTS:] = [f"{more} more parts are set aside"]
        return [Problem(source, "set_aside", reason) for reason in reasons]

    def reasons(self) -> Mapping[str, str]:
        """Return the reasons by part, in the order of the parts."""
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
        """By name: the failures in a row, and ``_successes`` at the first."""
        self._successes = 0

    def succeed(self, name: str | None = None) -> None:
        """Record that something was read: ``name``, or anything else."""
        self._successes += 1
        if name is not None:
            self._failing.pop(name, None)

    def fail(self, name: str, error: PenstockError) -> bool:
        """Record a failure. Returns whether ``name`` is now taken to be the reason: the request cannot
        succeed, or it failed MAX_FAILURES times while other requests succeeded."""
        times, since = self._failing.get(name, (0, self._successes))
        self._failing[name] = times + 1, since
        if isinstance(error, Answered | Forbidden | TooLarge):
            return True
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
