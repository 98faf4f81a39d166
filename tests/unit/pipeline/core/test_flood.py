"""The limit on dead letters: never more than so many in any minute, pauses that grow, and an end to them; and no limit
for a source that fails while others get through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.flood import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_SCORE,
    MAX_SOURCES,
    QUIET_SECONDS,
    WINDOW_SECONDS,
    Flood,
    Refusal,
    Sources,
)

HOUR = 3600.0


def trip(flood: Flood, now: float, limit: int) -> Refusal:
    """Fill the minute and meet the limit."""
    for n in range(limit):
        assert flood.admit(f"{now}-{n}", "wiki", now) is None
    refusal = flood.admit(f"{now}-last", "wiki", now)
    assert refusal is not None
    return refusal


def test_dead_letters_are_admitted_up_to_the_limit_and_refused_during_the_pause() -> None:
    flood = Flood(3)
    refusal = trip(flood, 100.0, 3)
    assert refusal == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)
    assert flood.admit("another", "wiki", 110.0) == Refusal(FIRST_PAUSE_SECONDS - 10, trips=1, new=False)
    assert flood.pause(110.0) == FIRST_PAUSE_SECONDS - 10
    assert flood.admit("another", "wiki", 100.0 + FIRST_PAUSE_SECONDS) is None
    assert flood.pause(100.0 + FIRST_PAUSE_SECONDS) == 0


def test_a_record_that_is_retried_counts_once_and_is_admitted_during_a_pause() -> None:
    flood = Flood(2)
    for now in (0.0, 1.0, 2.0):
        assert flood.admit("a", "wiki", now) is None
    assert flood.admit("b", "wiki", 3.0) is None
    assert flood.admit("c", "wiki", 4.0) is not None
    assert flood.admit("a", "wiki", 5.0) is None
    assert flood.admit("c", "wiki", 6.0) is not None


def test_each_successive_trip_doubles_the_pause_up_to_an_hour() -> None:
    flood, now, pauses = Flood(1), 0.0, []
    for n in range(10):
        refusal = trip(flood, now, 1)
        assert (refusal.trips, refusal.new) == (n + 1, True)
        pauses.append(refusal.seconds)
        now += refusal.seconds
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_after_a_quiet_period_the_pause_starts_short_again() -> None:
    flood = Flood(1)
    now = trip(flood, 0.0, 1).seconds
    second = trip(flood, now + QUIET_SECONDS - 1, 1)
    assert second.trips == 2
    now += QUIET_SECONDS - 1 + second.seconds
    assert trip(flood, now + QUIET_SECONDS, 1) == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)


def test_a_steady_rate_below_the_limit_never_trips() -> None:
    flood = Flood(60)
    assert all(flood.admit(str(n), "wiki", n * 1.0) is None for n in range(5_000))


def test_a_limit_of_zero_admits_no_dead_letter() -> None:
    assert Flood(0).admit("a", "wiki", 0.0) == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)


def test_ten_hours_of_nothing_but_poison_leave_fewer_than_a_thousand_dead_letters() -> None:
    flood, now, letters = Flood(60), 0.0, 0
    while now < 10 * HOUR:  # an endless supply: a new bad record as soon as one may be set aside
        refusal = flood.admit(f"{letters}", "wiki", now)
        if refusal is None:
            letters += 1
            now += 0.01
        else:
            now += refusal.seconds
    assert 60 * 10 < letters < 1_000


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.floats(0, 90, allow_nan=False), st.integers(0, 30)), max_size=200),
)
def test_no_minute_holds_more_dead_letters_than_the_limit(limit: int, steps: list[tuple[float, int]]) -> None:
    flood, now = Flood(limit), 0.0
    admitted: list[tuple[float, int]] = []
    for wait, letter in steps:
        now += wait
        before = flood.pause(now)
        refusal = flood.admit(str(letter), "wiki", now)
        known = any(value == letter and now - at < WINDOW_SECONDS for at, value in admitted)
        if refusal is None:
            assert known or before == 0
            if not known:
                admitted.append((now, letter))
        else:
            assert not known
            assert 0 < refusal.seconds <= LONGEST_PAUSE_SECONDS
            assert refusal.new == (before == 0)
    for at, _ in admitted:
        assert sum(at - WINDOW_SECONDS < other <= at for other, _ in admitted) <= limit


# Whose fault it is


def test_while_another_source_succeeds_dead_letters_of_a_failing_source_are_unlimited() -> None:
    flood = Flood(3)
    flood.count_accepted("wiki", 1, 0.0)
    assert all(flood.admit(str(n), "drive", n * 0.001) is None for n in range(10_000))
    assert flood.pause(10.0) == 0


def test_a_pause_ends_as_soon_as_another_source_succeeds() -> None:
    flood = Flood(3)
    trip(flood, 0.0, 3)
    assert flood.admit("x", "wiki", 1.0) is not None
    flood.count_accepted("drive", 1, 2.0)
    assert flood.pause(3.0) == 0
    assert flood.admit("x", "wiki", 3.0) is None


def test_a_mostly_failing_source_stays_limited_despite_its_own_valid_records() -> None:
    flood = Flood(3)
    refused = 0
    for n in range(1_000):
        refused += flood.admit(str(n), "wiki", n * 0.001) is not None
        if n % 10 == 9:
            flood.count_accepted("wiki", 1, n * 0.001)
    assert refused == 1_000 - 3


def test_the_limit_holds_when_more_sources_fail_than_succeed() -> None:
    flood = Flood(3)
    flood.count_accepted("canary", 100, 0.0)
    admitted = [flood.admit(f"{n}-{source}", source, 1.0) is None for n in range(50) for source in ("wiki", "drive")]
    assert sum(admitted) <= 3 + 1  # one of the first source, before the second one was heard of
    assert not any(admitted[10:])


def test_the_limit_holds_when_all_sources_start_failing_after_long_success() -> None:
    flood, sources = Flood(60), [f"source-{n}" for n in range(20)]
    for source in sources:
        flood.count_accepted(source, 100_000, 0.0)
    letters = sum(flood.admit(f"{n}-{s}", s, 1.0 + n * 0.01) is None for n in range(1_000) for s in sources)
    assert letters <= len(sources) * (MAX_SCORE + 1) + 60


def test_a_success_long_ago_no_longer_lifts_the_limit() -> None:
    flood = Flood(3)
    flood.count_accepted("wiki", 1, 0.0)
    assert flood.admit("a", "drive", QUIET_SECONDS - 1) is None
    trip(flood, QUIET_SECONDS, 3)


def test_a_limit_of_zero_admits_no_dead_letter_even_while_other_sources_succeed() -> None:
    flood = Flood(0)
    flood.count_accepted("wiki", 1, 0.0)
    assert flood.admit("a", "drive", 1.0) is not None


def test_the_number_of_remembered_sources_is_bounded() -> None:
    sources = Sources()
    for n in range(2 * MAX_SOURCES):
        sources.add(n, -1, 0.0)
    assert len(sources._scores) == MAX_SOURCES


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1, 1, 5]), st.floats(0, 300, allow_nan=False)), max_size=80)
)
def test_source_scores_match_a_naive_model(steps: list[tuple[int, int, float]]) -> None:
    sources, now = Sources(), 0.0
    scores: dict[int, int] = {}
    heard: dict[int, float] = {}
    for source, score, wait in steps:
        now += wait
        scores = {s: n for s, n in scores.items() if now - heard[s] < QUIET_SECONDS}
        assert sources.confined(now) == (0 < sum(n > 0 for n in scores.values()) >= sum(n < 0 for n in scores.values()))
        sources.add(source, score, now)
        scores[source] = max(-MAX_SCORE, min(MAX_SCORE, scores.get(source, 0) + score))
        heard[source] = now


def test_records_retried_during_a_pause_do_not_prolong_it() -> None:
    """Both sources were mended; what they sent before asks again every five seconds."""
    flood = Flood(3)
    for source in ("wiki", "drive"):
        assert [flood.admit(f"{source}-{n}", source, 0.0) for n in range(20)][-1] is not None
    for second in range(1, 31):
        for source in ("wiki", "drive"):
            flood.count_accepted(source, 1, float(second))
            if second % 5 == 0:
                for n in range(3, 20):
                    flood.admit(f"{source}-{n}", source, float(second))
    assert flood.pause(31.0) == 0
