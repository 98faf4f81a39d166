"""The verdict of the regression benchmark, for rounds of known ratios."""

from __future__ import annotations

import random

import pytest

from bench.compare import MARGIN, verdict

ROUNDS = 8


def rounds(ratio: float, noise: float, seed: int) -> tuple[list[float], list[float]]:
    """Values of a machine that is now twice, now half as fast, which both versions of a round meet alike."""
    dice = random.Random(seed)
    pace = [dice.uniform(0.5, 2) for _ in range(ROUNDS)]
    return (
        [p * dice.uniform(1 - noise, 1 + noise) for p in pace],
        [p * ratio * dice.uniform(1 - noise, 1 + noise) for p in pace],
    )


@pytest.mark.parametrize("ratio", [1.08, 1.3])
def test_a_slower_version_is_recognised_on_a_machine_that_changes_its_pace(ratio: float) -> None:
    v = verdict("load_s", *rounds(ratio, 0.02, seed=1))
    assert v.is_slower(MARGIN)
    assert not v.is_faster(MARGIN)
    assert v.low < ratio < v.high


def test_a_faster_version_is_recognised() -> None:
    v = verdict("load_s", *rounds(0.9, 0.02, seed=1))
    assert v.is_faster(MARGIN)
    assert not v.is_slower(MARGIN)


def test_equal_versions_are_rarely_called_slower() -> None:
    verdicts = [verdict("load_s", *rounds(1, 0.1, seed)) for seed in range(200)]
    assert sum(v.is_slower(MARGIN) for v in verdicts) <= 10  # 2.5 % expected


def test_a_slowdown_within_the_margin_is_none_even_if_it_is_certain() -> None:
    assert not verdict("load_s", [1.0] * ROUNDS, [1.02] * ROUNDS).is_slower(MARGIN)


def test_equal_values_are_no_difference() -> None:
    v = verdict("load_s", [1.0] * ROUNDS, [1.0] * ROUNDS)
    assert (v.ratio, v.p) == (1.0, 1.0)
