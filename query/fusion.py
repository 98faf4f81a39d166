"""Rankings → one ranking. Pure. Why it is more than plain reciprocal ranks: docs/adr/0006-fusion.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from query.model import Ranker

RRF_K = 60
"""Cormack, Clarke and Büttcher (2009): the larger, the less the very first ranks stand out."""
WEIGHTS: Mapping[Ranker, float] = {"vector": 1.0, "keyword": 1.5}
"""From 1.25 to 2 for keywords, fusion is at least as good as either store alone (docs/adr/0006-fusion.md)."""
PER_DOCUMENT = 2
"""Passages of one document among the first, as long as other documents have something to say."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """One store's candidates, best first, scores falling. BM25 or cosine: only compared within the ranking."""

    ids: Sequence[UUID]
    scores: Sequence[float]
    next_score: float = 0.0
    """Of the best candidate that was left out; 0 (no word in common, unrelated) where none was."""


@dataclass(frozen=True, slots=True)
class Fused:
    chunk_id: UUID
    score: float
    ranks: Mapping[Ranker, int]


def fuse(rankings: Mapping[Ranker, Ranking], weights: Mapping[Ranker, float] = WEIGHTS) -> list[Fused]:
    """Reciprocal rank fusion in which a hit counts as far as it stands out: Σ weight · height / (RRF_K + rank).

    Ranks from 1, best first. height: 1 for a ranking's best, 0 for the best that was left out of it, linear in
    between. Equal scores are ordered by their best rank, then by id, so that the same question has the same answer.
    """
    scores: dict[UUID, float] = {}
    ranks: dict[UUID, dict[Ranker, int]] = {}
    for ranker, ranking in rankings.items():
        for rank, (chunk_id, height) in enumerate(zip(ranking.ids, _heights(ranking), strict=True), start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weights[ranker] * height / (RRF_K + rank)
            ranks.setdefault(chunk_id, {})[ranker] = rank
    fused = [Fused(chunk_id, score, ranks[chunk_id]) for chunk_id, score in scores.items()]
    return sorted(fused, key=lambda f: (-f.score, min(f.ranks.values()), f.chunk_id))


def _heights(ranking: Ranking) -> list[float]:
    floor = max(0.0, ranking.next_score)
    best = max(ranking.scores, default=0.0)
    if best <= floor:
        return [1.0] * len(ranking.scores)  # nothing stands out
    return [max(0.0, (score - floor) / (best - floor)) for score in ranking.scores]


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
