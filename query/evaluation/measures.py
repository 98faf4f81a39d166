"""Rankings and judgements → measures, with how sure they are. Pure: every draw is seeded.

The measures are ``ir_measures``' (TREC's definitions); intervals and tests are over queries, which are what a
collection is a sample of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import atan2, cos, pi, sin, sqrt

import ir_measures
import numpy as np
from ir_measures import RR, Qrel, R, ScoredDoc, nDCG
from numpy.typing import NDArray

from query.evaluation.dataset import Judgements

MEASURES = {"nDCG@5": nDCG @ 5, "nDCG@10": nDCG @ 10, "recall@50": R @ 50, "MRR": RR}
"""MRR: over the whole ranking."""
RESAMPLES = 10_000
ROUNDING = 1e-14
"""Equal numbers may differ by this share, and a probability as small cannot be distinguished from 0."""
SEED = 20_261_121
CONFIDENCE = 0.95

Rankings = Mapping[str, Sequence[str]]
"""Query → documents, the best first, none twice."""
Values = Mapping[str, NDArray[np.float64]]
"""Measure → its value for each query, in the order of the judgements."""


@dataclass(frozen=True, slots=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against another on the same queries. difference: of the means, positive where the first is better."""

    difference: Interval
    p_randomisation: float
    """Two-sided: how often as large a difference comes about when each query's two values are swapped at random."""
    p_t: float
    """Two-sided, of the paired t-test."""
    wins: int
    losses: int


def measure(rankings: Rankings, judgements: Judgements) -> Values:
    """A query without a ranking counts with 0: an engine that falls silent is not the better for it."""
    order = {query: n for n, query in enumerate(judgements)}
    qrels = [Qrel(query, document, gain) for query, gains in judgements.items() for document, gain in gains.items()]
    run = [
        ScoredDoc(query, document, float(-rank))
        for query, ranked in rankings.items()
        if query in order
        for rank, document in enumerate(ranked)
    ]
    names = {measure: name for name, measure in MEASURES.items()}
    values: dict[str, NDArray[np.float64]] = {name: np.zeros(len(order)) for name in MEASURES}
    for metric in ir_measures.iter_calc(list(names), qrels, run):
        values[names[metric.measure]][order[metric.query_id]] = metric.value
    return values


def interval(values: NDArray[np.float64]) -> Interval:
    """The mean and where 95 % of the means of resampled queries lie (percentile bootstrap). values: one a query."""
    if not len(values):
        return Interval(0.0, 0.0, 0.0)
    draws = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values[draws].mean(axis=1), [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def compare(one: NDArray[np.float64], other: NDArray[np.float64]) -> Comparison:
    """one, other: values of the same queries in the same order."""
    differences = one - other
    if not np.any(differences):
        return Comparison(Interval(0.0, 0.0, 0.0), 1.0, 1.0, 0, 0)
    randomised = randomisation_test(differences)
    constant = bool(np.all(differences == differences[0]))
    return Comparison(
        interval(differences),
        randomised,
        randomised if constant else _paired_t_test(differences),
        int(np.sum(differences > 0)),
        int(np.sum(differences < 0)),
    )


def randomisation_test(differences: NDArray[np.float64]) -> float:
    """Two-sided p of the mean, with the sign of each difference drawn at random. The observed signs count as one draw,
    so that it is never 0. Without a difference, it is 1."""
    drawn = np.random.default_rng(SEED).integers(0, 2, (RESAMPLES, len(differences)), dtype=np.int8)
    means = np.abs((2 * drawn - 1) @ differences)
    observed = abs(float(differences.sum()))
    return float((np.sum(means >= observed * (1 - ROUNDING)) + 1) / (RESAMPLES + 1))


def _paired_t_test(differences: NDArray[np.float64]) -> float:
    """Two-sided p of the mean. For whole degrees of freedom Student's distribution is a finite sum (Abramowitz and
    Stegun 26.7.3 and 26.7.4), so that this needs no scipy, which is larger than all else of the query service."""
    freedom = len(differences) - 1
    if freedom == 0:
        return 1.0
    t = abs(float(differences.mean())) / (float(differences.std(ddof=1)) / sqrt(len(differences)))
    angle = atan2(t, sqrt(freedom))
    term = cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for step in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= step / (step + 1) * cos(angle) ** 2
    inside = 2 / pi * (angle + sin(angle) * total) if freedom % 2 else sin(angle) * total
    return max(1 - inside, ROUNDING)
