"""The check of histories reports violations, and nothing else."""

from __future__ import annotations

import pytest

from tests.faults.history import Certificate, History, Query, Revocation, Write
from tests.faults.query_client import is_accepted

ANN = ("plan.md", "ann")
PAGE = "wiki/plan.md"


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


def certified(complete: float | None, access: float | None, *, end: float = 9.0, text: str = "old") -> list[str]:
    """The claims that a query of the history contradicts: the page was rewritten at 2.1, and bob lost it at 1.1."""
    recorded = history(accepted=None)
    recorded.revocations[0].register = PAGE, "bob"
    for number, marker in enumerate(("older", "old", "new")):
        recorded.writes.append(Write(PAGE, marker, number, number + 0.1))
    certificates = {"wiki": Certificate(complete, access)}
    recorded.queries.append(Query("bob", "http", end - 0.1, end, frozenset([PAGE]), {PAGE: text}, certificates))
    return recorded.overclaims()


@pytest.mark.parametrize(
    ("complete", "access", "text", "count"),
    [
        (None, None, "older", 0),
        (2.0, 1.0, "old", 0),
        (2.2, 1.0, "old", 1),  # "new" was written before the source was said to be complete
        (2.2, 1.0, "new", 0),
        (2.2, 1.2, "old", 2),
        (None, 1.2, "new", 1),  # the revocation was completed before access was said to be verified
    ],
)
def test_a_certificate_that_claims_more_than_the_query_shows_is_reported(
    complete: float | None, access: float | None, text: str, count: int
) -> None:
    assert len(certified(complete, access, text=text)) == count


def test_a_text_that_was_written_again_is_not_reported_as_replaced() -> None:
    recorded = History()
    for number, marker in enumerate(("a", "b", "a")):
        recorded.writes.append(Write(PAGE, marker, number, number + 0.1))
    claims = {"wiki": Certificate(9.0, None)}
    recorded.queries.append(Query("bob", "http", 8.0, 9.5, frozenset([PAGE]), {PAGE: "a"}, claims))
    assert recorded.overclaims() == []
    recorded.queries.append(Query("bob", "http", 8.0, 9.5, frozenset([PAGE]), {PAGE: "b"}, claims))
    assert len(recorded.overclaims()) == 1


@pytest.mark.parametrize(("members", "accepted"), [(9.0, False), (10.5, True)])
def test_a_private_channels_revocation_is_accepted_by_a_newer_membership_and_not_a_newer_text(
    members: float, accepted: bool
) -> None:
    revocation = Revocation(("slack/C1:1.0", "ann"), "restrict", invoked=9.9, completed=10.0)
    edited_later = {"slack/C1:1.0": (11.0, None)}
    assert is_accepted(revocation, revocation.completed, edited_later, {("slack", "ann"): members}) is accepted
