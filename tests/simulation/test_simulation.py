"""A small portion of ``make simulate``, and what a replay relies on."""

from __future__ import annotations

import pytest

from pipeline.core.fold import Step
from tests.simulation.play import History, play, shrink, simulated

FIRST_SEED = 1
HISTORIES = 300
"""About seven seconds of a processor, in two tests that may run beside each other."""


@pytest.mark.parametrize("part", [0, 1])
def test_random_simulated_histories_lose_and_leak_nothing(part: int) -> None:
    half = HISTORIES // 2
    with simulated():
        for seed in range(FIRST_SEED + part * half, FIRST_SEED + (part + 1) * half):
            played = play(History(seed))
            if played.violation is not None:
                pytest.fail(str(shrink(played)))


def test_a_simulation_seed_gives_the_same_history_every_time() -> None:
    with simulated():
        for seed in (11, 12, 13):
            once, again = play(History(seed)), play(History(seed))
            assert (once.events, once.tally, once.faults) == (again.events, again.tally, again.faults)


def test_a_failing_history_is_shrunk_to_a_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger says that nobody deleted anything: a history with a delete fails, and little else is left of it."""
    monkeypatch.setattr("pipeline.core.fold._delete", lambda state, _event: Step(state, "stale"))
    with simulated():
        failing = next(p for seed in range(1, 100) if (p := play(History(seed))).violation is not None)
        small = shrink(failing)
    assert small.kind == failing.kind
    assert 1 <= len(small.history.chosen()) <= 4
    assert f"SIMULATE_SEED={failing.history.seed}" in str(small)
