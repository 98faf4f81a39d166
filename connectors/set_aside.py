"""Sets aside what a source cannot return, so that one bad document, space or channel does not stop all others.

Nothing that was set aside counts as deleted, all of it is read again by later runs, and ``penstock connector status``
shows the reasons.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import TypeVar

import structlog

from connectors.errors import Answered, BadData, BadEntry, Denied, Forbidden, ServerFailed, TooLarge
from connectors.faults import OF_DATA, OUTAGES, place
from connectors.protocol import Problem
from connectors.runner.guard import is_failing
from pipeline.core.errors import PenstockError

T = TypeVar("T")
Item = TypeVar("Item")
log = structlog.get_logger()
UNEXPECTED = "unexpected_data"
"""The code of a document that the connector's code cannot make of its data."""
MAX_NAMED_PARTS = 20
"""The parts that a status names."""
MAX_HELD_PARTS = 1_000
"""The parts of a scope whose reasons are held; the others are counted."""
MAX_COUNTED_PARTS = 100_000
"""The further parts of a scope that are counted, each once."""
MAX_FAILING = 10_000
"""The names whose failures are counted, those that failed last."""
MAX_FAILURES = 3
"""Failures of one request (each after the client's own attempts) before what it reads is taken to be the reason."""


class SetAside:
    """The parts of a source that cannot be read at the moment, with the reasons. Each scope (``listing``, ``access``)
    is replaced as a whole by the next run that reads it."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}
        self._others: defaultdict[str, set[int]] = defaultdict(set)
        """By scope: hashes of the parts that are not held, at most MAX_COUNTED_PARTS."""
        self._messages: list[str] | None = None
        """The messages of the problems, which a status shows every second; None: something has changed."""

    def add(self, scope: str, part: str, reason: object) -> None:
        """part: such as ``space ENG``. reason: an error, or a text without content."""
        held = self._reasons.setdefault(scope, {})
        if part in held or len(held) < MAX_HELD_PARTS:
            held[part] = str(reason)
        elif len(self._others[scope]) < MAX_COUNTED_PARTS:
            self._others[scope].add(hash(part))
        self._messages = None

    def replace(self, scope: str, reasons: Mapping[str, str]) -> None:
        self._reasons[scope] = dict(nsmallest(MAX_HELD_PARTS, reasons.items()))
        others = (hash(part) for part in reasons if part not in self._reasons[scope])
        self._others[scope] = set(islice(others, MAX_COUNTED_PARTS))
        self._messages = None

    def problems(self, source: str) -> list[Problem]:
        """Return one problem for each part, at most MAX_NAMED_PARTS, and one for the others."""
        if self._messages is None:
            reasons = self.reasons()
            named = list(reasons.items())[:MAX_NAMED_PARTS]
            self._messages = [f"{part} is set aside, and is tried again: {reason}" for part, reason in named]
            if (more := len(reasons) - len(named) + sum(map(len, self._others.values()))) > 0:
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
    return isinstance(error, Answered | BadData | Forbidden | ServerFailed | TooLarge)


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
        if isinstance(error, Answered | BadData | Forbidden | TooLarge):
            return True
        times, since = self._failing.pop(name, (0, self._successes))
        self._failing[name] = times + 1, since
        if len(self._failing) > MAX_FAILING:
            del self._failing[next(iter(self._failing))]
        return times + 1 >= MAX_FAILURES and self._successes > since


MAX_LOGGED_FRAMES = 8
LOGGED_AGAIN_SECONDS = 3_600.0
"""An error of the same type and place is in the log once in so long: each of 10,000 documents may cause it."""
_logged: dict[str, float] = {}


@contextmanager
def reading_data() -> Iterator[None]:
    """Raise BadData for an error of code that did not expect some data: use it around what is made of one thing's data,
    where its error then concerns that thing alone."""
    try:
        yield
    except BadEntry as error:
        raise BadData(str(error)) from error
    except OUTAGES:
        raise
    except OF_DATA as error:
        reason = place(error)
        now = time.monotonic()
        if _logged.get(reason, float("-inf")) < now - LOGGED_AGAIN_SECONDS:
            _logged[reason] = now
            # Not the messages of the traceback: they quote the data.
            frames = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__)]
            log.warning("source_data_unexpected", reason=reason, at=frames[-MAX_LOGGED_FRAMES:])
        raise BadData(f"its data are not as expected ({reason})") from error


def each(
    items: Iterable[Item], make: Callable[[Item], T], name: Callable[[Item], object]
) -> tuple[list[T], dict[str, BadData]]:
    """Make something of each item of a response. Returns what was made, and the errors of the other items by their
    names. name: of an item, whose data may be anything."""
    made: list[T] = []
    failed: dict[str, BadData] = {}
    for number, item in enumerate(items, 1):
        try:
            with reading_data():
                made.append(make(item))
        except BadData as error:
            failed[name_of(item, name, number)] = error
    return made, failed


async def read_accounts(rows: AsyncIterable[Item], make: Callable[[Item], T]) -> list[T]:
    """Make accounts of rows, without those whose data cannot be read: they hold nothing. Raises BadData if nearly all
    are like that, or the only ones: the reason is no single account."""
    accounts: list[T] = []
    failed, first = 0, None
    async for row in rows:
        made, errors = each([row], make, lambda _row: None)
        accounts += made
        failed, first = failed + len(errors), next(iter(errors.values()), first)
    if first is not None and (not accounts or is_failing(failed, failed + len(accounts))):
        raise first
    return accounts


def code_of(error: PenstockError) -> str:
    """Return the code of a document that is set aside because of an error."""
    return UNEXPECTED if isinstance(error, BadData) else "unavailable"


MAX_NAME_CHARACTERS = 200


def name_of(item: Item, name: Callable[[Item], object], number: int = 0) -> str:
    """Return the name of an item, or its number where its data do not say it."""
    try:
        text = name(item)
    except OF_DATA:
        text = None
    if isinstance(text, int) and abs(text) < 10**18:
        text = str(text)
    is_name = isinstance(text, str) and text.isprintable() and 0 < len(text) <= MAX_NAME_CHARACTERS
    return str(text) if is_name else f"number {number}"


async def read_isolated(
    names: Sequence[str],
    read: Callable[[Sequence[str]], Awaitable[Sequence[T]]],
    concerns_names: Callable[[PenstockError], bool] = may_be_set_aside,
) -> tuple[list[T], dict[str, PenstockError]]:
    """Read several things with one request. Where it fails, read the halves, and so on: only what fails by itself is
    returned among the errors. Raises errors that do not concern what was requested."""
    if not names:
        return [], {}
    try:
        return list(await read(names)), {}
    except PenstockError as error:
        if not concerns_names(error):
            raise
        if len(names) == 1:
            return [], {names[0]: error}
    middle = len(names) // 2
    first, first_errors = await read_isolated(names[:middle], read, concerns_names)
    second, second_errors = await read_isolated(names[middle:], read, concerns_names)
    return [*first, *second], {**first_errors, **second_errors}
