"""What asking a source can end with, besides Retryable, Deferred and Misconfigured. No text quotes a URL's path or
query, a header or a body: any of them may hold a secret."""

from __future__ import annotations

from pipeline.core.errors import PenstockError


class Answered(PenstockError):
    """The source answered, and not with what was asked for."""

    def __init__(self, message: str, *, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """The vendor's own short word for it, where its answer holds one; at most 64 letters, digits and ``_.-``."""


class Missing(Answered):
    """404 or 410: there is no such thing, or not for us."""


class Denied(Answered):
    """401 or 403: the credential is not taken, or not for this."""


class Rejected(Answered):
    """Any other answer of the 4xx kind, or one outside of ``ok``: this request, as it is, never works."""


class TooLarge(PenstockError):
    """The answer is larger than ``limit`` bytes, decoded."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class Forbidden(PenstockError):
    """An address that this client may not ask: no configured host, not https, or not a public address."""
