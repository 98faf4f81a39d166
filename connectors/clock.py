"""Stamps that only grow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pipeline.core.errors import Misconfigured

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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


def version_at(stamp: datetime, last: int | None) -> int:
    """The version of a document whose source has none of its own: the stamp in nanoseconds, so that a restored old file
    counts as newer, and greater than the last one.

    stamp: given before the source was read. The time of the decision would let a process that was paused after it had
    read outrank whoever has read something newer since."""
    return max((last or 0) + 1, (stamp - _EPOCH) // timedelta(microseconds=1) * 1_000)
