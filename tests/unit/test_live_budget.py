"""A source's budget of live documents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.live_budget import BURST_SECONDS, LiveBudget

PAUSES = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200)


@given(PAUSES, st.floats(0.5, 20.0))
def test_no_source_gets_more_than_its_rate_and_its_burst(pauses: list[float], rate: float) -> None:
    budget, now, admitted = LiveBudget(rate), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += budget.admit("loud", now)
        assert admitted <= rate * (now + BURST_SECONDS) + 1e-6


def test_a_source_within_its_rate_is_always_admitted() -> None:
    budget = LiveBudget(10)
    assert all(budget.admit("steady", n / 10) for n in range(1_000))


def test_one_sources_flood_takes_nothing_from_another() -> None:
    budget = LiveBudget(1)
    assert sum(budget.admit("loud", 0.0) for _ in range(1_000)) == BURST_SECONDS
    assert budget.admit("quiet", 0.0)


def test_after_a_pause_the_whole_burst_is_there_again() -> None:
    budget = LiveBudget(1)
    while budget.admit("loud", 0.0):
        pass
    assert sum(budget.admit("loud", 1_000.0) for _ in range(1_000)) == BURST_SECONDS


def test_without_a_rate_nothing_waits() -> None:
    budget = LiveBudget(0)
    assert all(budget.admit("loud", 0.0) for _ in range(10_000))
