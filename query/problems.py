"""Errors over HTTP: problem+json (RFC 9457). A detail is one line without request content or internal addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.responses import Response

from pipeline.core.errors import Fenced, IndexFenced, PenstockError, Retryable
from query.model import BadQuery

Kind = Literal[
    "bad-request",
    "unauthorized",
    "forbidden",
    "not-found",
    "method-not-allowed",
    "slow-request",
    "too-large",
    "unsupported-media",
    "invalid",
    "bad-query",
    "rate-limited",
    "too-many-at-once",
    "over-share",
    "budget-exhausted",
    "busy",
    "unavailable",
    "ledger-fenced",
    "index-fenced",
    "too-slow",
    "failed",
]

KINDS: dict[Kind, tuple[int, str]] = {
    "bad-request": (400, "Malformed request"),
    "unauthorized": (401, "Missing or invalid token or API key"),
    "forbidden": (403, "Forbidden"),
    "not-found": (404, "Not found, or not readable by this caller"),
    "method-not-allowed": (405, "Method not allowed"),
    "slow-request": (408, "Request timeout"),
    "too-large": (413, "Request too large"),
    "unsupported-media": (415, "Unsupported media type"),
    "invalid": (422, "Invalid request"),
    "bad-query": (422, "Invalid query"),
    "rate-limited": (429, "Rate limit exceeded"),
    "too-many-at-once": (429, "Too many concurrent requests"),
    "over-share": (429, "Fair share exceeded"),
    "budget-exhausted": (429, "Daily budget exhausted"),
    "busy": (503, "Service busy"),
    "unavailable": (503, "Service unavailable"),
    "ledger-fenced": (503, "Ledger fenced: revocations may be missing"),
    "index-fenced": (503, "Keyword index fenced: it may not match the ledger"),
    "too-slow": (504, "Request timed out"),
    "failed": (500, "Internal error"),
}
"""Status and title of each problem type. The type's URI is ``urn:penstock:problem:KIND``."""

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 5
"""Default of Retry-After if the unavailable dependency did not send one."""
FENCED_RETRY_SECONDS = 60
"""A fence is lifted by an operator (``penstock recover``) or by a complete audit, which takes minutes."""


class Problem(Exception):  # RFC 9457's term
    """An error response. detail: one line for people."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """errors: one {"pointer", "detail"} for each invalid field of the request."""
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.errors = errors

    @property
    def status(self) -> int:
        return KINDS[self.kind][0]

    def as_json(self) -> dict[str, Any]:
        status, title = KINDS[self.kind]
        body = {"type": f"urn:penstock:problem:{self.kind}", "title": title, "status": status, "detail": self.detail}
        return body | ({"errors": [dict(error) for error in self.errors]} if self.errors else {})

    def response(self) -> Response:
        # ASCII: a field name from a request may contain lone surrogates, which UTF-8 cannot encode.
        return Response(json.dumps(self.as_json()), self.status, self.headers, MEDIA_TYPE)


def of(error: Exception) -> Problem:
    """The problem to respond with. The text of an error is included only if it is about the query or a fence: other
    texts may name internal servers."""
    match error:
        case Problem():
            return error
        case BadQuery():
            return Problem("bad-query", str(error))
        case Fenced():
            return Problem("ledger-fenced", str(error), headers={"Retry-After": str(FENCED_RETRY_SECONDS)})
        case IndexFenced():
            return Problem("index-fenced", str(error), headers={"Retry-After": str(FENCED_RETRY_SECONDS)})
        case Retryable():
            seconds = max(1, round(error.retry_after or RETRY_SECONDS))
            return Problem(
                "unavailable", "a required service is unavailable: retry later", headers={"Retry-After": str(seconds)}
            )
        case TimeoutError():
            return Problem("too-slow", "the request took too long: request less, or retry later")
        case PenstockError():
            return Problem("failed", "the service is misconfigured: see its log")
        case _:
            return Problem("failed", "unexpected error: see the service's log")
