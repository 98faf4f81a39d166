"""The interface of rerankers, and reranking the hits of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pipeline.core.errors import PenstockError
from query.retrieval.arrange import Hit
from query.retrieval.steps import Steps


class Reranker(Protocol):
    """Scores a query and a passage together, which no index does. Safe to share between tasks."""

    @property
    def model(self) -> str: ...

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        """The relevance of each text, in their order; larger is better, comparable within one query only.

        tenant: the tenant of the query; cached scores are used for that tenant only.

        Raises Retryable (Deferred) when it is unavailable or slow, Misconfigured when it refuses, and Poison when it
        cannot process this query (too long, rejected).
        """

    async def aclose(self) -> None: ...


async def rerank(
    reranker: Reranker, query: str, hits: Sequence[Hit], *, tenant: str, pool: int, steps: Steps
) -> list[Hit]:
    """Rerank the first ``pool`` hits by their new scores; equal scores keep their order, and the other hits follow
    unchanged. If the reranker fails, the order stays and the step reports it.

    hits: best first, and all of them readable by the caller.
    """
    first = hits[:pool]
    try:
        # Recorded for an empty list, too: a caller without access must look like one without matches.
        with steps.step("rerank") as facts:
            facts["passages"] = len(first)
            texts = [readable(hit) for hit in first]
            scores = await reranker.rerank(query, texts, tenant=tenant) if texts else []
    except PenstockError:
        return list(hits)  # the step has recorded it
    scored = [replace(hit, rerank_score=score) for hit, score in zip(first, scores, strict=True)]
    return [*sorted(scored, key=lambda hit: -(hit.rerank_score or 0.0)), *hits[pool:]]


def readable(hit: Hit) -> str:
    """The hit's text with its document's title, which a chunk seldom repeats."""
    title = hit.passage.title
    return f"{title}\n{hit.text}" if title else hit.text
