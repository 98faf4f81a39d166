"""The limit on dead letters: never more than so many in any minute, pauses that grow, and an end to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.flood import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    QUIET_SECONDS,
    WINDOW_SECONDS,
    Flood,
    Refusal,
)

HOUR = 3600.0


def trip(flood: Flood, now: float, limit: int) -> Refusal:
    """Fill the minute and meet the limit."""
    for n in range(limit):
        assert flood.admit(f"{now}-{n}", now) is None
    refusal = flood.admit(f"{now}-last", now)
    assert refusal is not None
    return refusal


def test_up_to_the_limit_nothing_is_refused_and_beyond_it_everything_is() -> None:
    flood = Flood(3)
    refusal = trip(flood, 100.0, 3)
    assert refusal == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)
    assert flood.admit("another", 110.0) == Refusal(FIRST_PAUSE_SECONDS - 10, trips=1, new=False)
    assert flood.pause(110.0) == FIRST_PAUSE_SECONDS - 10
    assert flood.admit("another", 100.0 + FIRST_PAUSE_SECONDS) is None
    assert flood.pause(100.0 + FIRST_PAUSE_SECONDS) == 0


def test_the_same_record_tried_again_is_counted_once_and_even_let_through_a_pause() -> None:
    flood = Flood(2)
    for now in (0.0, 1.0, 2.0):
        assert flood.admit("a", now) is None
    assert flood.admit("b", 3.0) is None
    assert flood.admit("c", 4.0) is not None
    assert flood.admit("a", 5.0) is None
    assert flood.admit("c", 6.0) is not None


def test_each_trip_in_a_row_doubles_the_pause_up_to_an_hour() -> None:
    flood, now, pauses = Flood(1), 0.0, []
    for n in range(10):
        refusal = trip(flood, now, 1)
        assert (refusal.trips, refusal.new) == (n + 1, True)
        pauses.append(refusal.seconds)
        now += refusal.seconds
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_after_a_quiet_spell_the_next_trip_is_the_first_again() -> None:
    flood = Flood(1)
    now = trip(flood, 0.0, 1).seconds
    second = trip(flood, now + QUIET_SECONDS - 1, 1)
    assert second.trips == 2
    now += QUIET_SECONDS - 1 + second.seconds
    assert trip(flood, now + QUIET_SECONDS, 1) == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)


def test_a_trickle_below_the_limit_never_trips() -> None:
    flood = Flood(60)
    assert all(flood.admit(str(n), n * 1.0) is None for n in range(5_000))


def test_a_limit_of_nothing_admits_nothing() -> None:
    assert Flood(0).admit("a", 0.0) == Refusal(FIRST_PAUSE_SECONDS, trips=1, new=True)


def test_a_night_of_nothing_but_poison_leaves_a_thousand_letters_not_thirty_thousand() -> None:
    flood, now, letters = Flood(60), 0.0, 0
    while now < 10 * HOUR:  # an endless supply: a new bad record as soon as one may be set aside
        refusal = flood.admit(f"{letters}", now)
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
def test_in_no_minute_more_than_the_limit(limit: int, steps: list[tuple[float, int]]) -> None:
    flood, now = Flood(limit), 0.0
    admitted: list[tuple[float, int]] = []
    for wait, letter in steps:
        now += wait
        before = flood.pause(now)
        refusal = flood.admit(str(letter), now)
        known = any(one == letter and now - at < WINDOW_SECONDS for at, one in admitted)
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
