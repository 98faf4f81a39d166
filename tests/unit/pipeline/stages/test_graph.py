"""Whether a table grows fast, as the keeper of its graph notices."""

from __future__ import annotations

import pytest

from pipeline.core.graph import GROWING_ROWS, GROWING_SECONDS
from pipeline.stages import graph
from pipeline.stages.graph import _TableHistory


def test_a_table_grows_fast_until_two_counts_find_few_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert count_after(1, 60_000 + 2 * GROWING_ROWS - 1), "a model's pause"
    assert not count_after(GROWING_SECONDS, 60_000 + 2 * GROWING_ROWS)
    assert count_after(GROWING_SECONDS, 100_000)
    assert not count_after(1, None), "it has a graph"
    count_after(GROWING_SECONDS, 200_000)
    assert not count_after(GROWING_SECONDS, 300_000), "its readers miss the graph that was dropped"
