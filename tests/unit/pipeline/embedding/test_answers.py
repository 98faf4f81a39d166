"""Responses of servers, read from literal JSON."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.embedding.responses import read


def body(*rows: tuple[int, Any], **more: Any) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": embedding} for index, embedding in rows]
    return json.dumps({"object": "list", "data": data, "model": "m", **more}).encode()


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def test_vectors_as_numbers_and_as_base64_are_read_alike() -> None:
    for answer in (body((0, [1.5, -2.0]), (1, [0.25, 3])), body((0, packed(1.5, -2.0)), (1, packed(0.25, 3)))):
        rows = read(answer, inputs=2, dimensions=2).rows
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, [[1.5, -2.0], [0.25, 3.0]])


def test_embedding_rows_are_sorted_by_index() -> None:
    rows = read(body((2, [2]), (0, [0]), (1, [1])), inputs=3, dimensions=1).rows
    np.testing.assert_array_equal(rows, [[0], [1], [2]])


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({}, 0),
        ({"usage": None}, 0),
        ({"usage": {"prompt_tokens": 5}}, 5),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 7}}, 7),
    ],
)
def test_billed_tokens_are_read_from_the_usage(usage: dict[str, Any], tokens: int) -> None:
    assert read(body((0, [1.0]), **usage), inputs=1, dimensions=1).tokens == tokens


def test_null_and_numbers_beyond_float32_become_non_finite_rows() -> None:
    rows = read(body((0, [None, 1.0]), (1, [1e300, 0.0])), inputs=2, dimensions=2).rows
    assert not np.isfinite(rows).all(axis=1).any()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html></html>",
        b'{"data": [{"index": 0, "embedd',
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"error": {"message": "the secret document"}}',
        body((0, "not base64!")),
        body((0, "AAAA")),  # three bytes are no float
        body((0, {"sparse": 1})),
        body((0, ["the secret document"])),
    ],
)
def test_an_unreadable_embedding_response_is_retryable_and_not_quoted(answer: bytes) -> None:
    with pytest.raises(Retryable, match="cannot be read") as caught:
        read(answer, inputs=1, dimensions=1)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("indexes", [(), (0,), (0, 1, 2), (0, 0), (1, 2), (-1, 0)])
def test_missing_or_misnumbered_embedding_rows_are_retryable(indexes: tuple[int, ...]) -> None:
    with pytest.raises(Retryable, match=f"{len(indexes)} rows for 2 inputs"):
        read(body(*((index, [1.0]) for index in indexes)), inputs=2, dimensions=1)


def test_an_embedding_row_of_another_dimension_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="3 dimensions, the settings say 2"):
        read(body((0, [1, 2]), (1, [1, 2, 3])), inputs=2, dimensions=2)
