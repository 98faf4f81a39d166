"""When rows enter the graph, and when it is built: the decision alone."""

from __future__ import annotations

import pytest

from pipeline.core.graph import (
    BUILT_AT_LATEST_SECONDS,
    CAREFUL_PARAMETERS,
    FRONT_ROWS,
    GRAPH_FROM_ROWS,
    GROWN_AT_LATEST_SECONDS,
    QUIET_SECONDS,
    READ_WHOLE_ROWS,
    SHORT_VECTOR_PARAMETERS,
    SKETCHED_QUIET_SECONDS,
    USUAL_PARAMETERS,
    Graph,
    Table,
    build_parameters,
    next_step,
)

OWN = Graph("t_hnsw", valid=True, partial=True)
BROKEN = Graph("t_hnsw", valid=False, partial=True)
OLD = Graph("t_hnsw", valid=True, partial=False)
NEXT = Graph("t_hnsw_new", valid=True, partial=True)
BROKEN_NEXT = Graph("t_hnsw_new", valid=False, partial=True)


def table(
    own: Graph | None = None,
    successor: Graph | None = None,
    rows: int = 0,
    waiting: int = 0,
    busy: bool = False,
    late: bool = False,
    vacuumed: bool = False,
    without_seconds: float = 0.0,
    builds: bool = True,
    older: Graph | None = None,
    loaded: bool = False,
    growing: bool = False,
    quiet_seconds: float = SKETCHED_QUIET_SECONDS,
    sketched: bool = True,
) -> Table:
    return Table(
        own,
        successor,
        older,
        rows=rows,
        waiting=waiting,
        loaded=loaded,
        growing=growing,
        busy=busy,
        quiet_seconds=0.0 if busy else quiet_seconds,
        late=late,
        vacuumed=vacuumed,
        without_seconds=without_seconds,
        sketched=sketched,
        builds=builds,
    )


@pytest.mark.parametrize(
    ("current", "step"),
    [
        (table(rows=GRAPH_FROM_ROWS - 1), "rest"),
        (table(rows=GRAPH_FROM_ROWS), "build"),
        (table(rows=READ_WHOLE_ROWS, quiet_seconds=SKETCHED_QUIET_SECONDS - 1), "rest"),
        (table(rows=READ_WHOLE_ROWS, quiet_seconds=QUIET_SECONDS, sketched=False), "build"),
        (table(rows=READ_WHOLE_ROWS, quiet_seconds=QUIET_SECONDS - 1, sketched=False), "rest"),
        (table(rows=READ_WHOLE_ROWS, quiet_seconds=0, without_seconds=BUILT_AT_LATEST_SECONDS), "build"),
        (table(rows=READ_WHOLE_ROWS + 1, quiet_seconds=0), "build"),
        (table(rows=READ_WHOLE_ROWS + 1, busy=True), "rest"),
        (table(rows=READ_WHOLE_ROWS + 1, loaded=True), "build"),
        (table(rows=READ_WHOLE_ROWS + 1, busy=True, without_seconds=BUILT_AT_LATEST_SECONDS), "build"),
        (table(rows=READ_WHOLE_ROWS, busy=True, growing=True, without_seconds=BUILT_AT_LATEST_SECONDS), "build"),
        (table(rows=READ_WHOLE_ROWS + 1, busy=True, growing=True, without_seconds=BUILT_AT_LATEST_SECONDS), "rest"),
        (table(rows=READ_WHOLE_ROWS + 1, busy=True, growing=True, without_seconds=GROWN_AT_LATEST_SECONDS), "build"),
        (table(rows=READ_WHOLE_ROWS + 1, growing=True, loaded=True), "rest"),
        (table(rows=READ_WHOLE_ROWS, growing=True), "build"),
        (table(rows=READ_WHOLE_ROWS, busy=True, without_seconds=BUILT_AT_LATEST_SECONDS - 1), "rest"),
        (table(rows=GRAPH_FROM_ROWS, busy=True, without_seconds=BUILT_AT_LATEST_SECONDS), "build"),
        (table(rows=GRAPH_FROM_ROWS, busy=True, without_seconds=BUILT_AT_LATEST_SECONDS, builds=False), "rest"),
    ],
)
def test_a_graph_is_built_once_a_load_has_settled_or_has_lasted_too_long(current: Table, step: str) -> None:
    assert next_step(current) == (step, None)


