"""The breaker: stands still when the world is down, lets one batch at a time find out, and knows what has to heal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.breaker import BASE_SECONDS, CAP_SECONDS, THRESHOLD, Breaker


def open_breaker() -> Breaker:
    breaker = Breaker()
    for n in range(THRESHOLD):
        assert breaker.enter(0.0) == 0
        breaker.failed(n, "embedding", "down", now=0.0, random=0.0)
    return breaker


def test_failures_below_the_threshold_do_not_open_the_breaker() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(THRESHOLD - 1):
            breaker.failed("b", "postgres", "cut", now=0, random=0)
        breaker.ended({"postgres"})
    assert breaker.trouble is None


def test_an_open_breaker_admits_one_trial_batch_after_growing_pauses() -> None:
    breaker = open_breaker()
    assert breaker.trouble is not None
    assert breaker.trouble.service == "embedding"
    now, pauses = 0.0, []
    for _ in range(8):
        pause = breaker.enter(now)
        pauses.append(pause)
        now += pause
        assert breaker.enter(now) == 0, "the trial"
        assert breaker.enter(now) > 0, "nobody else while it lasts"
        breaker.failed("b", "embedding", "down", now=now, random=1.0)
    assert pauses[0] == BASE_SECONDS / 2
    assert pauses == sorted(pauses)
    assert pauses[-1] == CAP_SECONDS
    assert breaker.trouble.since == 0.0


def test_one_batch_that_always_fails_is_reported_without_delaying_others() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.failed("the same", "embedding", "500", now=0, random=0)
    assert breaker.trouble is not None
    assert breaker.enter(0.0) == 0


def test_the_breaker_waits_as_long_as_retry_after_asks() -> None:
    breaker = open_breaker()
    breaker.failed("b", "embedding", "429", now=0, random=0, retry_after=90)
    assert breaker.enter(0.0) == 90


def test_only_success_of_the_failed_service_closes_the_breaker() -> None:
    breaker = open_breaker()
    now = breaker.enter(0.0)
    assert breaker.enter(now) == 0
    breaker.ended({"postgres", "kafka"})
    assert breaker.trouble is not None, "a batch that needed no embedding proves nothing"
    assert breaker.enter(now) == 0, "yet the next may go on at once"
    breaker.ended({"postgres", "embedding"})
    assert breaker.trouble is None
    assert breaker.enter(now) == 0


@given(st.lists(st.sampled_from(["fail", "good", "other", "tick"]), max_size=200))
def test_the_breaker_always_admits_a_batch_after_a_few_pauses(script: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    for step in script:
        now += 0.5
        if step == "tick" or breaker.enter(now):
            continue
        if step == "fail":
            breaker.failed(now, "kafka", "down", now=now, random=0.5)
        else:
            breaker.ended({"kafka"} if step == "good" else {"postgres"})
    for _ in range(3):  # an admitted batch always ends, so a trial is never left open
        wait = breaker.enter(now)
        assert wait <= CAP_SECONDS
        now += wait
        if wait == 0:
            break
    else:
        raise AssertionError("it stays shut")
