"""What rerank servers are sent and what they answer. Pure.

Cohere (``/v2/rerank``), Jina (``/v1/rerank``) and vLLM (``/rerank``, ``/v1/rerank``, ``/v2/rerank``) differ in little;
TEI (``/rerank``) takes ``texts``, answers a bare list and has no model to name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from pipeline.core.errors import Retryable
from query.settings import Flavour

MOST_TEXTS: Mapping[Flavour, int] = {"tei": 32}
"""Texts a request, where there are fewer than a pool may have: TEI's --max-client-batch-size is 32 unless set."""


def body(flavour: Flavour, model: str, query: str, texts: Sequence[str]) -> dict[str, Any]:
    """The JSON of one request for the scores of all texts. A passage that is too long loses its end at the server."""
    if flavour == "tei":
        return {"query": query, "texts": list(texts), "truncate": True}
    asked: dict[str, Any] = {"query": query, "documents": list(texts), "top_n": len(texts)}
    if model:
        asked["model"] = model
    if flavour == "jina":
        asked["return_documents"] = False  # else each passage comes back
    if flavour == "vllm":
        asked["truncate_prompt_tokens"] = -1  # the model's window; without it a passage that is too long is refused
    return asked


class _Rank(BaseModel):
    index: int
    score: float = Field(validation_alias=AliasChoices("relevance_score", "score"))


class _Ranks(BaseModel):
    results: list[_Rank]


_ANSWER = TypeAdapter[_Ranks | list[_Rank]](_Ranks | list[_Rank])


def read(answer: bytes, *, texts: int) -> list[float]:
    """The scores in the order of the texts, from either shape. Raises Retryable unless every text has one, once, and it
    is finite."""
    try:
        parsed = _ANSWER.validate_json(answer)
    except ValidationError as error:
        # The cause would quote the body: name it by its kind only.
        raise Retryable(
            f"the rerank server's answer cannot be read ({type(error).__name__})", service="rerank"
        ) from None
    ranks = parsed if isinstance(parsed, list) else parsed.results
    if sorted(rank.index for rank in ranks) != list(range(texts)):
        raise Retryable(
            f"the rerank server answered {len(ranks)} scores for {texts} passages, or numbered them wrongly",
            service="rerank",
        )
    if not all(math.isfinite(rank.score) for rank in ranks):
        raise Retryable("the rerank server answered a score that is no number", service="rerank")
    return [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
