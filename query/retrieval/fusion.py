"""Rankings → one ranking. Pure. Why scores and not ranks: docs/adr/0006-fusion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from query.model import Ranker

WEIGHTS: Mapping[Ranker, float] = {"vector": 1.0, "keyword": 1.0}
"""Which half to trust the scores themselves say, question by question; from 0.7 to 1.5 the weights change little."""
FEWEST = 10
"""A ranking of fewer is filled up with what was left out: three scores have no spread to speak of."""

ROUNDING = 1e-12
"""Of a score: scores that differ by no more are alike, and differ by how a store has computed them."""


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
    """Standardised scores added: Σ weight · (score − the best that was left out) / the ranking's standard deviation.

    A hit far above its fellows counts as far, whatever the other ranking says; a ranking in which all are alike decides
    nothing. Who is missing from a ranking gets 0 of it, as if it were the best left out. Equal scores are ordered by
    their best rank (from 1), then by id, so that the same question has the same answer.
    """
    scores: dict[UUID, float] = {}
    ranks: dict[UUID, dict[Ranker, int]] = {}
    for ranker, ranking in rankings.items():
        for rank, (chunk_id, height) in enumerate(zip(ranking.ids, _heights(ranking), strict=True), start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weights[ranker] * height
            ranks.setdefault(chunk_id, {})[ranker] = rank
    fused = [Fused(chunk_id, score, ranks[chunk_id]) for chunk_id, score in scores.items()]
    return sorted(fused, key=lambda f: (-f.score, min(f.ranks.values()), f.chunk_id))


def _heights(ranking: Ranking) -> list[float]:
    """In standard deviations above the ranking's end."""
    floor = max(0.0, ranking.next_score)
    scores = [max(0.0, score - floor) for score in ranking.scores]
    spread = float(np.std([*scores, *[0.0] * max(1, FEWEST - len(scores))]))
    alike = ROUNDING * max((floor, *ranking.scores))
    return [score / spread for score in scores] if spread > alike else [0.0] * len(scores)
