"""The clock of a source, whose stamps only grow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pipeline.core.errors import Misconfigured

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TOLERANCE = timedelta(minutes=4)
"""How far ahead of this machine's clock the last stamp may be. The pipeline refuses events that are stamped more than
five minutes ahead of its own clock."""


class Clock:
    """Issues the ``observed_at`` of one source: never the same twice, and never backwards, even across restarts."""

    def __init__(self, last: datetime | None) -> None:
        """last: the newest stamp issued before. Raises Misconfigured when it lies in the future."""
        self.last = last or datetime.min.replace(tzinfo=UTC)
        if self.last > datetime.now(UTC) + TOLERANCE:
            raise Misconfigured(
                f"this machine's clock is behind: the last message was published at {self.last:%Y-%m-%d %H:%M:%S} UTC;"
                " set the clock"
            )

    def follow(self, moment: datetime | None) -> None:
        """Let all stamps from now on be later than this moment; None: there is none."""
        if moment is not None:
            self.last = max(self.last, moment)

    def stamp(self) -> datetime:
        self.last = max(datetime.now(UTC), self.last + timedelta(microseconds=1))
        return self.last


def version_at(stamp: datetime, last: int | None) -> int:
    """Return the version of a document whose source has none of its own: the stamp in nanoseconds, or just above the
    last version. A restored old file thus counts as newer.

    stamp: taken before the source was read. With the time of the decision, a process that was paused after its read
    would win over another one that has read something newer since.
    """
    return max((last or 0) + 1, (stamp - _EPOCH) // timedelta(microseconds=1) * 1_000)
