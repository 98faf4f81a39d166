"""Whether a table grows fast, as the keeper of its graph notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from pipeline.core.graph import GROWING_ROWS, GROWING_SECONDS, Graph
from pipeline.core.model import Generation
from pipeline.runtime.settings import PostgresSettings
from pipeline.stages import graph
from pipeline.stages.graph import GraphKeeper, _TableHistory
from pipeline.stores import graph as stored
from tests.support.pipeline.generations import generation


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


@pytest.mark.parametrize(("valid", "growing"), [(True, True), (False, False)])
async def test_only_a_load_that_drops_a_valid_graph_lets_the_next_one_wait(
    valid: bool, growing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table whose build had failed went without a graph for half an hour while rows were added."""

    async def drop(*_: object) -> None:
        pass

    async def generations() -> Mapping[str, Generation]:
        return {}

    monkeypatch.setattr(stored, "drop_graph", drop)
    monkeypatch.setattr(graph, "GROWING_SECONDS", 0.0)
    keeper, of = GraphKeeper(PostgresSettings(), generations, cast(Any, None)), generation()
    history = keeper._histories[of.chunk_table] = _TableHistory()
    history.count(None)
    own = Graph(stored.own_name(of), valid, partial=True)
    await keeper._change(cast(Any, None), of, "drop", own, alone=False)
    history.count(1_000_000)
    history.count(1_000_000 + GROWING_ROWS)
    assert history.growing is growing
