"""The errors of a request to a source, besides Retryable, Deferred and Misconfigured.

No text quotes a URL's path or query, a header or a body: any of them may hold a secret.
"""

from __future__ import annotations

from pipeline.core.errors import Misconfigured, PenstockError, Retryable


class Answered(PenstockError):
    """The source responded with an error."""

    def __init__(self, message: str, *, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """The vendor's own error code, if the response holds one: at most 64 letters, digits and ``_.-``."""


class Missing(Answered):
    """404 or 410: the resource does not exist, or is hidden from this credential."""


class Denied(Answered):
    """401 or 403: the credential is not accepted, or lacks a permission."""


class Rejected(Answered):
    """Any other 4xx status, or one that is not in ``ok``: this request can never succeed as it is."""


class ServerFailed(Retryable):
    """The source answered 5xx, or did not finish its answer in time, without asking to wait: the reason may be what was
    requested. ``status`` is None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TooLarge(PenstockError):
    """The decoded body is larger than ``limit`` bytes."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class Forbidden(PenstockError):
    """A request to this address is not permitted: the host is not configured, or the address is not https or not
    public."""


class NotPublic(Forbidden):
    """The host is permitted, and its address is not public."""


class BadData(PenstockError):
    """The source responded, and what it says about one thing (a document, a group) is not as the connector's code
    expects it. The message names the type of the error and its place, never the data."""


class BadEntry(Misconfigured):
    """A field of an entry has a type that no entry may have. Where it concerns one document, that document is set
    aside."""
