"""The three kinds of error, and nothing else decides what happens to a failing piece of work."""

from __future__ import annotations

from typing import Literal

Service = Literal["postgres", "elasticsearch", "kafka", "embedding", "rerank", "chat", "dead-letters"]
"""The dependencies that can fail. "dead-letters" is our own limit on their number."""


class PenstockError(Exception):
    """Base of the errors that are shown to people: one line that says what is wrong, where, and what to do."""

    tokens = 0
    """Tokens that a model billed before the failure."""


class Retryable(PenstockError):
    """The world may heal (a refused connection, a 429, a 5xx): wait and try again; never dead-letter."""

    def __init__(self, message: str, *, retry_after: float | None = None, service: Service | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the other side asked us to wait, if it said so."""
        self.service = service
        """The dependency that has to recover, where that is known."""


class Deferred(Retryable):
    """The other side asks us to come later (a 429), has no room (a full disk), or serves every piece of work and fails
    at all of them (an extraction service that is away): that says nothing about the piece of work."""


class Fenced(Retryable):
    """The ledger must not be used until it is recovered, or the settings name the primary. The text says which,
    and names no server: callers of the query service are told it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, service="postgres")


class IndexFenced(Retryable):
    """The keyword index is not the one that the ledger filled, and not compared with it yet. Callers of the query
    service are told the text."""

    def __init__(self) -> None:
        super().__init__(
            "the keyword index was restored, recreated or set back, and is not searched until the workers have compared"
            " it with the ledger; `penstock status` shows their progress, `penstock audit --repair` does it at once",
            service="elasticsearch",
        )


class Poison(PenstockError):
    """This record never works. ``code`` is a bounded label; the text never quotes content."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Misconfigured(PenstockError):
    """Nothing works until somebody changes the settings: refuse to start."""

    def __init__(self, message: str, *, service: Service | None = None) -> None:
        super().__init__(message)
        self.service = service
        """The dependency that refuses, where that is known."""
