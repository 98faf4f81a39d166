"""Functions that both embedders share: refuse texts that are never sent, and scale rows to unit length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import Poison
from pipeline.embedding.port import Embedded, Vectors

EMPTY = "empty text"
NOT_UNICODE = "not valid Unicode"
REJECTED = "rejected by the embedding server"
NOT_FINITE = "the embedding server answered without a usable vector"


def refusal(text: str) -> str | None:
    """Why no model can embed this text, or None. Blank text has no meaning to place, and OpenAI answers 400 to it;
    a lone surrogate cannot be sent as UTF-8."""
    if not text.strip():
        return EMPTY
    try:
        text.encode()
    except UnicodeEncodeError:
        return NOT_UNICODE
    return None


def triage(texts: Sequence[str]) -> tuple[list[int], dict[int, str]]:
    """Indexes of the texts worth embedding, in order, and the others with their reasons."""
    refused = {index: reason for index, text in enumerate(texts) if (reason := refusal(text))}
    return [index for index in range(len(texts)) if index not in refused], refused


def usable(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """A mask of the rows that can be scaled to unit length: finite and not zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = _lengths(rows)
    return np.asarray(np.isfinite(lengths) & (lengths > 0), dtype=np.bool_)


def unit(rows: NDArray[np.float32]) -> Vectors:
    """Rows scaled to length 1. Every row must be usable()."""
    return np.asarray(rows / _lengths(rows)[:, np.newaxis], dtype=np.float32)


def _lengths(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    # Unlike numpy's norm(), this makes no array of squares as large as the rows.
    return np.asarray(np.sqrt(np.vecdot(rows, rows)), dtype=np.float32)


def only_row(embedded: Embedded) -> Vectors:
    """The vector of a batch of one. Raises Poison where that one was refused."""
    if reason := embedded.refused.get(0):
        raise Poison("unembeddable_query", f"the query cannot be embedded: {reason}")
    return np.asarray(embedded.vectors[0], dtype=np.float32)
