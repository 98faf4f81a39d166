"""What an OpenAI-compatible embeddings server answers: JSON → rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import Misconfigured, Retryable

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
