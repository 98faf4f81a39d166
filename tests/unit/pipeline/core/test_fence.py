"""Who may use a ledger, by what answers and by what it remembers."""

from __future__ import annotations

import pytest

from pipeline.core.fence import CHANGED, RECOVERING, STANDBY, Accepted, Identity, State, Use, refusal

HERE = Identity(7_711_346_247_290_335_042, 1)


@pytest.mark.parametrize("use", ["queries", "intake", "stores"])
@pytest.mark.parametrize(
    ("server", "accepted", "why"),
    [
        (HERE, Accepted(HERE, "open"), None),
        (None, Accepted(HERE, "open"), STANDBY),
        (Identity(HERE.system_identifier, 2), Accepted(HERE, "open"), CHANGED),  # promoted
        (Identity(HERE.system_identifier + 1, 1), Accepted(HERE, "open"), CHANGED),  # a dump in another cluster
        (HERE, Accepted(Identity(HERE.system_identifier, 2), "open"), CHANGED),  # set back to the old timeline
        (HERE, None, CHANGED),
    ],
)
def test_another_server_or_timeline_is_used_for_nothing(
    server: Identity | None, accepted: Accepted | None, why: str | None, use: Use
) -> None:
    assert refusal(server, accepted, use) == why
    assert refusal(server, accepted, "any") is None


@pytest.mark.parametrize(
    ("use", "allowed"),
    [("queries", {"open"}), ("intake", {"open", "replaying"}), ("stores", {"open", "replaying", "rewinding"})],
)
def test_during_a_recovery_only_what_it_needs_goes_on(use: Use, allowed: set[State]) -> None:
    states: tuple[State, ...] = ("rewinding", "replaying", "open")
    told = {state: refusal(HERE, Accepted(HERE, state), use) for state in states}
    assert {state for state, why in told.items() if why is None} == allowed
    assert set(told.values()) <= {None, RECOVERING}


@pytest.mark.parametrize("why", [STANDBY, CHANGED, RECOVERING])
def test_a_refusal_says_what_to_do(why: str) -> None:
    assert "PENSTOCK_POSTGRES_DSN" in why or "`penstock recover" in why
