"""Only the done prefix of a partition is ever committed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.progress import Progress


def test_no_offset_is_committed_past_a_record_in_flight() -> None:
    progress: Progress[int] = Progress()
    progress.open([0])
    tokens = [progress.arrived(0, offset) for offset in (31, 32, 33)]
    assert all(tokens)
    assert progress.finished(0, tokens[1]) == []  # type: ignore[arg-type]
    assert progress.finished(0, tokens[2]) == []  # type: ignore[arg-type]
    assert progress.committable(0) is None
    assert [t.offset for t in progress.finished(0, tokens[0])] == [31, 32, 33]  # type: ignore[arg-type]
    assert progress.committable(0) == 34


def test_offsets_missing_after_compaction_do_not_block_the_commit() -> None:
    progress: Progress[int] = Progress()
    progress.open([0])
    for offset in (3, 9, 27):
        token = progress.arrived(0, offset)
        assert token is not None
        progress.finished(0, token)
    assert progress.committable(0) == 28


def test_a_revoked_partition_is_forgotten_and_its_late_results_are_ignored() -> None:
    progress: Progress[int] = Progress()
    progress.open([0])
    old = progress.arrived(0, 50)
    assert old is not None
    progress.close([0])
    assert progress.arrived(0, 51) is None
    progress.open([0])
    new = progress.arrived(0, 40)
    assert new is not None
    assert progress.finished(0, old) == []
    assert progress.committable(0) is None
    progress.finished(0, new)
    assert progress.committable(0) == 41


@given(st.permutations(range(12)), st.integers(0, 12))
def test_the_committable_offset_is_the_finished_prefix_in_any_order(order: list[int], finish: int) -> None:
    progress: Progress[int] = Progress()
    progress.open([0])
    tokens = [progress.arrived(0, offset) for offset in range(12)]
    done = set()
    for offset in order[:finish]:
        token = tokens[offset]
        assert token is not None
        progress.finished(0, token)
        done.add(offset)
        prefix = next(n for n in range(13) if n not in done)
        assert (progress.committable(0) or 0) == prefix
    assert progress.in_flight(0) == 12 - (progress.committable(0) or 0)
