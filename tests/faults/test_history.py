"""The check of histories reports violations, and nothing else."""

from __future__ import annotations

import pytest

from tests.faults.history import History, Query, Revocation
from tests.faults.query_client import is_accepted

ANN = ("plan.md", "ann")


def history(*, accepted: float | None = 2.0, granted_again: float | None = None) -> History:
    recorded = History()
    recorded.revoke([ANN], "restriction", invoked=1.0, completed=1.1)
    recorded.revocations[0].accepted = accepted
    if granted_again is not None:
        recorded.grant([ANN], granted_again)
    return recorded


def query(recorded: History, start: float, end: float, *returned: str, person: str = "ann") -> list[str]:
    recorded.queries.append(Query(person, "http", start, end, frozenset(returned)))
    return recorded.violations()


def test_a_query_that_returns_a_document_after_its_accepted_revocation_is_reported() -> None:
    assert len(query(history(), 2.1, 2.2, "plan.md")) == 1


@pytest.mark.parametrize(
    ("start", "end", "returned", "person"),
    [
        (1.9, 2.5, "plan.md", "ann"),  # the query began before the acceptance
        (2.1, 2.2, "other.md", "ann"),
        (2.1, 2.2, "plan.md", "bob"),
    ],
)
def test_queries_before_or_unaffected_by_the_revocation_are_not_reported(
    start: float, end: float, returned: str, person: str
) -> None:
    assert query(history(), start, end, returned, person=person) == []


def test_a_revocation_not_yet_accepted_forbids_nothing() -> None:
    assert query(history(accepted=None), 9.0, 9.1, "plan.md") == []


def test_queries_after_the_start_of_a_renewed_grant_are_not_reported() -> None:
    assert query(history(granted_again=3.0), 2.9, 3.5, "plan.md") == []
    assert len(query(history(granted_again=3.0), 2.1, 2.9, "plan.md")) == 1


def test_queries_after_a_second_revocation_are_reported_again() -> None:
    recorded = history(granted_again=3.0)
    recorded.revoke([ANN], "deletion", invoked=4.0, completed=4.1)
    recorded.revocations[1].accepted = 5.0
    assert len(query(recorded, 5.5, 5.6, "plan.md")) == 1


@pytest.mark.parametrize(("members", "accepted"), [(9.0, False), (10.5, True)])
def test_a_private_channels_revocation_is_accepted_by_a_newer_membership_and_not_a_newer_text(
    members: float, accepted: bool
) -> None:
    revocation = Revocation(("slack/C1:1.0", "ann"), "restrict", invoked=9.9, completed=10.0)
    edited_later = {"slack/C1:1.0": (11.0, None)}
    assert is_accepted(revocation, revocation.completed, edited_later, {("slack", "ann"): members}) is accepted
