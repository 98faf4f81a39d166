"""When a generation's rows enter its HNSW graph, and when a graph is built at all (docs/adr/0030)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FRONT_ROWS = 4_000
"""Most rows that wait outside of the graph while no live change is late: each query reads them all, in about 28 ms
(7 µs a row of 1,536 dimensions; 3 µs where a quiet, vacuumed table is read whole; the times below assume 7 µs and idle
processors, and may be several times that under load). Beyond it the backfill lane of a table that is too large to be
read whole writes straight into the graph; live changes never do."""
GRAPH_FROM_ROWS = 5_000
"""A smaller table needs no graph: it is read whole in 15–35 ms."""
READ_WHOLE_ROWS = 50_000
"""About 350 ms a query. A table of at most so many rows may lose its graph and get another one, and so many rows may
wait outside of a graph while live changes are late, or while it is built."""
LOAD_ROWS = 200_000
"""About 1.4 s a query. The graph of a larger table is built at once and by all processors, even while other work
waits."""
BUSY_DOCUMENTS = 20
"""While more documents wait for a store, they go first: building a graph takes processors from the stores, and the rows
that it is built of may be replaced meanwhile."""
BUSY_AT_MOST_SECONDS = 120.0
"""A document that has waited longer no longer goes first: its store may have an outage."""
LATE_SECONDS = 3.0
"""A live change that has waited so long for a store is late, and the graph takes no processor from it."""
LATE_FOR_SECONDS = 15.0
"""Live changes count as late for so long after the last late one."""
BUILT_AT_LATEST_SECONDS = 120.0
"""A table that is never at rest is read whole for so long: a load is over by then, or it has 100,000 rows and a query
takes 0.3–0.7 s. A graph that is built after a load costs a third of one that grows with it."""
BUILT_FASTER = 4
"""Adding a row to an existing graph costs 6 ms, building a graph 1.2–2.5 ms a row: moving more than a quarter of a
table's rows takes longer than building its graph anew."""

Step = Literal["rest", "move", "build", "drop", "rename"]


@dataclass(frozen=True, slots=True)
class Graph:
    """One HNSW index over a chunk table."""

    name: str
    valid: bool
    partial: bool
    """Over the rows that say so (in_graph); an older version's graph is over all of them."""


@dataclass(frozen=True, slots=True)
class Table:
    """A chunk table and its graphs, as the vectors worker that maintains them sees them."""

    own: Graph | None
    """The one that queries use."""
    successor: Graph | None
    """A partial one that takes the place of an older version's."""
    older: Graph | None
    """One over all rows, which was made for an older version's return (docs/upgrade.md)."""
    rows: int
    """Counted no further than just above READ_WHOLE_ROWS."""
    waiting: int
    """Rows outside of the graph, counted as far."""
    loaded: bool
    """It has more than about LOAD_ROWS."""
    busy: bool
    """More than BUSY_DOCUMENTS wait for a store, for no longer than BUSY_AT_MOST_SECONDS."""
    late: bool
    """Live changes are late, or were within LATE_FOR_SECONDS."""
    without_seconds: float
    """How long it has been observed without a graph, and large enough for one."""
    builds: bool
    """Graphs may be built here: the table is ours, and no command is filling it or building an index on it."""

    @property
    def builds_alone(self) -> bool:
        """Whether one process builds its graph, so that waiting work has the other processors."""
        return self.busy and not self.loaded


def next_step(table: Table) -> tuple[Step, Graph | None]:
    """The next step, and its graph (build: None; drop and rename: that graph). Each step leaves searches correct, and
    after a crash the next one follows from the state of the catalogue."""
    own, successor = table.own, table.successor
    if table.builds and successor is not None:
        if not successor.valid or (own is not None and own.valid and own.partial):
            return "drop", successor
        return ("rename", successor) if own is None else ("drop", own)
    if table.builds and own is not None and not own.valid:
        return "drop", own
    if table.builds and own is not None and not own.partial:
        return "build", None
    if table.builds and own is not None and table.older is not None:
        return "drop", table.older
    if own is None:
        if table.waiting:
            return "move", None  # into no graph: that costs next to nothing
        return ("build", None) if table.builds and _worth_a_graph(table) else ("rest", None)
    if not (own.valid and own.partial and table.waiting):
        return "rest", None
    if (
        table.builds
        and table.waiting > FRONT_ROWS
        and table.rows <= READ_WHOLE_ROWS
        and table.waiting * BUILT_FASTER > table.rows
    ):
        return "drop", own
    at_most = READ_WHOLE_ROWS if table.late else FRONT_ROWS if table.busy else 0
    return ("move", None) if table.waiting > at_most else ("rest", None)


def _worth_a_graph(table: Table) -> bool:
    settled = table.loaded or not table.busy or table.without_seconds >= BUILT_AT_LATEST_SECONDS
    return table.rows >= GRAPH_FROM_ROWS and settled
