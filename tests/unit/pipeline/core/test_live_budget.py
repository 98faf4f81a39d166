"""A source's budget of live documents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.throttle import BURST_SECONDS, MAX_SOURCES, SOURCES_PER_GROUP, LiveBudget

PAUSES = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200)


@given(PAUSES, st.floats(0.5, 20.0))
def test_a_source_gets_at_most_its_rate_and_its_burst(pauses: list[float], rate: float) -> None:
    budget, now, admitted = LiveBudget(rate), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += budget.admit("loud", now)
        assert admitted <= rate * (now + BURST_SECONDS) + 1e-6


@given(PAUSES, st.floats(0.5, 20.0), st.floats(1.0, 5_000.0))
def test_costly_documents_exceed_a_sources_rate_and_burst_by_one_document(
    pauses: list[float], rate: float, cost: float
) -> None:
    budget, now, admitted = LiveBudget(rate), 0.0, 0.0
    for pause in pauses:
        now += pause
        admitted += cost * budget.admit("loud", now, cost=cost)
        assert admitted <= rate * (now + BURST_SECONDS) + cost + 1e-6
    assert admitted, "the first one is always admitted, however large"


def test_documents_of_a_source_within_its_rate_are_always_admitted() -> None:
    budget = LiveBudget(10)
    assert all(budget.admit("steady", n / 10) for n in range(1_000))


def test_one_sources_burst_does_not_reduce_the_budget_of_another() -> None:
    budget = LiveBudget(1)
    assert sum(budget.admit("loud", 0.0) for _ in range(1_000)) == BURST_SECONDS
    assert budget.admit("quiet", 0.0)


@given(PAUSES, st.floats(0.5, 20.0))
def test_a_new_source_name_for_each_document_gets_no_more_than_the_groups_budget(
    pauses: list[float], rate: float
) -> None:
    budget, now, admitted = LiveBudget(rate), 0.0, 0
    for n, pause in enumerate(pauses):
        now += pause
        admitted += sum(budget.admit(f"invented-{n}-{i}", now, groups=["acme", "wiki"]) for i in range(20))
        assert admitted <= SOURCES_PER_GROUP * rate * (now + BURST_SECONDS) + 1e-6
    assert budget.admit("another", now, groups=["globex", "drive"])


def test_more_source_names_than_are_remembered_do_not_renew_the_groups_budget() -> None:
    budget = LiveBudget(1)
    admitted = sum(budget.admit(f"invented-{n}", 0.0, groups=["acme"]) for n in range(MAX_SOURCES + 100))
    assert admitted == SOURCES_PER_GROUP * BURST_SECONDS


def test_a_retried_record_is_charged_to_the_budget_once() -> None:
    budget = LiveBudget(1)
    for _ in range(100):  # the ledger is away
        assert budget.admit("wiki", 0.0, groups=["acme"], record=("documents.live.v1", 0, 7))
    assert sum(budget.admit("wiki", 0.0, groups=["acme"], record=n) for n in range(100)) == BURST_SECONDS - 1


def test_the_whole_burst_is_available_again_after_a_pause() -> None:
    budget = LiveBudget(1)
    while budget.admit("loud", 0.0):
        pass
    assert sum(budget.admit("loud", 1_000.0) for _ in range(1_000)) == BURST_SECONDS


def test_a_rate_of_zero_admits_everything() -> None:
    budget = LiveBudget(0)
    assert all(budget.admit("loud", 0.0) for _ in range(10_000))