def test_one_process_builds_the_graph_of_a_table_that_can_be_read_whole_meanwhile() -> None:
    assert table(rows=READ_WHOLE_ROWS).builds_alone
    assert not table(rows=READ_WHOLE_ROWS + 1).builds_alone
    assert table(rows=READ_WHOLE_ROWS + 1, busy=True).builds_alone
    assert not table(rows=READ_WHOLE_ROWS + 1, busy=True, loaded=True).builds_alone
    assert not table(OLD).builds_alone, "its rows are not counted"


def test_waiting_rows_move_into_the_graph_while_that_is_cheaper_than_a_new_build() -> None:
    assert next_step(table(OWN)) == ("rest", None)
    assert next_step(table(OWN, rows=GRAPH_FROM_ROWS, waiting=1)) == ("move", None)
    assert next_step(table(OWN, rows=100_000, waiting=FRONT_ROWS + 1)) == ("move", None), "too large to do without"
    assert next_step(table(OWN, rows=40_000, waiting=9_000)) == ("move", None)
    assert next_step(table(OWN, rows=40_000, waiting=11_000)) == ("drop", OWN)
    assert next_step(table(OWN, rows=40_000, waiting=11_000, builds=False)) == ("move", None)
    assert next_step(table(OWN, rows=GRAPH_FROM_ROWS, waiting=FRONT_ROWS)) == ("move", None)
    assert next_step(table(OWN, rows=GRAPH_FROM_ROWS - 1, waiting=4_000)) == ("rest", None), "no search uses the graph"
    assert next_step(table(OWN, rows=GRAPH_FROM_ROWS, waiting=FRONT_ROWS, busy=True)) == ("rest", None), (
        "documents go first"
    )
    assert next_step(table(OWN, rows=100_000, waiting=FRONT_ROWS + 1, busy=True)) == ("move", None)


def test_rows_wait_outside_a_graph_that_is_vacuumed_while_queries_read_them_in_a_moment() -> None:
    vacuumed = {"rows": 200_000, "vacuumed": True}
    assert next_step(table(OWN, waiting=FRONT_ROWS, **vacuumed)) == ("rest", None)
    assert next_step(table(OWN, waiting=FRONT_ROWS + 1, **vacuumed)) == ("move", None)
    assert next_step(table(rows=20_000, waiting=1, vacuumed=True)) == ("move", None), "there is no graph"


def test_no_rows_move_while_live_changes_are_late_and_queries_can_read_the_waiting_rows() -> None:
    late = {"rows": 200_000, "busy": True, "late": True}
    assert next_step(table(OWN, waiting=READ_WHOLE_ROWS, **late)) == ("rest", None)
    assert next_step(table(OWN, waiting=READ_WHOLE_ROWS + 1, **late)) == ("move", None)


def test_rows_left_outside_a_dropped_graph_move_before_the_next_graph_is_built() -> None:
    assert next_step(table(rows=20_000, waiting=1)) == ("move", None)


def test_a_graph_of_an_older_version_is_replaced_step_by_step() -> None:
    steps = [
        (table(OLD), ("build", None)),
        (table(OLD, BROKEN_NEXT), ("drop", BROKEN_NEXT)),
        (table(OLD, NEXT), ("drop", OLD)),
        (table(None, NEXT), ("rename", NEXT)),
        (table(OWN), ("rest", None)),
        (table(OWN, NEXT), ("drop", NEXT)),
        (table(OWN, older=OLD), ("drop", OLD)),
        (table(BROKEN), ("drop", BROKEN)),
    ]
    for current, step in steps:
        assert next_step(current) == step
        alone = table(current.own, current.successor, builds=False)
        assert next_step(alone) == ("rest", None), "whoever may not build changes nothing"


def test_no_rows_move_into_an_invalid_graph() -> None:
    assert next_step(table(BROKEN, waiting=5, builds=False)) == ("rest", None)
    assert next_step(table(OLD, NEXT, waiting=5, builds=False)) == ("rest", None)


def test_graphs_of_long_vectors_and_of_their_sketches_are_built_with_care() -> None:
    assert build_parameters(1_536, "halfvec") == build_parameters(1_536, "binary") == CAREFUL_PARAMETERS
    assert build_parameters(1_536, "halfvec", sketched=False) == CAREFUL_PARAMETERS
    assert build_parameters(384, "halfvec") == SHORT_VECTOR_PARAMETERS
    assert build_parameters(384, "binary") == USUAL_PARAMETERS
    assert build_parameters(1_536, "binary", sketched=False) == USUAL_PARAMETERS, "as an older version built it"
