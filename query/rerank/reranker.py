"""What a reranker is to whoever asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pipeline.core.errors import PenstockError
from query.retrieval.arrange import Hit
from query.retrieval.steps import Steps


class Reranker(Protocol):
    """Reads a question and a passage together, which no index does. Safe to share between tasks."""

    @property
    def model(self) -> str: ...

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        """How relevant each text is, in their order; larger is better, comparable within one query only.

        tenant: whose question it is. What is remembered of it is remembered for that tenant alone.

        Raises Retryable (Deferred) when it is away or slow, Misconfigured when it refuses, Poison when it cannot read
        this very question (too long, rejected).
        """

    async def aclose(self) -> None: ...


async def rerank(
    reranker: Reranker, query: str, hits: Sequence[Hit], *, tenant: str, pool: int, steps: Steps
) -> list[Hit]:
    """hits: best first, and all of them what the caller may read.

    The first ``pool`` by their new score (equal ones in the order that they had), then the others, without one, as they
    were. A reranker that fails leaves everything as it was; the step says so.
    """
    first = hits[:pool]
    try:
        # Recorded for an empty list too: who may read nothing looks like who finds nothing.
        with steps.step("rerank") as facts:
            facts["passages"] = len(first)
            texts = [readable(hit) for hit in first]
            scores = await reranker.rerank(query, texts, tenant=tenant) if texts else []
    except PenstockError:
        return list(hits)  # the step has recorded it
    scored = [replace(hit, rerank_score=score) for hit, score in zip(first, scores, strict=True)]
    return [*sorted(scored, key=lambda hit: -(hit.rerank_score or 0.0)), *hits[pool:]]


def readable(hit: Hit) -> str:
    """Its title in front: a chunk seldom repeats its document's."""
    title = hit.passage.title
    return f"{title}\n{hit.text}" if title else hit.text
