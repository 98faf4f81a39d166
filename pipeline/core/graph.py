"""Deciding when rows enter their generation's HNSW graph, and when a graph is built. Pure.

The reasons are in docs/adr/0030-rows-before-the-graph.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.core.model import Quantisation, VectorIndex

FRONT_ROWS = 4_000
"""The most rows outside of the graph while no live change is late. Each query reads all of them, in about 28 ms: 7 µs
for a row of 1,536 dimensions. (3 µs where a quiet, vacuumed table is read whole. The times below assume 7 µs and idle
processors, and may be several times that under load.) Beyond it, backfill into a table that is too large to be read
whole is written directly into the graph; live changes never are."""
GRAPH_FROM_ROWS = 5_000
"""A table with fewer rows needs no graph: reading it whole takes 15–35 ms. Where it has one (a new table has an empty
one), further rows stay outside."""
READ_WHOLE_ROWS = 50_000
"""The most rows that a query may have to read whole, in about 350 ms: those of a table whose graph is replaced, and
those outside of a graph while live changes are late or the graph is built."""
LOAD_ROWS = 200_000
"""The graph of a table with more rows is built with all processors even while other work is pending, because until then
searches by meaning are incomplete for callers who may read more than READ_WHOLE_ROWS."""
BUSY_DOCUMENTS = 20
"""While more documents are pending, they go first: building a graph takes processors from the sinks, and they may
replace the rows that it is built from."""
QUIET_SECONDS, SKETCHED_QUIET_SECONDS = 5.0, 30.0
"""For so long, no document may have been pending before the first graph of a table is built that can be read whole:
longer where sketches make that fast (docs/adr/0121). The build takes a processor for some seconds after a load, when
the next changes are likely."""
BUSY_AT_MOST_SECONDS = 120.0
"""A document that has been pending for longer does not go first any more: its store may have an outage."""
LATE_SECONDS = 3.0
"""A live change that has been pending for this long is late. Then the graph takes no processor from the sinks."""
LATE_FOR_SECONDS = 15.0
"""Live changes count as late for this long after the last late one."""
BUILT_AT_LATEST_SECONDS = 120.0
"""How long a table that is always being written may go without a graph."""
GROWN_AT_LATEST_SECONDS = 1_800.0
"""The same for a table of more than READ_WHOLE_ROWS that grows fast, as in a first load: at 1,000 rows a second, nearly
two million fit into this time. All further rows enter the graph one by one, at several times the cost of a build."""
GROWING_ROWS, GROWING_SECONDS = 2_000, 20.0
"""A table that gets so many rows more within so many seconds grows fast. Edits do not make it grow."""
BUILT_FASTER = 4
"""Adding a row to a graph takes 6 ms, and building a graph 1.2–2.5 ms for each row. So a new graph is faster than
moving more than a quarter of a table's rows into the old one."""


class Parameters(NamedTuple):
    """How pgvector connects the rows of a graph."""

    neighbours: int
    """pgvector's ``m``: how many neighbours a row has in each layer. A graph has the same for good."""
    candidates: int
    """``ef_construction``: among how many rows the neighbours of a new row are chosen."""


USUAL_PARAMETERS, CAREFUL_PARAMETERS = Parameters(16, 64), Parameters(24, 128)
SHORT_VECTOR_PARAMETERS = Parameters(16, 128)
"""For halfvecs of fewer than LONG_VECTOR_DIMENSIONS: with 64 candidates, walks miss too much where documents are long
(docs/adr/0128)."""
LONG_VECTOR_DIMENSIONS = 1_024
"""From here on, the usual graph misses too much in a table of a million rows (docs/adr/0118)."""


def usual_quantisation(dimensions: int, vectors: VectorIndex = "pgvector") -> Quantisation:
    """Return what a graph of vectors with so many dimensions holds, unless somebody chooses (docs/adr/0124). The one
    in Elasticsearch has no choice."""
    return "binary" if dimensions >= LONG_VECTOR_DIMENSIONS and vectors == "pgvector" else "halfvec"


