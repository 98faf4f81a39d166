"""Uses of a ledger that are permitted, by its identity and the accepted one."""

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
def test_another_server_or_timeline_is_refused_for_every_use(
    server: Identity | None, accepted: Accepted | None, why: str | None, use: Use
) -> None:
    assert refusal(server, accepted, use) == why
    assert refusal(server, accepted, "any") is None


@pytest.mark.parametrize(
    ("use", "allowed"),
    [("queries", {"open"}), ("intake", {"open", "replaying"}), ("stores", {"open", "replaying", "rewinding"})],
)
def test_during_a_recovery_only_the_uses_it_needs_are_allowed(use: Use, allowed: set[State]) -> None:
    states: tuple[State, ...] = ("rewinding", "replaying", "open")
    refusals = {state: refusal(HERE, Accepted(HERE, state), use) for state in states}
    assert {state for state, why in refusals.items() if why is None} == allowed
    assert set(refusals.values()) <= {None, RECOVERING}


@pytest.mark.parametrize("why", [STANDBY, CHANGED, RECOVERING])
def test_a_fence_refusal_names_the_setting_or_command_that_helps(why: str) -> None:
    assert "PENSTOCK_POSTGRES_DSN" in why or "`penstock recover" in why
