"""The history checker finds what it is there for, and nothing else."""

from __future__ import annotations

import pytest

from tests.faults.history import History, Query, Revocation
from tests.faults.readers import is_accepted

ANN = ("plan.md", "ann")


def history(*, accepted: float | None = 2.0, granted_again: float | None = None) -> History:
    made = History()
    made.revoke([ANN], "restriction", invoked=1.0, completed=1.1)
    made.revocations[0].accepted = accepted
    if granted_again is not None:
        made.grant([ANN], granted_again)
    return made


def ask(made: History, start: float, end: float, *returned: str, person: str = "ann") -> list[str]:
    made.queries.append(Query(person, "http", start, end, frozenset(returned)))
    return made.violations()


def test_a_query_that_returns_a_document_after_its_accepted_revocation_is_reported() -> None:
    assert len(ask(history(), 2.1, 2.2, "plan.md")) == 1


@pytest.mark.parametrize(
    ("start", "end", "returned", "person"),
    [
        (1.9, 2.5, "plan.md", "ann"),  # it began before the acceptance
        (2.1, 2.2, "other.md", "ann"),
        (2.1, 2.2, "plan.md", "bob"),
    ],
)
def test_queries_before_or_unaffected_by_the_revocation_are_not_reported(
    start: float, end: float, returned: str, person: str
) -> None:
    assert ask(history(), start, end, returned, person=person) == []


def test_a_revocation_not_yet_accepted_forbids_nothing() -> None:
    assert ask(history(accepted=None), 9.0, 9.1, "plan.md") == []


def test_queries_after_the_start_of_a_renewed_grant_are_not_reported() -> None:
    assert ask(history(granted_again=3.0), 2.9, 3.5, "plan.md") == []
    assert len(ask(history(granted_again=3.0), 2.1, 2.9, "plan.md")) == 1


def test_queries_after_a_second_revocation_are_reported_again() -> None:
    made = history(granted_again=3.0)
    made.revoke([ANN], "deletion", invoked=4.0, completed=4.1)
    made.revocations[1].accepted = 5.0
    assert len(ask(made, 5.5, 5.6, "plan.md")) == 1


@pytest.mark.parametrize(("members", "accepted"), [(9.0, False), (10.5, True)])
def test_a_private_channels_revocation_is_accepted_by_a_newer_membership_and_not_a_newer_text(
    members: float, accepted: bool
) -> None:
    revocation = Revocation(("slack/C1:1.0", "ann"), "restrict", invoked=9.9, completed=10.0)
    edited_later = {"slack/C1:1.0": (11.0, None)}
    assert is_accepted(revocation, revocation.completed, edited_later, {("slack", "ann"): members}) is accepted