def build_parameters(dimensions: int, quantisation: Quantisation, *, sketched: bool = True) -> Parameters:
    """Return the parameters with which a graph is built. Rows that are added to it later choose among as many
    candidates as in any other graph. sketched: whether a binary graph holds sketches, as every new one does."""
    if dimensions >= LONG_VECTOR_DIMENSIONS and (sketched or quantisation == "halfvec"):
        return CAREFUL_PARAMETERS
    return SHORT_VECTOR_PARAMETERS if quantisation == "halfvec" else USUAL_PARAMETERS


Step = Literal["rest", "move", "build", "drop", "rename"]


@dataclass(frozen=True, slots=True)
class Graph:
    """One HNSW index over a chunk table."""

    name: str
    valid: bool
    partial: bool
    """True if it covers only the rows with ``in_graph``; the graph of an older version covers all rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """A chunk table and its graphs: all that the next step depends on."""

    own: Graph | None
    """The graph that queries use."""
    successor: Graph | None
    """A partial graph that is to replace an older version's."""
    older: Graph | None
    """A graph over all rows, which was built for the return to an older version (docs/upgrade.md)."""
    rows: int
    """The number of rows, counted as far as the step depends on it: at most up to just above READ_WHOLE_ROWS."""
    waiting: int
    """The number of rows outside of the graph, counted up to the same limit."""
    loaded: bool
    """Whether the table has more than about LOAD_ROWS rows."""
    growing: bool
    """True if it has grown fast lately, and has had no graph so far or lost it to this load."""
    busy: bool
    """Whether more than BUSY_DOCUMENTS are pending, each for no longer than BUSY_AT_MOST_SECONDS."""
    quiet_seconds: float
    """How long no document has been pending that was written lately."""
    late: bool
    """Whether live changes are late, or were within LATE_FOR_SECONDS."""
    vacuumed: bool
    """Whether the graph that queries use is being vacuumed. A row that enters it meanwhile is connected to none of its
    neighbours if most of those are deleted rows, so that no search reaches it before the vacuum ends, minutes later."""
    without_seconds: float
    """How long the table has had no graph although it is large enough for one."""
    sketched: bool
    """Whether its rows have sketches."""
    builds: bool
    """Whether a graph may be built: the table is ours, and no command is filling it or building an index on it."""

    @property
    def builds_alone(self) -> bool:
        """Whether one process builds its graph, which leaves the other processors to other work. It does while
        documents wait, and for the first graph of a small table, which searches can read whole in the meantime."""
        return not self.loaded and (self.busy or (self.own is None and self.rows <= READ_WHOLE_ROWS))


def next_step(table: Table) -> tuple[Step, Graph | None]:
    """The next step for a table, and the graph to drop or rename (None for the other steps).

    Law: after each step searches are correct, and after a crash the next step follows from the state of the catalogue.
    """
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
            return "move", None  # cheap, because there is no graph that the rows would enter
        return ("build", None) if table.builds and _worth_a_graph(table) else ("rest", None)
    if not (own.valid and own.partial and table.waiting) or table.rows < GRAPH_FROM_ROWS:
        return "rest", None
    if (
        table.builds
        and table.waiting > FRONT_ROWS
        and table.rows <= READ_WHOLE_ROWS
        and table.waiting * BUILT_FASTER > table.rows
    ):
        return "drop", own
    at_most = READ_WHOLE_ROWS if table.late else FRONT_ROWS if table.busy or table.vacuumed else 0
    return ("move", None) if table.waiting > at_most else ("rest", None)


def _worth_a_graph(table: Table) -> bool:
    grows = table.growing and table.rows > READ_WHOLE_ROWS
    if grows:  # also when, for a moment, nothing is pending
        return table.without_seconds >= GROWN_AT_LATEST_SECONDS
    quiet = SKETCHED_QUIET_SECONDS if table.sketched else QUIET_SECONDS
    may_wait = table.busy or (table.rows <= READ_WHOLE_ROWS and table.quiet_seconds < quiet)
    return table.rows >= GRAPH_FROM_ROWS and (not may_wait or table.without_seconds >= BUILT_AT_LATEST_SECONDS)
