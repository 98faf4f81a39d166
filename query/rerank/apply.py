"""One search's reranking: the first of the ranking, read again by whoever reads the question and a passage together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.core.errors import PenstockError
from query.arrange import Hit
from query.rerank.port import Reranker
from query.steps import Steps


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
