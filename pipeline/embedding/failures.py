"""Decides which requests fail by their own fault: those that fail again and again while others are answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pipeline.core.errors import Deferred, Retryable

if TYPE_CHECKING:  # a tenth of a second to import
    from pipeline.embedding.port import Vectors

ALONE_AFTER_TRIES, ALONE_AFTER_ANSWERS = 3, 3
"""A request that has failed so often, while so many others were answered, is not tried until its deadline: the server
is there, and the other documents in it wait no longer than they must. Where fewer were answered, a probe takes the next
turn, except after a 429: a limit may have room for a probe alone."""
PARTS_AFTER_FAILURES = 16
"""When so many requests in a row have failed, a part is halved only after a probe was answered: in an outage, each part
would become as many requests as it has texts, all tried until the deadline."""
MAX_SUSPECTS = 1_000
"""The most requests that are remembered because they fail alone, and because they failed until their deadline."""
SUSPECT_BASE_SECONDS, SUSPECT_CAP_SECONDS = 0.25, 20.0
"""The least wait after a failure of a request that fails alone, doubled each time up to the cap."""

V = TypeVar("V")


class Alone(Retryable):
    """A request failed again and again while others were answered."""

    alone = True
    arrived: Mapping[int, Vectors] = MappingProxyType({})
    """The vectors of those texts of the call that were embedded, by index."""


class ThrottledAlone(Alone, Deferred):
    """The same for one that was throttled: a server may refuse what is too large for its limit with a 429."""


@dataclass(slots=True)
class History:
    """The failures of one request, and what had happened to all requests when the first of them began."""

    tries: int
    answered_before: int
    failed_before: int

    def has_failed_enough(self, suspect: bool) -> bool:
        """Whether a probe may take the next turn. suspect: it is a part of a request that failed alone."""
        return self.tries >= (1 if suspect else ALONE_AFTER_TRIES)


class Failures:
    """Counts the answers and failures of one client. Requests are named by what they carry."""

    def __init__(self) -> None:
        self._answered = 0
        self._failed = 0
        self._failed_in_row = 0
        self._suspects: dict[int, int] = {}
        """Hashes of requests that fail alone → how often each has. The oldest are forgotten first."""
        self._unanswered: dict[int, History] = {}
        """Hashes of requests that failed until their deadline. The oldest are forgotten first."""

    def history(self) -> History:
        """Return the history of a request that begins now."""
        return History(0, self._answered, self._failed)

    def known(self, of: bytes | None) -> History | None:
        """Return the history of earlier calls with the same request: where little else is embedded, three others are
        not answered within one call. None if there is none, or others failed more often than they were answered since:
        the server may mean everybody."""
        known = self._unanswered.pop(hash(of), None) if self._unanswered else None
        if known is None:
            return None
        others_failed = self._failed - known.failed_before - known.tries
        return known if self._answered - known.answered_before >= others_failed else None

    def remember(self, of: bytes, history: History) -> None:
        """Keep the history of a request whose deadline has passed, for the next call with it."""
        if history.tries:
            _remember(self._unanswered, hash(of), history)

    def answered(self, of: bytes | None) -> None:
        self._failed_in_row = 0
        self._answered += 1
        if self._suspects:  # a megabyte takes a millisecond to hash
            self._suspects.pop(hash(of), None)

    def probe_answered(self) -> None:
        self._failed_in_row = 0

    def failed(self, history: History) -> None:
        self._failed += 1
        self._failed_in_row += 1
        history.tries += 1

    def may_divide(self, failure: Retryable, *, late: bool) -> bool:
        """Whether a part of a request that failed alone is divided again after this failure. late: its deadline has
        passed."""
        asks_to_wait = failure.retry_after is not None or isinstance(failure, Deferred)
        return not late and not asks_to_wait and self._failed_in_row <= PARTS_AFTER_FAILURES

    def is_alone(self, history: History, of: bytes | None, *, late: bool) -> bool:
        """Whether a request that has just failed fails by its own fault. late: its deadline has passed."""
        often = history.tries >= ALONE_AFTER_TRIES or late
        others_answered = self._answered - history.answered_before
        return hash(of) in self._suspects or (often and others_answered >= ALONE_AFTER_ANSWERS)

    def error(self, failure: Retryable, of: bytes | None) -> Alone:
        """Return the error for a request that fails alone, which waits longer each time."""
        times = self._suspects.pop(hash(of), 0)
        if of is not None:
            _remember(self._suspects, hash(of), times + 1)
        wait = max(failure.retry_after or 0.0, min(SUSPECT_CAP_SECONDS, SUSPECT_BASE_SECONDS * 2.0 ** min(times, 16)))
        kind = ThrottledAlone if isinstance(failure, Deferred) else Alone
        error = kind(str(failure), retry_after=wait, service="embedding")
        error.__cause__ = failure
        return error


def _remember(known: dict[int, V], key: int, value: V) -> None:
    known[key] = value
    while len(known) > MAX_SUSPECTS:
        del known[next(iter(known))]
