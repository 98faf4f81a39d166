"""The three kinds of error. The kind alone decides what happens to work that fails:

PenstockError
├── Retryable          wait and try again
│   ├── Deferred       … and it is no evidence against the work itself
│   ├── Fenced
│   └── IndexFenced
├── Poison             becomes a dead letter
└── Misconfigured      refuse to start
"""

from __future__ import annotations

from typing import Literal

Service = Literal["postgres", "elasticsearch", "kafka", "embedding", "rerank", "chat", "dead-letters"]
"""The dependencies that can fail. "dead-letters" is our own limit on their number."""


class PenstockError(Exception):
    """Base of the errors that are shown to people: one line that says what is wrong, where, and what to do."""

    tokens = 0
    """Tokens that a model billed before the failure."""


class Retryable(PenstockError):
    """A later attempt may succeed (after a refused connection, a 429, a 5xx). Never becomes a dead letter."""

    alone = False
    """True if the service is known to answer others meanwhile."""

    def __init__(self, message: str, *, retry_after: float | None = None, service: Service | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """The seconds that the service has asked us to wait; None: it has not."""
        self.service = service
        """The dependency that has to recover; None: unknown."""


class Deferred(Retryable):
    """The failure is no evidence against the piece of work, however often it happens and whatever else succeeds: the
    service asks us to come later (a 429), has no room (a full disk), or fails at everything."""


class Fenced(Retryable):
    """The ledger must not be used until it is recovered, or until the settings name the primary; the message says
    which. It names no server, because callers of the query service receive it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, service="postgres")


class IndexFenced(Retryable):
    """The keyword index is not the one that the ledger filled, and was not compared with it yet. Callers of the query
    service receive the message."""

    def __init__(self) -> None:
        super().__init__(
            "the keyword index was restored, recreated or set back, and is not searched until the workers have compared"
            " it with the ledger; `penstock status` shows their progress, `penstock audit --repair` does it at once",
            service="elasticsearch",
        )


class Poison(PenstockError):
    """This record can never succeed. ``code`` is one of a bounded set of labels; the message never quotes content."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Misconfigured(PenstockError):
    """Nothing works until an operator changes the settings. A process refuses to start."""

    def __init__(self, message: str, *, service: Service | None = None) -> None:
        super().__init__(message)
        self.service = service
        """The dependency that refuses us; None: unknown."""
