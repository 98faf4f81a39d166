"""Consumer lag: one definition, for the page, the commands and the metrics."""

from __future__ import annotations

import pytest

from pipeline.kafka.groups import Log, lag


@pytest.mark.parametrize(
    ("begin", "end", "committed", "behind"),
    [
        (0, 0, None, 0),
        (0, 10, None, 10),
        (0, 10, 0, 10),
        (0, 10, 4, 6),
        (0, 10, 10, 0),
        (7, 10, None, 3),
        (7, 10, 2, 3),
        (10, 10, 2, 0),
        (0, 3, 10, 0),
    ],
    ids=[
        "empty",
        "never committed",
        "nothing read",
        "some read",
        "all read",
        "never committed and expired",
        "expired unread",
        "all expired unread",
        "the log lost its end",
    ],
)
def test_lag_counts_only_records_that_can_still_be_read(
    begin: int, end: int, committed: int | None, behind: int
) -> None:
    log = Log(begin, None, end, end)
    assert log.behind(committed) == behind
    place, other = ("documents.live.v1", 3), ("documents.backfill.v1", 3)
    done = {} if committed is None else {place: committed}
    assert lag({place: log, other: Log(0, None, 99, 99)}, done, "documents.live.v1") == behind
