"""What the headers of an answer say about how often this client may ask: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

NEAR_LIMIT_SECONDS = 1.0
"""Between two requests while Atlassian says that less than a fifth of the budget is left (X-RateLimit-NearLimit;
developer.atlassian.com, "Rate limiting")."""
THROTTLE_CODES = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
"""Google answers 403 with these reasons where others answer 429 (developers.google.com/drive/api/guides/handle-errors).
"""
_EPOCH = 1_000_000_000
"""A smaller number is seconds from now, a larger one seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long, how much and how many at a time."""

    patience_seconds: float = 60.0
    """Of one call: waits and failed attempts together; what would take longer is left to the caller's own wait."""
    max_pause_seconds: float = 3600.0
    """The longest pause that a source can impose: the longest budget of a vendor that we know renews every hour."""
    request_seconds: float = 60.0
    """One attempt at ``json`` or ``text``, from connecting to the last byte."""
    download_seconds: float = 300.0
    """One attempt at ``download``."""
    answer_bytes: int = 32 * 1024 * 1024
    """Of ``json`` and ``text``, decoded."""
    parallel: int = 8
    """Requests at the same time."""
    backoff_base_seconds: float = 0.5
    backoff_cap_seconds: float = 15.0


def budget_pause(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Seconds until the next request makes sense; None: nothing is said against one now.

    headers: case-insensitive. ``X-RateLimit-Remaining`` and ``-Reset`` (seconds since 1970, seconds from now, or an ISO
    time as Atlassian has it), or the same without ``X-``. A spent budget without a readable reset: a second.
    """
    for prefix in ("x-ratelimit-", "ratelimit-"):
        if _number(headers.get(f"{prefix}remaining")) == 0:
            reset = _seconds_until(headers.get(f"{prefix}reset"), now)
            return NEAR_LIMIT_SECONDS if reset is None else reset
    if headers.get("x-ratelimit-nearlimit", "").strip().lower() == "true":
        return NEAR_LIMIT_SECONDS
    return None


def _seconds_until(value: str | None, now: datetime) -> float | None:
    if value is None:
        return None
    if (number := _number(value)) is not None:
        return max(0.0, number - now.timestamp()) if number >= _EPOCH else number
    try:
        then = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, (then - now).total_seconds())


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
