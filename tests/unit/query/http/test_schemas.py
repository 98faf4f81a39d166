"""Invalid requests are refused briefly, however large they are."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from pipeline.core.publication import content, token
from query.http import schemas
from query.http.schemas import SearchRequest

UNKNOWN = {f"field{n}": n for n in range(100_000)}


@pytest.mark.parametrize(
    "body",
    [
        {"query": "a", **UNKNOWN},
        {"query": "a", "filters": UNKNOWN},
        {"query": "a", "filters": {"sources": [1] * 10**5}},
        {"query": "a", "filters": {"metadata": dict.fromkeys(UNKNOWN)}},
    ],
    ids=["request", "filters", "names", "metadata"],
)
def test_a_request_of_very_many_mistakes_is_refused_with_one(body: dict[str, Any]) -> None:
    """Describing each of them took the service a second, in which it answered nobody."""
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate(body)
    assert caught.value.error_count() == 1


def test_the_mistakes_in_the_values_of_a_key_are_named_once_for_each_list() -> None:
    """A filter with as many keys and values as there may be had 24,000 mistakes."""
    lists = {"any": [None] * 100, "all": [None] * 100, "none": [None] * 100}
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate({"query": "a", "filters": {"metadata": dict.fromkeys("abcdefgh", lists)}})
    assert caught.value.error_count() < 8 * 30


def test_a_few_unknown_fields_are_named() -> None:
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate({"query": "a", "tpo": 5, "fliters": {}})
    assert sorted(error["loc"] for error in caught.value.errors()) == [("fliters",), ("tpo",)]


def test_a_request_is_validated_without_decoding_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding the largest one takes 35 ms; the handler does it, once."""
    written = token([content(uuid4(), 1)])
    monkeypatch.setattr(schemas, "publications_of", lambda _: pytest.fail("was decoded"))
    assert SearchRequest.model_validate({"query": "pumps", "at_least": written}).at_least == written
    with pytest.raises(ValidationError, match="is no token of a publication"):
        SearchRequest.model_validate({"query": "pumps", "at_least": written[:-3]})
