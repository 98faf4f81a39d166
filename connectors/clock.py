"""Stamps that only grow."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from pipeline.core.errors import Misconfigured

TOLERANCE = timedelta(minutes=4)
"""Events stamped more than five minutes ahead of the pipeline's clock are refused there."""


class Clock:
    """``observed_at`` of one source: never the same twice, never backwards, also across restarts."""

    def __init__(self, last: datetime | None) -> None:
        """last: the newest stamp given before. Raises Misconfigured when it lies in the future."""
        self.last = last or datetime.min.replace(tzinfo=UTC)
        if self.last > datetime.now(UTC) + TOLERANCE:
            raise Misconfigured(
                f"this machine's clock is behind: something was already published at {self.last:%Y-%m-%d %H:%M:%S} UTC;"
                " set the clock"
            )

    def stamp(self) -> datetime:
        self.last = max(datetime.now(UTC), self.last + timedelta(microseconds=1))
        return self.last


def next_version(last: int | None) -> int:
    """Of a source without versions of its own: greater than the last one, and in nanoseconds, so that a restored old
    file counts as newer."""
    return max((last or 0) + 1, time.time_ns())
