"""Backfill's share of a busy worker: all of it where no live work is late, some of it always."""

from __future__ import annotations

import pytest

from pipeline.core.share import ABOUT_SECONDS, LATE_FOR_SECONDS, LATE_SECONDS, Share


def test_without_live_work_backfill_is_never_held_up() -> None:
    share = Share(0.1)
    for n in range(4):
        assert share.admits_backfill(now=float(n))
        share.begins("backfill")
    for n in range(4):
        share.ends("backfill", 1_000.0, now=5.0 + n)
        assert share.admits_backfill(now=5.0 + n)


def test_beside_live_work_it_has_one_lane() -> None:
    share = Share(0.1)
    share.begins("live")
    assert share.admits_backfill(now=0.0)
    share.begins("backfill")
    assert not share.admits_backfill(now=1.0)
    share.ends("live", 1.0, now=1.0)
    assert not share.admits_backfill(now=1.0 + ABOUT_SECONDS / 2)
    assert share.admits_backfill(now=1.0 + ABOUT_SECONDS)


@pytest.mark.parametrize("given", [0.05, 0.1, 0.5])
def test_while_live_work_is_late_it_has_its_share_of_the_time_and_no_more(given: float) -> None:
    share, now, took = Share(given), 0.0, 0.0
    while now < 600.0:
        share.waited(LATE_SECONDS + 1, now=now)
        share.begins("live")
        now += 0.1
        share.ends("live", 0.1, now=now)
        if share.admits_backfill(now=now):
            share.begins("backfill")
            now += 0.1
            share.ends("backfill", 0.1, now=now)
            took += 0.1
    assert took / now == pytest.approx(given, rel=0.25)


def test_it_never_starves_though_live_work_is_late_and_gets_nothing_done() -> None:
    share, admitted = Share(0.1), 0
    for n in range(600):
        now = n / 2
        share.waited(60.0, now=now)
        share.begins("live")
        share.ends("live", 0.0, now=now)
        if share.admits_backfill(now=now):
            admitted += 1
            share.begins("backfill")
            share.ends("backfill", 0.5, now=now + 0.5)
    assert admitted >= 40


def test_what_was_late_is_forgotten() -> None:
    share = Share(0.1)
    share.waited(LATE_SECONDS + 1, now=0.0)
    share.begins("live")
    share.ends("live", 1.0, now=1.0)
    share.begins("backfill")
    share.ends("backfill", 60.0, now=2.0)
    assert not share.admits_backfill(now=5.0)
    assert share.admits_backfill(now=LATE_FOR_SECONDS + 0.1)


def test_a_batch_that_waited_out_an_outage_is_forgotten_soon() -> None:
    share = Share(0.1)
    share.begins("backfill")
    share.ends("backfill", 600.0, now=600.0)
    share.waited(LATE_SECONDS + 1, now=625.0)
    assert share.admits_backfill(now=625.0)


def test_a_share_of_nothing_is_nothing() -> None:
    share = Share(0.0)
    share.waited(LATE_SECONDS + 1, now=0.0)
    assert not share.admits_backfill(now=0.0)
