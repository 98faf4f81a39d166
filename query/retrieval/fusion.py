"""Rankings → one ranking. Pure. Why scores and not ranks: docs/adr/0006-fusion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from query.model import Ranker

WEIGHTS: Mapping[Ranker, float] = {"vector": 1.0, "keyword": 1.0}
"""Equal weights (``RankingSettings.keyword_weight`` sets others): the scores themselves show, for each query, which
ranking to trust. Weights from 0.7 to 1.5 change little."""
MIN_RANKING_SIZE = 10
"""A shorter ranking is padded with zeros, because few scores have no meaningful standard deviation."""

ROUNDING = 1e-12
"""The relative rounding error of a score: scores that differ by less count as equal."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """One store's candidates, best first. Scores are BM25 or cosine and are compared only within the ranking."""

    ids: Sequence[UUID]
    scores: Sequence[float]
    next_score: float = 0.0
    """The score of the best candidate that is left out; 0 (no common word, unrelated) where none is."""


@dataclass(frozen=True, slots=True)
class Fused:
    chunk_id: UUID
    score: float
    ranks: Mapping[Ranker, int]


def fuse(rankings: Mapping[Ranker, Ranking], weights: Mapping[Ranker, float] = WEIGHTS) -> list[Fused]:
    """Add standardised scores: Σ weight · (score − best score that is left out) / the ranking's standard deviation.

    A candidate far above the others keeps its distance, whatever the other ranking says; a ranking of equal scores has
    no influence. A candidate that is missing from a ranking gets 0 from it, like the best one that is left out. Equal
    scores are ordered by their best rank (from 1), then by id, so that results are reproducible.
    """
    scores: dict[UUID, float] = {}
    ranks: dict[UUID, dict[Ranker, int]] = {}
    for ranker, ranking in rankings.items():
        for rank, (chunk_id, score) in enumerate(zip(ranking.ids, _standardised(ranking), strict=True), start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weights[ranker] * score
            ranks.setdefault(chunk_id, {})[ranker] = rank
    fused = [Fused(chunk_id, score, ranks[chunk_id]) for chunk_id, score in scores.items()]
    return sorted(fused, key=lambda f: (-f.score, min(f.ranks.values()), f.chunk_id))


def _standardised(ranking: Ranking) -> list[float]:
    """The scores in standard deviations above the end of the ranking."""
    floor = max(0.0, ranking.next_score)
    scores = [max(0.0, score - floor) for score in ranking.scores]
    spread = float(np.std([*scores, *[0.0] * max(1, MIN_RANKING_SIZE - len(scores))]))
    negligible = ROUNDING * max((floor, *ranking.scores))
    return [score / spread for score in scores] if spread > negligible else [0.0] * len(scores)
