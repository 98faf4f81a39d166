"""The rate limits of Atlassian Cloud.

https://developer.atlassian.com/cloud/confluence/rate-limiting: bursts are limited for each method and endpoint, and
that is all that API tokens have to respect. Apps, such as those of OAuth, also have a quota of points, which is renewed
at the beginning of each hour: a request costs one point, and one for each object that it returns, two if the object is
a user, a group or a permission.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

NEAR_LIMIT = 0.2
_ID = re.compile(r"/(?:att)?\d+(?=/|$)|(?<=/group)/[^/]+")
_IDENTITY = re.compile(r"/(?:group|user|users-bulk|permissions|role-assignments|space-roles)(?:/|$)")


class RateLimits:
    def __init__(
        self,
        *,
        per_second: float | None = None,
        burst: int = 100,
        points: int | None = None,
        window_seconds: int = 3600,
        is_announced: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """per_second, burst: how fast the bucket of each method and endpoint is filled, and how much it holds; None: no
        limit. points: in each window; None: no limit. is_announced: whether every response says what is left of the
        points, rather than only a 429. clock: seconds since 1970."""
        self._per_second, self._burst = per_second, burst
        self._points, self._window = points, window_seconds
        self._is_announced = is_announced
        self._clock = clock
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """The requests that each bucket held, and the time of that."""
        self._spent = Counter[int]()
        """Points by window."""
        self.refused = Counter[str]()
        """Requests that were answered with 429, by reason."""

    @property
    def points_spent(self) -> int:
        """The points of all requests so far, which are counted even without a limit."""
        return self._spent.total()

    def take(self, method: str, path: str) -> dict[str, str] | None:
        """Count a request; returns the headers of a 429, or None if it may be answered."""
        now = self._clock()
        if self._points is not None and self._spent[self._current(now)] >= self._points:
            return self._refusal("confluence-quota-global-based", self._points, self._left_seconds(now), now)
        if self._per_second is None:
            return None
        key = method, _ID.sub("/ID", path)
        held, at = self._buckets.get(key, (float(self._burst), now))
        held = min(self._burst, held + (now - at) * self._per_second)
        if held < 1:
            self._buckets[key] = held, now
            return self._refusal("confluence-burst-based", self._burst, (1 - held) / self._per_second, now)
        self._buckets[key] = held - 1, now
        return None

    def charge(self, path: str, body: bytes) -> dict[str, str]:
        """Charge the points of a response; returns its headers."""
        now = self._clock()
        cost = 1 + _objects(body) * (2 if _IDENTITY.search(path) else 1)
        self._spent[self._current(now)] += cost
        if self._points is None or not self._is_announced:
            return {}
        left = max(0, self._points - self._spent[self._current(now)])
        headers = self._headers(self._points, left, self._left_seconds(now), now)
        return headers | ({"X-RateLimit-NearLimit": "true"} if left < NEAR_LIMIT * self._points else {})

    def _current(self, now: float) -> int:
        return int(now // self._window)

    def _left_seconds(self, now: float) -> float:
        return self._window - now % self._window

    def _refusal(self, reason: str, limit: int, seconds: float, now: float) -> dict[str, str]:
        self.refused[reason] += 1
        wait = str(math.ceil(seconds))
        return self._headers(limit, 0, seconds, now) | {"Retry-After": wait, "RateLimit-Reason": reason}

    def _headers(self, limit: int, left: int, seconds: float, now: float) -> dict[str, str]:
        reset = datetime.fromtimestamp(now + seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return {"X-RateLimit-Limit": str(limit), "X-RateLimit-Remaining": str(left), "X-RateLimit-Reset": reset}


def _objects(body: bytes) -> int:
    """Return how many objects a response holds."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return 1
    if isinstance(parsed, list):
        return len(parsed)
    results = parsed.get("results") if isinstance(parsed, dict) else None
    return len(results) if isinstance(results, list) else 1
