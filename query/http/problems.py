"""Errors over HTTP: problem+json (RFC 9457), one line each, and never what a caller sent or an inner address."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.responses import Response

from pipeline.core.errors import Fenced, IndexFenced, PenstockError, Retryable
from query.model import BadQuery

Kind = Literal[
    "bad-request", "unauthorized", "forbidden", "not-found", "method-not-allowed", "slow-request", "too-large",
    "unsupported-media", "invalid", "bad-query", "rate-limited", "too-many-at-once",
    "over-share", "budget-exhausted", "busy", "unavailable",
    "ledger-fenced", "index-fenced", "too-slow", "failed",
]  # fmt: skip

KINDS: dict[Kind, tuple[int, str]] = {
    "bad-request": (400, "The request cannot be read"),
    "unauthorized": (401, "It is not proved who asks"),
    "forbidden": (403, "Not for this caller"),
    "not-found": (404, "There is no such thing, or not for this caller"),
    "method-not-allowed": (405, "This address does not take that method"),
    "slow-request": (408, "The request did not arrive in time"),
    "too-large": (413, "The request is too large"),
    "unsupported-media": (415, "The request is not JSON"),
    "invalid": (422, "The request has another shape than is described"),
    "bad-query": (422, "The question cannot be asked"),
    "rate-limited": (429, "Too many requests a minute"),
    "too-many-at-once": (429, "Too many requests at once"),
    "over-share": (429, "Others wait for their share"),
    "budget-exhausted": (429, "The budget of the day is used up"),
    "busy": (503, "The service is busy"),
    "unavailable": (503, "The service cannot answer now"),
    "ledger-fenced": (503, "The ledger may lack what was revoked"),
    "index-fenced": (503, "The keyword index has changed behind the ledger's back"),
    "too-slow": (504, "The answer took too long"),
    "failed": (500, "The service failed"),
}
"""Every type of problem: its status and its title. The type's URI is ``urn:penstock:problem:KIND``."""

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 5
"""What Retry-After says when whatever is away did not say it."""

FENCED_RETRY_SECONDS = 60
"""A person has to run a command that reads events again, or the workers compare everything."""


class Problem(Exception):  # the word is the RFC's
    """An answer that is none. detail: for people, one line."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """errors: where in the request what is wrong, {"pointer", "detail"} each."""
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
        told = {"type": f"urn:penstock:problem:{self.kind}", "title": title, "status": status, "detail": self.detail}
        return told | ({"errors": [dict(error) for error in self.errors]} if self.errors else {})

    def response(self) -> Response:
        # ASCII: a field's name that a client sent may hold what UTF-8 cannot say.
        return Response(json.dumps(self.as_json()), self.status, self.headers, MEDIA_TYPE)


def of(error: Exception) -> Problem:
    """What a caller is told of an error. What it says stays in the log unless it is about the question: the others
    name servers."""
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
                "unavailable", "a part of the service is away: ask again later", headers={"Retry-After": str(seconds)}
            )
        case TimeoutError():
            return Problem("too-slow", "the time for an answer is over: ask for less, or again later")
        case PenstockError():
            return Problem("failed", "the service is set up wrongly: its log says how")
        case _:
            return Problem("failed", "the service met something unexpected: its log says what")
