"""A sink's work, from the desired state and the present one, whatever was lost in between."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.diff import diff_keywords, diff_vectors

ids = st.integers(0, 9).map(lambda n: UUID(int=n))
some = st.lists(ids, unique=True)
hashed = st.dictionaries(ids, st.integers(0, 2))


@given(some, some)
def test_a_vector_diff_reaches_the_desired_chunks_without_rewriting_present_ones(
    desired: list[UUID], present: list[UUID]
) -> None:
    diff = diff_vectors(desired, present)
    assert (set(present) | set(diff.write)) - set(diff.delete) == set(desired)
    assert not set(diff.write) & set(present)
    assert list(diff.write) == [i for i in desired if i in set(diff.write)], "in reading order"


@given(some, some, some)
def test_a_vector_diff_does_not_retry_refused_chunks(
    desired: list[UUID], present: list[UUID], refused: list[UUID]
) -> None:
    assert not set(diff_vectors(desired, present, refused).write) & set(refused)


@given(hashed, hashed, some)
def test_a_keyword_diff_reaches_the_desired_entries_whichever_were_claimed(
    desired: dict[UUID, int], confirmed: dict[UUID, int], claimed: list[UUID]
) -> None:
    diff = diff_keywords(desired, confirmed, claimed)
    standing = {**dict.fromkeys(claimed, -1), **confirmed}  # a claimed entry may be there in any form
    for i in diff.write:
        standing[i] = desired[i]
    for i in diff.delete:
        del standing[i]
    assert standing == desired


def test_a_keyword_diff_is_empty_when_all_desired_entries_are_confirmed() -> None:
    entries = {UUID(int=1): 7, UUID(int=2): 8}
    diff = diff_keywords(entries, entries, list(entries))
    assert diff.write == diff.delete == ()
