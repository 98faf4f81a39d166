"""Is a partition's log still the one that was read? The decision, without Kafka."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.kafka_log import Log, Mark, Witness, expired, judge, thinned, witness

LOG = "cluster/topic"


def record(offset: int, text: str = "old") -> Witness:
    return witness(offset, 1_700_000_000_000 + offset, b"key", text.encode())


def log(end: int, *, begin: int = 0, since: int | None = None, log_id: str = LOG, without: int = -1) -> Log:
    """since: from this offset on the records are new ones. without: this offset holds none."""
    since = end if since is None else since
    records = {n: record(n, "old" if n < since else "new") for n in range(begin, end) if n != without}
    return Log(log_id, begin, end, records)


MARK = Mark(LOG, (record(40), record(80), record(96), record(99)))


def test_a_log_that_grew_or_expired_behind_the_position_is_the_same() -> None:
    assert judge(MARK, log(100), position=100).kind == "same"
    assert judge(MARK, log(500, since=100), position=100).kind == "same"
    assert judge(MARK, log(500, begin=300, since=100), position=500).kind == "same"
    assert judge(MARK, log(500, since=100, without=99), position=100).kind == "same", "compacted away"
    assert judge(Mark(LOG), log(0)).kind == "same"


def test_a_recreated_topic_is_read_from_its_beginning() -> None:
    verdict = judge(MARK, log(500, since=0, log_id="cluster/another"), position=100)
    assert (verdict.kind, verdict.read_from) == ("recreated", 0)
    verdict = judge(MARK, log(100, log_id="another/topic"), position=100)
    assert verdict.kind == "recreated", "a cluster whose id changed"


def test_a_truncated_log_is_read_from_after_the_newest_matching_record() -> None:
    verdict = judge(MARK, log(90), position=100)
    assert (verdict.kind, verdict.read_from) == ("truncated", 81), "85 to 89 may be new"
    verdict = judge(MARK, log(30), position=100)
    assert (verdict.kind, verdict.read_from) == ("truncated", 0)
    verdict = judge(MARK, log(100), position=105)
    assert (verdict.kind, verdict.read_from) == ("truncated", 100), "read and not yet handled"
    assert judge(Mark(LOG), log(30), position=100).kind == "truncated", "committed, and no mark"


def test_a_log_that_regrew_past_the_position_is_read_from_after_the_newest_matching_record() -> None:
    for since, read_from in ((97, 97), (90, 81), (41, 41), (40, 0), (0, 0)):
        verdict = judge(MARK, log(500, since=since), position=100)
        assert (verdict.kind, verdict.read_from) == ("regrown", read_from), since
    verdict = judge(MARK, log(500, since=100), read=[record(105)], position=106)
    assert (verdict.kind, verdict.read_from) == ("regrown", 100), "read and not yet handled"


def test_a_mark_made_after_the_loss_does_not_hide_it() -> None:
    mark = Mark(LOG, (record(80), record(99), record(110, "new")))
    verdict = judge(mark, log(500, since=90), position=111)
    assert (verdict.kind, verdict.read_from) == ("regrown", 81)


@given(
    handled=st.sets(st.integers(0, 60), min_size=1),
    position=st.integers(0, 5),
    lost=st.integers(0, 70),
    end=st.integers(0, 90),
)
def test_no_new_record_is_skipped_and_an_unchanged_log_is_not_read_again(
    handled: set[int], position: int, lost: int, end: int
) -> None:
    """lost: the log was cut there, if it was so long, and grew to end."""
    mark = Mark(LOG, tuple(record(n) for n in sorted(handled)))
    before = max(handled) + 1
    now = log(max(end, min(lost, before)), since=lost)
    verdict = judge(mark, now, position=before)
    if lost >= before and now.end >= before:
        assert verdict.kind == "same"
    elif now.end < before or max(handled) >= lost:
        assert verdict.kind != "same"
        assert verdict.read_from <= lost


def test_records_that_expired_unread_are_counted() -> None:
    assert expired([(10, 2**63)], begin=10) == 0
    assert expired([(10, 2**63)], begin=17) == 7
    assert expired([(10, 15), (20, 2**63)], begin=17) == 5
    assert expired([(10, 15)], begin=0) == 0, "compacted away, or never there"


def test_the_witness_digest_differs_with_time_key_and_value() -> None:
    ones = {
        witness(1, 2, b"a", b"bc"),
        witness(1, 3, b"a", b"bc"),
        witness(1, 2, b"ab", b"c"),
        witness(1, 2, None, b"abc"),
        witness(1, 2, b"abc", b""),
        witness(1, 2, b"abc", None),
    }
    assert len({item.digest for item in ones}) == 6
    assert witness(1, 2, b"a", b"bc") == witness(1, 2, b"a", b"bc")
    assert all(-(2**63) <= item.digest < 2**63 for item in ones), "Postgres keeps it as a bigint"


@given(steps=st.lists(st.integers(1, 2000), min_size=1, max_size=200))
def test_at_most_twelve_witnesses_are_stored_including_the_newest(steps: list[int]) -> None:
    kept: list[Witness] = []
    offset = 0
    for step in steps:
        offset += step
        kept = thinned([*kept, record(offset)])
        assert kept[-1].offset == offset
        assert kept == sorted(kept)
        assert len(kept) <= 12
    assert thinned([]) == []
