"""Differences between what was published and what the ledger accepted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from connectors.runner.compare import Row
from connectors.runner.membership import IN_DOUBT, PublishedSet
from connectors.runner.reconcile import Kind, document_difference, member_difference
from connectors.runner.rows import LedgerDocument

AT = datetime(2026, 1, 1, tzinfo=UTC)
LATER = AT + timedelta(seconds=1)
ROW = Row(external_id="a", version=5, acl_tags=("staff", "board"), required_tags=("nda",), access_at=AT)
ACCEPTED = LedgerDocument("a", 5, AT, ("wiki/board", "wiki/staff"), ("wiki/nda",), has_letter=False)


@pytest.mark.parametrize(
    ("row", "accepted", "kind"),
    [
        (ROW, ACCEPTED, None),
        (None, ACCEPTED, "unknown"),
        (replace(ROW, version=None, problem_code="encrypted"), ACCEPTED, "unknown"),
        (replace(ROW, in_doubt_since=AT), replace(ACCEPTED, version=9), None),
        (replace(ROW, gone=True), ACCEPTED, "not_deleted"),
        (ROW, replace(ACCEPTED, version=6), "newer"),
        (ROW, replace(ACCEPTED, version=4), "not_accepted"),
        (ROW, replace(ACCEPTED, version=4, has_letter=True), None),
        (ROW, replace(ACCEPTED, acl_tags=("wiki/everyone",)), "not_accepted"),
        (ROW, replace(ACCEPTED, acl_tags=("wiki/everyone",), has_letter=True), None),
        (ROW, replace(ACCEPTED, acl_tags=("wiki/everyone",), access_observed_at=LATER), "newer"),
        (ROW, replace(ACCEPTED, required_tags=()), "not_accepted"),
        (ROW, replace(ACCEPTED, access_observed_at=None), None),
    ],
)
def test_document_difference_compares_a_row_with_the_ledgers_document(
    row: Row | None, accepted: LedgerDocument, kind: Kind | None
) -> None:
    assert document_difference(row, accepted, "wiki") == kind


@pytest.mark.parametrize(("letter_at", "kind"), [(LATER, None), (AT, "not_deleted"), (None, "not_deleted")])
def test_a_dead_letter_explains_a_missing_delete_only_if_it_is_newer(
    letter_at: datetime | None, kind: Kind | None
) -> None:
    deleted = replace(ROW, gone=True, content_at=AT)
    assert document_difference(deleted, replace(ACCEPTED, has_letter=True), "wiki", letter_at) == kind


@pytest.mark.parametrize(
    ("published", "observed_at", "holds", "kind"),
    [
        (None, AT, True, "member_unknown"),
        (None, AT, False, None),
        (PublishedSet(b"x", AT), AT, True, None),
        (PublishedSet(b"x", AT), LATER, True, "member_unknown"),
        (PublishedSet(b"x", LATER), AT, True, "member_not_accepted"),
        (PublishedSet(IN_DOUBT, AT), LATER, True, None),
    ],
)
def test_member_difference_compares_published_groups_with_the_ledgers(
    published: PublishedSet | None, observed_at: datetime, holds: bool, kind: Kind | None
) -> None:
    assert member_difference(published, observed_at, holds=holds) == kind
