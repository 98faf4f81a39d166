"""Whether a table grows fast, as the keeper of its graph notices."""

from __future__ import annotations

import pytest

from pipeline.core.graph import GROWING_ROWS, GROWING_SECONDS
from pipeline.stages import graph
from pipeline.stages.graph import _TableHistory


def test_a_table_grows_fast_while_many_rows_are_added_between_two_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    history, now = _TableHistory(), 1_000.0
    monkeypatch.setattr(graph, "monotonic", lambda: now)

    def count_after(seconds: float, rows: int | None) -> bool:
        nonlocal now
        now += seconds
        history.count(rows)
        return history.growing

    assert not count_after(0, 60_000), "nothing to compare with"
    assert not count_after(GROWING_SECONDS - 1, 90_000), "too early"
    assert count_after(1, 60_000 + GROWING_ROWS)
    assert count_after(GROWING_SECONDS - 1, 60_000 + GROWING_ROWS), "until the next count"
    assert not count_after(1, 60_000 + 2 * GROWING_ROWS - 1)
    assert count_after(GROWING_SECONDS, 100_000)
    assert not count_after(1, None), "it has a graph"
    assert not count_after(GROWING_SECONDS, 200_000), "nothing to compare with"
