"""How far two rankings agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from query.evaluation.generations import Comparison, _change
from query.evaluation.measures import Interval
from query.evaluation.shadow import PERSISTENCE, Shadowed, overlap, rank_biased

rankings = st.lists(st.sampled_from([f"d{n}" for n in range(15)]), unique=True, max_size=10)


def extrapolated(one: list[str], other: list[str]) -> float:
    """The definition, to a depth where nothing is left: 1 - p times the sum of p^(d-1) · agreement at d, where what
    lies behind a ranking's end agrees as what was seen of it."""
    if not one or not other:
        return float(one == other)
    short, long = sorted((one, other), key=len)
    ended = len(set(short) & set(long[: len(short)])) / len(short)
    total = 0.0
    for depth in range(1, 1_000):
        common = len(set(short[:depth]) & set(long[:depth]))
        if depth > len(short):
            common += ended * (min(depth, len(long)) - len(short))  # type: ignore[assignment]
        total += (1 - PERSISTENCE) * PERSISTENCE ** (depth - 1) * common / min(depth, len(long))
    return total


@given(rankings, rankings)
def test_rank_biased_overlap_matches_its_definition(one: list[str], other: list[str]) -> None:
    similarity = rank_biased(one, other)
    assert similarity == pytest.approx(extrapolated(one, other), abs=1e-9)
    assert similarity == pytest.approx(rank_biased(other, one))
    assert -1e-9 <= similarity <= 1 + 1e-9


@given(rankings)
def test_identical_rankings_agree_fully_and_disjoint_ones_not_at_all(one: list[str]) -> None:
    others = [f"x{n}" for n in range(len(one))]
    assert rank_biased(one, one) == pytest.approx(1)
    assert overlap(one, one) == 1
    if one:
        assert rank_biased(one, others) == overlap(one, others) == 0


def test_rank_biased_overlap_weighs_high_ranks_more() -> None:
    expected = list("abcdefghij")
    below = [*"abcdefghi", "x"]
    above = ["x", *"bcdefghij"]
    assert overlap(expected, below) == overlap(expected, above) == 0.9
    assert rank_biased(expected, below) > 0.9 > rank_biased(expected, above)


def test_the_overlap_of_short_rankings_is_relative_to_the_longer_one() -> None:
    assert overlap(["a", "b"], ["a", "b", "c", "d"]) == 0.5
    assert overlap([], ["a"]) == 0
    assert overlap([], []) == 1
    assert overlap(list("abcdefghijkl"), list("abcdefghijmn")) == 1, "only the first ten"


@pytest.mark.parametrize(("before", "after", "change"), [(0.8, 0.6, -0.25), (0.5, 0.55, 0.1), (0, 0, 0), (0, 0.3, 1)])
def test_the_change_of_a_measure_is_relative(before: float, after: float, change: float) -> None:
    assert _change(before, after) == pytest.approx(change)


@pytest.mark.parametrize(("after", "refused"), [(0.981, False), (0.98, False), (0.979, True)])
def test_a_loss_of_two_percent_is_allowed_and_more_is_not(after: float, refused: bool) -> None:
    measured = Comparison(
        "g1",
        "g3",
        1,
        {"nDCG@5": 1.0},
        {"nDCG@5": after},
        _change(1.0, after),
        Interval(0.0, 0.0, 0.0),
        1.0,
        Shadowed(0, 0.0, 0.0, 0),
    )
    assert (measured.worse is not None) == refused
