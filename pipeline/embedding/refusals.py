"""What an embedding server's error means: heals, needs new settings, or is this request's own fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import classify_http, retry_after_seconds
from pipeline.embedding.http import Response
from pipeline.embedding.pace import Throttled
from pipeline.telemetry import EmbeddingOutcome

QUOTA_WAIT_SECONDS = 60.0
"""An empty account heals when somebody pays: ask once a minute."""


class Rejected(Exception):
    """The server will not take this request's content (400, 413, 422). label: the error's code or type, bounded to
    letters. message: may quote the input, so it is shown only when the input was PROBE."""

    def __init__(self, status: int, label: str, message: str) -> None:
        super().__init__(status, label)
        self.status = status
        self.label = label
        self.message = message


def failure(response: Response, host: str) -> Retryable | Misconfigured | Rejected:
    """An answer that is an error, as what the pipeline does about it."""
    status = response.status
    error = _error(response.body)
    kind_of_error = str(error.get("code") or error.get("type") or "error")
    label = re.sub(r"[^\w.-]", "", kind_of_error)[:60]
    match classify_http(status, kind_of_error):
        case "retry":
            wait = retry_after_seconds(response.headers, now=datetime.now(UTC))
            kind = Throttled if status == 429 else Retryable
            return kind(f"the embedding server {host} answers {status} {label}", retry_after=wait)
        case "quota":
            # Deferred: it holds every request, but says nothing of a rate.
            return Deferred(
                f"the embedding account's quota is used up ({host}: {status} {label}): raise its limit",
                retry_after=QUOTA_WAIT_SECONDS,
            )
        case "poison":
            return Rejected(status, label, " ".join(str(error.get("message", "")).split())[:200])
        case "misconfigured":
            return Misconfigured(
                f"the embedding server {host} answers {status} {label}: "
                f"check PENSTOCK_EMBEDDING_{_SETTING.get(status, 'BASE_URL')}",
                service="embedding",
            )


_SETTING = {401: "API_KEY", 403: "API_KEY (it may not use this model)", 404: "MODEL and PENSTOCK_EMBEDDING_BASE_URL"}


def outcome(error: Retryable | Misconfigured | Rejected) -> EmbeddingOutcome:
    match error:
        case Deferred():
            return "throttled"
        case Retryable():
            return "unavailable"
        case Misconfigured():
            return "misconfigured"
        case _:
            return "rejected"


def _error(body: bytes) -> Mapping[str, Any]:
    """The error's ``code``, ``type`` and ``message``, as far as they are there: under "error" as OpenAI writes it, or
    bare; a body that is no JSON (a proxy's page) is all message."""
    try:
        told = from_json(body)
    except ValueError:
        return {"message": body[:1_000].decode(errors="replace")}
    error = told.get("error", told) if isinstance(told, dict) else told
    return error if isinstance(error, dict) else {"message": error}
