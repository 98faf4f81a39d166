"""Rankings → one ranking. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from query.model import Ranker

RRF_K = 60
"""Cormack, Clarke and Büttcher (2009): the larger, the less the very first ranks stand out."""
PER_DOCUMENT = 2
"""Passages of one document among the first, as long as other documents have something to say."""


@dataclass(frozen=True, slots=True)
class Fused:
    chunk_id: UUID
    score: float
    ranks: Mapping[Ranker, int]


def fuse(rankings: Mapping[Ranker, Sequence[UUID]], weights: Mapping[Ranker, float]) -> list[Fused]:
    """Reciprocal rank fusion: score = Σ weight / (RRF_K + rank), ranks from 1, best first.

    Only ranks count, because BM25 scores and cosine distances have no common scale. Equal scores are ordered by their
    best rank, then by id, so that the same question has the same answer.
    """
    ranks: dict[UUID, dict[Ranker, int]] = {}
    for ranker, ids in rankings.items():
        for rank, chunk_id in enumerate(ids, start=1):
            ranks.setdefault(chunk_id, {})[ranker] = rank
    fused = [Fused(i, sum(weights[r] / (RRF_K + rank) for r, rank in held.items()), held) for i, held in ranks.items()]
    return sorted(fused, key=lambda f: (-f.score, min(f.ranks.values()), f.chunk_id))


def diversify(
    ranked: Sequence[Fused], document_of: Callable[[UUID], UUID], top: int, per_document: int = PER_DOCUMENT
) -> list[Fused]:
    """The first ``top``, with at most ``per_document`` passages of one document unless nothing else is left; order
    within each part as it came."""
    taken: list[Fused] = []
    spare: list[Fused] = []
    count: dict[UUID, int] = {}
    for one in ranked:
        document = document_of(one.chunk_id)
        count[document] = count.get(document, 0) + 1
        (taken if count[document] <= per_document else spare).append(one)
    return [*taken, *spare][:top]
