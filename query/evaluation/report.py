"""The report of an evaluation in JSON, as the command prints it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from query.evaluation.dataset import Dataset
from query.evaluation.measures import MEASURES, Interval, Rankings, Values, compare, interval, measure
from query.evaluation.rank import by_slice
from query.model import Mode

TESTED = "nDCG@10"
COMPARED = (TESTED, "recall@50")
"""The measures by which configurations are compared."""


Saved = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The value of each query by mode and measure, for comparison with a later run of another configuration."""


def values_of(dataset: Dataset, results: Mapping[Mode, Rankings]) -> Saved:
    return {
        mode: {
            name: {query: round(float(value), 6) for query, value in zip(dataset.queries, of, strict=True)}
            for name, of in measure(rankings, dataset.judgements).items()
        }
        for mode, rankings in results.items()
    }


def report(
    dataset: Dataset, results: Mapping[Mode, Rankings], degraded: Mapping[str, int], against: Saved | None = None
) -> dict[str, Any]:
    """``runs``: each measure's mean, its 95 % interval under ``intervals``; ``slices``: nDCG@10 by the queries' kind;
    ``comparisons``: hybrid against each half, and each mode against the run that was saved before, on the queries that
    both have; ``degraded``: how often something was left out, by its reason."""
    values = {mode: measure(rankings, dataset.judgements) for mode, rankings in results.items()}
    return {
        "dataset": dataset.name,
        "documents": len(dataset.documents),
        "queries": len(dataset.queries),
        "runs": {mode: _run(of) for mode, of in values.items()},
        "slices": _slices(dataset, values),
        "comparisons": {
            f"hybrid over {mode}": _comparison(values["hybrid"], of)
            for mode, of in values.items()
            if mode != "hybrid" and "hybrid" in values
        }
        | _against(dataset, values, against or {}),
        "degraded": dict(degraded),
    }


def _run(values: Values) -> dict[str, Any]:
    intervals = {name: interval(of) for name, of in values.items()}
    return {
        **{name: round(i.mean, 4) for name, i in intervals.items()},
        "intervals": {name: _ends(i) for name, i in intervals.items()},
    }


def _ends(of: Interval) -> list[float]:
    return [round(of.low, 4), round(of.high, 4)]


def _slices(dataset: Dataset, values: Mapping[Mode, Values]) -> dict[str, Any]:
    return {
        kind: {
            "queries": len(positions),
            **{
                mode: {name: round(float(np.mean(of[name][positions])), 4) for name in MEASURES}
                for mode, of in values.items()
            },
        }
        for kind, positions in sorted(by_slice(dataset).items())
    }


def _against(dataset: Dataset, values: Mapping[Mode, Values], saved: Saved) -> dict[str, Any]:
    compared = {}
    for mode, of in values.items():
        before = saved.get(mode, {})
        known = before.get(TESTED, {})
        both = [(n, query) for n, query in enumerate(dataset.queries) if query in known]
        if both and all(query in before.get(name, {}) for name in COMPARED for _, query in both):
            positions = [n for n, _ in both]
            compared[f"{mode} over the saved {mode}"] = _comparison(
                {name: of[name][positions] for name in COMPARED},
                {name: np.array([before[name][query] for _, query in both]) for name in COMPARED},
            )
    return compared


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
