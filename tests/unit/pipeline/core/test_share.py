"""Backfill's share of a busy worker: all of it where no live work is late, some of it always."""

from __future__ import annotations

import pytest

from pipeline.core.throttle import LATE_FOR_SECONDS, LATE_SECONDS, LIVE_ACTIVE_SECONDS, BackfillThrottle


def test_backfill_is_always_admitted_without_live_work() -> None:
    throttle = BackfillThrottle(0.1)
    for n in range(4):
        assert throttle.admits_backfill(now=float(n))
        throttle.batch_started("backfill")
    for n in range(4):
        throttle.batch_ended("backfill", 1_000.0, now=5.0 + n)
        assert throttle.admits_backfill(now=5.0 + n)


def test_during_live_work_only_one_backfill_batch_runs_at_a_time() -> None:
    throttle = BackfillThrottle(0.1)
    throttle.batch_started("live")
    assert throttle.admits_backfill(now=0.0)
    throttle.batch_started("backfill")
    assert not throttle.admits_backfill(now=1.0)
    throttle.batch_ended("live", 1.0, now=1.0)
    assert not throttle.admits_backfill(now=1.0 + LIVE_ACTIVE_SECONDS / 2)
    assert throttle.admits_backfill(now=1.0 + LIVE_ACTIVE_SECONDS)


@pytest.mark.parametrize("given", [0.05, 0.1, 0.5])
def test_while_live_work_is_late_backfill_gets_exactly_its_share_of_the_time(given: float) -> None:
    throttle, now, took = BackfillThrottle(given), 0.0, 0.0
    while now < 600.0:
        throttle.live_waited(LATE_SECONDS + 1, now=now)
        throttle.batch_started("live")
        now += 0.1
        throttle.batch_ended("live", 0.1, now=now)
        if throttle.admits_backfill(now=now):
            throttle.batch_started("backfill")
            now += 0.1
            throttle.batch_ended("backfill", 0.1, now=now)
            took += 0.1
    assert took / now == pytest.approx(given, rel=0.25)


def test_backfill_never_starves_while_live_work_is_late_and_makes_no_progress() -> None:
    throttle, admitted = BackfillThrottle(0.1), 0
    for n in range(600):
        now = n / 2
        throttle.live_waited(60.0, now=now)
        throttle.batch_started("live")
        throttle.batch_ended("live", 0.0, now=now)
        if throttle.admits_backfill(now=now):
            admitted += 1
            throttle.batch_started("backfill")
            throttle.batch_ended("backfill", 0.5, now=now + 0.5)
    assert admitted >= 40


def test_lateness_of_live_work_is_forgotten_after_a_while() -> None:
    throttle = BackfillThrottle(0.1)
    throttle.live_waited(LATE_SECONDS + 1, now=0.0)
    throttle.batch_started("live")
    throttle.batch_ended("live", 1.0, now=1.0)
    throttle.batch_started("backfill")
    throttle.batch_ended("backfill", 60.0, now=2.0)
    assert not throttle.admits_backfill(now=5.0)
    assert throttle.admits_backfill(now=LATE_FOR_SECONDS + 0.1)


def test_a_backfill_batch_that_waited_out_an_outage_is_soon_forgotten() -> None:
    throttle = BackfillThrottle(0.1)
    throttle.batch_started("backfill")
    throttle.batch_ended("backfill", 600.0, now=600.0)
    throttle.live_waited(LATE_SECONDS + 1, now=625.0)
    assert throttle.admits_backfill(now=625.0)


def test_a_share_of_zero_admits_no_backfill_while_live_work_is_late() -> None:
    throttle = BackfillThrottle(0.0)
    throttle.live_waited(LATE_SECONDS + 1, now=0.0)
    assert not throttle.admits_backfill(now=0.0)
