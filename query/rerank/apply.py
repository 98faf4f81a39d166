"""One search's reranking: the first of the fusion, read again by whoever reads the question and a passage together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.core.errors import PenstockError
from query.rerank.port import Reranker
from query.steps import Steps

T = TypeVar("T")


async def rerank(
    reranker: Reranker, query: str, ranked: Sequence[T], read: Callable[[T], str], *, pool: int, steps: Steps
) -> list[tuple[T, float | None]]:
    """ranked: best first, and all of it what the caller may read. read: what the reranker is given of one.

    The first ``pool`` by their new score (equal ones in the order that they had), then the others, without one, as they
    were. A reranker that fails leaves everything as it was; the step says so.
    """
    first = ranked[:pool]
    try:
        # Recorded for an empty list too: who may read nothing looks like who finds nothing.
        with steps.step("rerank") as facts:
            facts["passages"] = len(first)
            scores = await reranker.rerank(query, [read(one) for one in first]) if first else []
    except PenstockError:
        return [(one, None) for one in ranked]  # the step has recorded it
    best_first = sorted(zip(first, scores, strict=True), key=lambda pair: -pair[1])
    return [*best_first, *((one, None) for one in ranked[pool:])]


def readable(title: str, headings: Sequence[str], text: str) -> str:
    """A passage with what it stands under: a chunk seldom repeats its document's title."""
    above = " › ".join(part for part in (title, *headings) if part)
    return f"{above}\n{text}" if above else text
