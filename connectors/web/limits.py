"""Rate limits of sources: reads the headers of a response, and makes all tasks of a client wait together.

After a 429 all tasks of one client wait, and they do not continue at the same moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.core.retry import non_negative

NEAR_LIMIT_SECONDS = 1.0
"""Between two requests while Atlassian says that less than a fifth of the budget is left (X-RateLimit-NearLimit;
developer.atlassian.com, "Rate limiting")."""
SECONDARY_LIMIT = "secondary-rate-limits"
SECONDARY_SECONDS = 60.0
"""GitHub asks for this wait where its 403 names none (docs.github.com, "Rate limits for the REST API")."""
THROTTLE_CODES = frozenset({"rateLimitExceeded", "userRateLimitExceeded", SECONDARY_LIMIT})
"""Where others answer 429, Google answers 403 with these reasons (developers.google.com/drive/api/guides/handle-errors)
and GitHub 403 with a link to this paragraph of its documentation."""
_EPOCH = 1_000_000_000
"""A reset below this is in seconds from now; one above it is in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a client."""

    patience_seconds: float = 60.0
    """For one call, waits and failed attempts together; a call that needs more raises, and its caller waits."""
    max_pause_seconds: float = 3600.0
    """The longest pause that a source can impose: the longest known budget of a vendor renews every hour."""
    request_seconds: float = 60.0
    """For one attempt at ``json`` or ``text``, from connecting to the last byte."""
    download_seconds: float = 300.0
    """For one attempt at ``download``."""
    answer_bytes: int = 32 * 1024 * 1024
    """The largest decoded body of ``json`` and ``text``."""
    parallel: int = 8
    """Concurrent requests."""
    backoff_base_seconds: float = 0.5
    backoff_cap_seconds: float = 15.0


def budget_pause(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Return the seconds until the next request makes sense, or None if the headers do not ask for a pause.

    headers: case-insensitive. ``X-RateLimit-Remaining`` and ``-Reset`` (seconds since 1970, seconds from now, or an ISO
    time as Atlassian sends it), or the same without ``X-``. A spent budget without a readable reset is a pause of
    NEAR_LIMIT_SECONDS.
    """
    for prefix in ("x-ratelimit-", "ratelimit-"):
        if non_negative(headers.get(f"{prefix}remaining")) == 0:
            reset = _seconds_until(headers.get(f"{prefix}reset"), now)
            return NEAR_LIMIT_SECONDS if reset is None else reset
    if headers.get("x-ratelimit-nearlimit", "").strip().lower() == "true":
        return NEAR_LIMIT_SECONDS
    return None


def limits_bucket(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether a response concerns the limit of its own bucket alone, rather than that of all requests to the
    host. Atlassian limits bursts by endpoint and points in all, and its RateLimit-Reason says which of them refuses
    (developer.atlassian.com/cloud/confluence/rate-limiting). Any other 429 is its bucket's; a budget that a response
    announces is the host's."""
    reason = headers.get("ratelimit-reason", "")
    return "burst" in reason or (status == 429 and not reason)


def _seconds_until(value: str | None, now: datetime) -> float | None:
    if value is None:
        return None
    if (number := non_negative(value)) is not None:
        return max(0.0, number - now.timestamp()) if number >= _EPOCH else number
    try:
        then = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, (then - now).total_seconds())


throttled: ContextVar[Callable[[str, float], None]] = ContextVar("throttled", default=lambda name, seconds: None)
"""Called with the connector's name and the seconds by which a source has extended its wait; each second counts once,
however many tasks wait. The runner sets it before it creates a source (``penstock_source_throttled_seconds_total``)."""


class Gate:
    """Law: no request passes while the gate is closed; after a refusal one request passes alone before the others."""

    def __init__(self) -> None:
        self._closed_until = 0.0
        """On time.monotonic()."""
        self._was_refused = False
        self._alone = asyncio.Lock()

    def left(self) -> float:
        """Return the seconds for which it stays closed; 0 or less if it is open."""
        return self._closed_until - time.monotonic()

    def close(self, seconds: float, *, refused: bool) -> float:
        """Close the gate for at least so many seconds from now. Returns the seconds added.

        refused: a request was refused, rather than answered with the news that the budget is spent.
        """
        now = time.monotonic()
        added = max(0.0, now + seconds - max(self._closed_until, now))
        self._closed_until = max(self._closed_until, now + seconds)
        self._was_refused |= refused
        return added

    def was_refused(self) -> bool:
        """Whether a request was refused and none has been accepted since."""
        return self._was_refused

    def record_success(self) -> None:
        """Record that the source has accepted a request."""
        self._was_refused = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.was_refused():
                await stack.enter_async_context(self._alone)
                if not self.was_refused():  # the request that was alone before was accepted
                    await stack.aclose()
            yield


class Pace:
    """The gates of a client, by host and bucket. A request passes the gate of its host, then that of its bucket."""

    def __init__(self, *, parallel: int) -> None:
        self._places = asyncio.Semaphore(parallel)
        self._gates: dict[tuple[str, str | None], Gate] = {}

    def gates(self, host: str, bucket: str | None) -> Sequence[Gate]:
        """Return the gates of a request; its response closes the last one."""
        keys = [(host, None)] if bucket is None else [(host, None), (host, bucket)]
        return [self._gates.setdefault(key, Gate()) for key in keys]

    @asynccontextmanager
    async def place(self, gates: Sequence[Gate]) -> AsyncIterator[bool]:
        """Wait for a place among the concurrent requests; yields whether the gates are open then. If they are closed,
        the caller waits and tries again."""
        async with AsyncExitStack() as stack:
            for gate in gates:
                await stack.enter_async_context(gate.turn())
            await stack.enter_async_context(self._places)
            yield all(gate.left() <= 0 for gate in gates)
