"""Measures, and how sure they are."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from query.evaluation.measures import compare, interval, measure

JUDGED = {"one": {"a": 4, "b": 1}, "two": {"c": 2}, "three": {"d": 1}}


def test_ranking_measures_match_their_definitions() -> None:
    values = measure({"one": ["x", "b", "a"], "two": ["c"], "three": ["x", "y"]}, JUDGED)
    ideal = 4 + 1 / log2(3)
    assert values["nDCG@10"] == pytest.approx([(1 / log2(3) + 4 / 2) / ideal, 1, 0])
    assert values["recall@50"] == pytest.approx([1, 1, 0])
    assert values["MRR"] == pytest.approx([1 / 2, 1, 0])


def test_ranking_measures_respect_their_cutoffs() -> None:
    late = [f"x{n}" for n in range(5)] + ["c"]
    assert measure({"two": late}, JUDGED)["nDCG@5"][1] == 0
    assert measure({"two": late}, JUDGED)["nDCG@10"][1] > 0
    assert measure({"two": [f"x{n}" for n in range(50)] + ["c"]}, JUDGED)["recall@50"][1] == 0


def test_a_query_without_results_counts_as_zero() -> None:
    assert measure({"two": ["c"]}, JUDGED)["nDCG@10"].mean() == pytest.approx(1 / 3)
    assert measure({}, JUDGED)["MRR"].mean() == 0


def test_a_confidence_interval_contains_its_mean_and_narrows_with_more_queries() -> None:
    few, many = interval(np.array([0.0, 1.0] * 5)), interval(np.array([0.0, 1.0] * 200))
    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert interval(np.array([0.4] * 9)).low == pytest.approx(0.4)


def test_a_steady_difference_is_significant_and_noise_is_not() -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, 200)
    base = np.random.default_rng(2).uniform(0.2, 0.8, 200)
    better, same = compare(base + 0.05 + noise, base), compare(base + noise - noise.mean(), base)
    assert better.difference.mean == pytest.approx(0.05, abs=0.02)
    assert better.p_randomisation < 0.001
    assert better.p_t < 0.001
    assert better.difference.low > 0
    assert same.p_randomisation > 0.5
    assert same.difference.low < 0 < same.difference.high


def test_equal_runs_do_not_differ() -> None:
    values = np.array([0.1, 0.9, 0.5])
    same = compare(values, values)
    assert (same.p_randomisation, same.p_t, same.wins, same.losses) == (1.0, 1.0, 0, 0)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([0.1, 0.3], 0.295167235301),
        ([0.1, 0.3, -0.05], 0.368831255733),
        ([0.2, 0.25, 0.1, 0.31], 0.016843642837),
        ([0.02 * n for n in range(-3, 9)], 0.0351129192421),
        ([0.01 * n for n in range(-30, 90)], 8.99064422624e-16),
    ],
)
def test_the_t_test_agrees_with_scipys(differences: list[float], p: float) -> None:
    values = np.array(differences)
    assert compare(values, np.zeros(len(values))).p_t == pytest.approx(p, rel=1e-6, abs=1e-13)
