"""The report of an evaluation in JSON, as the command prints it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from query.evaluation.dataset import BadDataset, Dataset
from query.evaluation.measures import MEASURES, Interval, Rankings, Values, compare, interval, measure
from query.evaluation.rank import RERANKED, by_slice

TESTED = "nDCG@10"
COMPARED = (TESTED, "recall@50")
"""The measures by which configurations are compared."""
DECIMALS = 6
"""Those of saved values. A comparison rounds both sides: equal rankings must not differ by their rounding."""
SIGNIFICANT = 0.05
"""The two-sided p below which a difference is significant. A decline of one measure is then reported by chance in at
most 2.5 % of all comparisons, one of both in at most 5 %."""

Saved = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The value of each query by run (a mode, or RERANKED) and measure, for comparison with those of another
configuration."""


def values_of(dataset: Dataset, results: Mapping[str, Rankings]) -> Saved:
    return {
        mode: {
            name: {query: round(float(value), DECIMALS) for query, value in zip(dataset.queries, scores, strict=True)}
            for name, scores in measure(rankings, dataset.judgements).items()
        }
        for mode, rankings in results.items()
    }


def report(
    dataset: Dataset, results: Mapping[str, Rankings], degraded: Mapping[str, int], against: Saved | None = None
) -> dict[str, Any]:
    """``runs``: each measure's mean, its 95 % interval under ``intervals``; ``slices``: nDCG@10 by the queries' kind;
    ``comparisons``: hybrid against each half, reranked against hybrid, and each run against the one that was saved
    before, on the queries that both have; ``degraded``: how often something was left out, by its reason."""
    values = {mode: measure(rankings, dataset.judgements) for mode, rankings in results.items()}
    return {
        "dataset": dataset.name,
        "documents": len(dataset.documents),
        "queries": len(dataset.queries),
        "runs": {mode: _run(measured) for mode, measured in values.items()},
        "slices": _slices(dataset, values),
        "comparisons": {
            f"hybrid over {mode}": _comparison(values["hybrid"], measured)
            for mode, measured in values.items()
            if mode not in ("hybrid", RERANKED) and "hybrid" in values
        }
        | (
            {f"{RERANKED} over hybrid": _comparison(values[RERANKED], values["hybrid"])}
            if RERANKED in values and "hybrid" in values
            else {}
        )
        | _against(dataset, values, against or {}),
        "degraded": dict(degraded),
    }


def _run(values: Values) -> dict[str, Any]:
    intervals = {name: interval(scores) for name, scores in values.items()}
    return {
        **{name: round(i.mean, 4) for name, i in intervals.items()},
        "intervals": {name: _ends(i) for name, i in intervals.items()},
    }


def _ends(measured: Interval) -> list[float]:
    return [round(measured.low, 4), round(measured.high, 4)]


def _slices(dataset: Dataset, values: Mapping[str, Values]) -> dict[str, Any]:
    return {
        kind: {
            "queries": len(positions),
            **{
                mode: {name: round(float(np.mean(measured[name][positions])), 4) for name in MEASURES}
                for mode, measured in values.items()
            },
        }
        for kind, positions in sorted(by_slice(dataset).items())
    }


def _against(dataset: Dataset, values: Mapping[str, Values], saved: Saved) -> dict[str, Any]:
    compared = {}
    for mode, measured in values.items():
        before = saved.get(mode, {})
        known = before.get(TESTED, {})
        both = [(n, query) for n, query in enumerate(dataset.queries) if query in known]
        if both and all(query in before.get(name, {}) for name in COMPARED for _, query in both):
            positions = [n for n, _ in both]
            compared[over_saved(mode)] = _comparison(
                {name: np.round(measured[name][positions], DECIMALS) for name in COMPARED},
                {name: np.array([before[name][query] for _, query in both]) for name in COMPARED},
            )
    return compared


def over_saved(run: str) -> str:
    """The name of a run's comparison with the saved one."""
    return f"{run} over the saved {run}"


def failures(result: Mapping[str, Any], bounds: Mapping[str, float], *, against: bool) -> list[str]:
    """Why a change is not good enough, one line for each reason: a measure below its bound, or, with ``against``, a
    significant decline. It judges the ranking that people would see: the reranked one where there is one, else hybrid.

    Raises BadDataset if that run was not saved, or for none of these queries.
    """
    runs = result["runs"]
    decisive = RERANKED if RERANKED in runs else "hybrid"
    reasons = [
        f"{name} of {decisive} is {runs[decisive][name]:.4f}, below {bound:g}"
        for name, bound in bounds.items()
        if runs[decisive][name] < bound
    ]
    if against:
        if over_saved(decisive) not in result["comparisons"]:
            raise BadDataset(f"the saved file has no values of {decisive} for these queries")
        reasons += [
            f"{name} of {decisive} is significantly worse than the saved one: {c['difference']:+.4f},"
            f" p = {c['p_randomisation']:.4f}"
            for name, c in result["comparisons"][over_saved(decisive)].items()
            if c["difference"] < 0 and c["p_randomisation"] < SIGNIFICANT
        ]
    return reasons


def _comparison(one: Values, other: Values) -> dict[str, Any]:
    compared = {name: compare(one[name], other[name]) for name in COMPARED}
    return {
        name: {
            "difference": round(c.difference.mean, 4),
            "interval": _ends(c.difference),
            "p_randomisation": round(c.p_randomisation, 5),
            "p_t": float(f"{c.p_t:.3g}"),
            "wins": c.wins,
            "losses": c.losses,
        }
        for name, c in compared.items()
    }
