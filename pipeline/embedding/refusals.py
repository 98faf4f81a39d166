"""What an embedding server's error means: heals, needs new settings, or is this request's own fault."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import openai

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import classify_http, retry_after_seconds
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


def failure(error: openai.APIStatusError, host: str) -> Retryable | Misconfigured | Rejected:
    """An answer that is an error, as what the pipeline does about it."""
    status = error.status_code
    label = _label(error)
    match classify_http(status, error.code or error.type):
        case "retry":
            wait = retry_after_seconds(error.response.headers, now=datetime.now(UTC))
            kind = Throttled if status == 429 else Retryable
            return kind(f"the embedding server {host} answers {status} {label}", retry_after=wait)
        case "quota":
            # Deferred: it holds every request, but says nothing of a rate.
            return Deferred(
                f"the embedding account's quota is used up ({host}: {status} {label}): raise its limit",
                retry_after=QUOTA_WAIT_SECONDS,
            )
        case "poison":
            return Rejected(status, label, _message(error))
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


def why(error: openai.APIConnectionError) -> str:
    cause = error.__cause__
    return "timed out" if isinstance(error, openai.APITimeoutError) else type(cause or error).__name__


def _label(error: openai.APIStatusError) -> str:
    return re.sub(r"[^\w.-]", "", str(error.code or error.type or "error"))[:60]


def _message(error: openai.APIStatusError) -> str:
    """The server's own words, on one line."""
    words = error.body.get("message") if isinstance(error.body, dict) else error.body
    return " ".join(str(words or error.message).split())[:200]
