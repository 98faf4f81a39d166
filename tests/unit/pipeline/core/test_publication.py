"""Tokens of publications: they hold what was written into them, and nothing else is one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire import AccessChanged, DocumentDeleted, DocumentUpserted, publication_token
from pipeline.core import publication
from pipeline.core.identity import document_id
from pipeline.core.publication import (
    KINDS,
    MAX_PUBLICATIONS,
    MAX_TOKEN_CHARACTERS,
    Publication,
    is_reached,
    publications_of,
    token,
)
from topics.fields import INT64_MAX

NOW = datetime(2026, 11, 28, 9, 30, 0, 123_457, tzinfo=UTC)
PUBLICATIONS = st.builds(
    Publication, st.uuids(), st.sampled_from(KINDS), st.integers(min_value=-INT64_MAX, max_value=INT64_MAX)
)


@given(st.lists(PUBLICATIONS, unique_by=lambda p: (p.document_id, p.kind)))
def test_a_token_holds_the_changes_that_were_written_into_it(changes: list[Publication]) -> None:
    assert publications_of(token(changes)) == tuple(changes)


def test_a_token_names_the_newest_of_several_changes_of_a_document() -> None:
    id_ = uuid4()
    changes = [publication.content(id_, version) for version in (2, 7, 5)]
    assert publications_of(token([*changes, publication.access(id_, NOW)])) == (
        changes[1],
        publication.access(id_, NOW),
    )


def test_a_full_token_is_as_long_as_requests_permit_and_a_larger_one_is_refused() -> None:
    changes = [publication.content(UUID(int=n), n) for n in range(MAX_PUBLICATIONS + 1)]
    full = token(changes[:-1])
    assert len(full) == MAX_TOKEN_CHARACTERS < 1_000_000
    assert len(publications_of(full)) == MAX_PUBLICATIONS
    with pytest.raises(ValueError, match="10001 changes: one token names at most 10000"):
        token(changes)


@pytest.mark.parametrize("text", ["", "x", "2.AAAA", "1.AAAA", "1.é", "1.A", "1." + "AAAA" * 100_000, "1.-!*"])
def test_another_text_is_no_token(text: str) -> None:
    with pytest.raises(ValueError, match="is no token of a publication"):
        publications_of(text)
    with pytest.raises(ValueError, match="is no token of a publication"):
        publication.check(text)


def test_a_token_with_an_unknown_kind_of_change_is_refused() -> None:
    written = token([publication.content(UUID(int=1), 1)])
    with pytest.raises(ValueError, match="is no token"):
        publications_of(written.replace("1.A", "1.B"))


def test_the_token_of_messages_names_their_changes() -> None:
    of = {"tenant": "acme", "source": "wiki", "external_id": "a", "observed_at": NOW}
    upserted = DocumentUpserted(**of, version=7, title="A", content="a", acl_tags=["x"])
    changed, deleted = AccessChanged(**of, acl_tags=[]), DocumentDeleted(**of)
    id_ = document_id("acme", "wiki", "a")
    assert publications_of(publication_token([upserted, changed, deleted])) == (
        publication.content(id_, 7),
        publication.access(id_, NOW),
        publication.deletion(id_, NOW),
    )


@pytest.mark.parametrize("earlier", [timedelta(microseconds=1), timedelta(days=3)])
def test_a_change_is_reached_by_itself_and_by_a_newer_one_of_its_kind(earlier: timedelta) -> None:
    id_ = uuid4()
    row = {"version": 7, "access_observed_at": NOW, "deleted_floor": NOW}
    nothing = dict.fromkeys(row)
    for older, same, newer in (
        [publication.content(id_, version) for version in (6, 7, 8)],
        [publication.access(id_, at) for at in (NOW - earlier, NOW, NOW + earlier)],
        [publication.deletion(id_, at) for at in (NOW - earlier, NOW, NOW + earlier)],
    ):
        assert [is_reached(change, **row) for change in (older, same, newer)] == [True, True, False]  # type: ignore[arg-type]
        assert not is_reached(older, **nothing)  # type: ignore[arg-type]
