"""Rate limits of sources: what the headers of a response say, and the waiting that all tasks of a client share.

After a rejection all tasks of one client wait, and they do not return at the same moment.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
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


throttled: ContextVar[Callable[[str, float], None]] = ContextVar("throttled", default=lambda name, seconds: None)
"""Told the connector's name and by how many seconds a source has made it wait longer, each second once, however many
tasks wait. Whoever runs sources sets it before making them (``penstock_source_throttled_seconds_total``)."""


class Gate:
    """Law: nobody passes before ``until``; the first who passes after a refusal passes alone."""

    def __init__(self) -> None:
        self._until = 0.0
        self._wary = False
        self._alone = asyncio.Lock()

    def left(self) -> float:
        """Seconds that it stays closed; 0 or less: open."""
        return self._until - time.monotonic()

    def close(self, seconds: float, *, refused: bool) -> float:
        """refused: somebody was sent away; not only told that the budget is spent. Returns the seconds added."""
        now = time.monotonic()
        added = max(0.0, now + seconds - max(self._until, now))
        self._until = max(self._until, now + seconds)
        self._wary |= refused
        return added

    def wary(self) -> bool:
        """Whether somebody was sent away and nobody has passed since."""
        return self._wary

    def passed(self) -> None:
        """Somebody was let in by the source."""
        self._wary = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.wary():
                await stack.enter_async_context(self._alone)
                if not self.wary():  # whoever was alone before us came through
                    await stack.aclose()
            yield


class Pace:
    """Gates by host and bucket. A request passes the gate of its host and the one of its bucket there."""

    def __init__(self, *, parallel: int) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._gates: dict[tuple[str, str | None], Gate] = {}

    def gates(self, host: str, bucket: str | None) -> Sequence[Gate]:
        """The last one is closed by what a request of this host and bucket is told."""
        keys = [(host, None)] if bucket is None else [(host, None), (host, bucket)]
        return [self._gates.setdefault(key, Gate()) for key in keys]

    @asynccontextmanager
    async def place(self, gates: Sequence[Gate]) -> AsyncIterator[bool]:
        """Yields whether the gates are open, once there is a place. False: wait, and come again."""
        async with AsyncExitStack() as stack:
            for gate in gates:
                await stack.enter_async_context(gate.turn())
            await stack.enter_async_context(self._places)
            yield all(gate.left() <= 0 for gate in gates)
