"""The fakes' rate limits: what they refuse, until when, and what a response costs."""

from __future__ import annotations

import json

import pytest

from connectors.fakes.atlassian_limits import RateLimits

HOUR = 3600


class Clock:
    def __init__(self) -> None:
        self.now = 1_000 * HOUR + 600.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def body(objects: int) -> bytes:
    return json.dumps({"results": [{}] * objects}).encode()


def test_bursts_are_limited_for_each_method_and_endpoint(clock: Clock) -> None:
    limits = RateLimits(per_second=10, burst=3, clock=clock)
    assert [limits.take("GET", f"/wiki/api/v2/pages/{n}") is None for n in range(4)] == [True, True, True, False]
    assert limits.take("GET", "/wiki/api/v2/pages") is None
    assert limits.take("POST", "/wiki/api/v2/pages/1") is None
    refusal = limits.take("GET", "/wiki/api/v2/pages/9")
    assert refusal is not None
    assert refusal["Retry-After"] == "1"
    assert refusal["RateLimit-Reason"] == "confluence-burst-based"
    clock.now += 0.25
    assert [limits.take("GET", "/wiki/api/v2/pages/5") is None for _ in range(3)] == [True, True, False]
    assert limits.refused == {"confluence-burst-based": 3}


def test_groups_share_the_bucket_of_their_endpoint(clock: Clock) -> None:
    limits = RateLimits(per_second=1, burst=1, clock=clock)
    assert limits.take("GET", "/wiki/rest/api/group/staff/membersByGroupId") is None
    assert limits.take("GET", "/wiki/rest/api/group/board/membersByGroupId") is not None


def test_points_are_spent_by_objects_and_renewed_each_hour(clock: Clock) -> None:
    limits = RateLimits(points=30, clock=clock)
    limits.charge("/wiki/api/v2/pages", body(10))
    assert limits.points_spent == 11
    limits.charge("/wiki/rest/api/group/staff/membersByGroupId", body(8))
    assert limits.points_spent == 11 + 17
    assert limits.take("GET", "/wiki/api/v2/pages") is None  # two are left: the last request may cost more
    headers = limits.charge("/wiki/api/v2/pages/1", b'{"id": "1"}')
    assert headers["X-RateLimit-Remaining"] == "0"
    refusal = limits.take("GET", "/wiki/api/v2/pages")
    assert refusal is not None
    assert refusal["RateLimit-Reason"] == "confluence-quota-global-based"
    assert refusal["Retry-After"] == str(HOUR - 600)
    clock.now += HOUR - 600
    assert limits.take("GET", "/wiki/api/v2/pages") is None


def test_a_fifth_of_the_quota_is_near_its_end(clock: Clock) -> None:
    limits = RateLimits(points=100, clock=clock)
    assert "X-RateLimit-NearLimit" not in limits.charge("/wiki/api/v2/pages", body(79))
    assert limits.charge("/wiki/api/v2/pages/1", b"{}")["X-RateLimit-NearLimit"] == "true"


def test_points_are_counted_without_a_quota_and_not_announced(clock: Clock) -> None:
    limits = RateLimits(clock=clock)
    assert limits.charge("/wiki/api/v2/pages", body(3)) == {}
    assert limits.points_spent == 4
    assert limits.take("GET", "/wiki/api/v2/pages") is None
