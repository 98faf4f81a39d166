"""Parses the responses of an OpenAI-compatible embeddings server: JSON → rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import QUOTA_WAIT_SECONDS, classify_http, retry_after_seconds
from pipeline.embedding.http import Response
from pipeline.embedding.pace import Throttled
from pipeline.observability.metrics import EmbeddingOutcome

FLOAT, FLOAT_BYTES = "<f4", 4


@dataclass(frozen=True, slots=True)
class Answer:
    """rows: float32 (inputs, dimensions) in the order of the inputs, as the server scaled them; read-only."""

    rows: NDArray[np.float32]
    tokens: int


class _Row(BaseModel):
    # pydantic's own decoder takes a fifth of the time of Python's, and no string is made on the way.
    model_config = ConfigDict(val_json_bytes="base64")

    index: int
    embedding: Annotated[bytes | list[float | None], Field(union_mode="left_to_right")]
    """base64 of little-endian float32, or numbers; some servers write null for NaN."""


class _Usage(BaseModel):
    prompt_tokens: int = 0
    total_tokens: int = 0


class _Response(BaseModel):
    data: list[_Row]
    usage: _Usage | None = None


def read(body: bytes, *, inputs: int, dimensions: int) -> Answer:
    """Rows sorted by their index. Raises Retryable where the answer is broken or incomplete, Misconfigured where the
    vectors have another dimension."""
    try:
        response = _Response.model_validate_json(body)
        rows = [_floats(row.embedding) for row in response.data]
    except (ValidationError, ValueError) as error:
        # The cause would quote the body: name it by its kind only.
        raise Retryable(f"the embedding server's answer cannot be read ({type(error).__name__})") from None
    order = [row.index for row in response.data]
    if sorted(order) != list(range(inputs)):
        raise Retryable(
            f"the embedding server answered {len(order)} rows for {inputs} inputs, or numbered them wrongly"
        )
    if wrong := {len(row) // FLOAT_BYTES for row in rows} - {dimensions}:
        raise Misconfigured(
            f"the embedding server answers vectors of {min(wrong)} dimensions, the settings say {dimensions}: "
            "set PENSTOCK_EMBEDDING_DIMENSIONS, or PENSTOCK_EMBEDDING_SEND_DIMENSIONS where the model can shorten",
            service="embedding",
        )
    matrix = np.frombuffer(b"".join(rows), dtype=FLOAT).reshape(inputs, dimensions).astype(np.float32, copy=False)
    usage = response.usage or _Usage()
    return Answer(
        matrix if order == sorted(order) else matrix[np.argsort(order)], usage.total_tokens or usage.prompt_tokens
    )


def _floats(embedding: bytes | list[float | None]) -> bytes:
    """As base64 carries them. Raises ValueError."""
    if not isinstance(embedding, bytes):
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and its row unusable
            return np.array([np.nan if number is None else number for number in embedding], dtype=FLOAT).tobytes()
    if len(embedding) % FLOAT_BYTES:
        raise ValueError("not a number of float32")
    return embedding


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
        parsed = from_json(body)
    except ValueError:
        return {"message": body[:1_000].decode(errors="replace")}
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return error if isinstance(error, dict) else {"message": error}
