"""Moves rows into their generation's HNSW graph in the background, and builds a graph where that costs less.

The vectors sink writes rows outside of the graph, where queries read all of them. The reasons are in
docs/adr/0030-rows-before-the-graph.md.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import structlog
from psycopg.errors import UndefinedTable

from pipeline.core.errors import PenstockError
from pipeline.core.graph import (
    BUSY_AT_MOST_SECONDS,
    BUSY_DOCUMENTS,
    FRONT_ROWS,
    GRAPH_FROM_ROWS,
    GROWING_ROWS,
    GROWING_SECONDS,
    LATE_FOR_SECONDS,
    LATE_SECONDS,
    LOAD_ROWS,
    READ_WHOLE_ROWS,
    Graph,
    Step,
    Table,
    next_step,
)
from pipeline.core.model import Generation
from pipeline.core.retry import backoff
from pipeline.core.throttle import rest_after
from pipeline.ledger import work
from pipeline.ledger.generation_tables import build_graph
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import graph
from pipeline.stores.leader import lead_session
from pipeline.stores.postgres import GRAPH_LOCK, Connection, translated, unlimited

log = structlog.get_logger()

IDLE_SECONDS = 1.0
"""Pause between two turns when there was nothing to do."""
BUSY_SHARE = 0.25
"""The share of time spent moving rows while documents are being written."""
LEADER_CHECK_SECONDS = 5.0
"""Pause between two attempts to become the leader."""
MOVE_TRANSACTION_SECONDS = 0.15
"""The target duration of a transaction that moves rows into a graph. A sink that needs one of these rows waits that
long."""
MIN_MOVED_ROWS, MAX_MOVED_ROWS = 8, 200
"""Limits on the rows of such a transaction; with 1,536 dimensions about 25 rows take MOVE_TRANSACTION_SECONDS."""
MOVED_ROWS_WITHOUT_GRAPH = 1_000
"""Rows of a transaction where there is no graph yet; it takes 0.1 s."""
MAX_MOVE_SECONDS = 2.0
"""How long rows are moved before the state of the table is read again."""
LATE_CHECK_PAUSE_FACTOR = 20
"""Pause between two checks for late changes, as a multiple of the last one's duration."""
RETRY_BASE_SECONDS, RETRY_CAP_SECONDS = 1.0, 30.0

Generations = Callable[[], Awaitable[Mapping[str, Generation]]]


@dataclass
class _TableHistory:
    """The keeper's memory of a chunk table; times are on time.monotonic()."""

    without_graph_since: float | None = None
    """Since when the table has had no graph although it is large enough for one; None: it has, or is not."""
    quiet_since: float | None = None
    """Since when no document has been pending; None: some are."""
    late_until: float = -math.inf
    """Until when its live changes count as late."""
    check_late_at: float = -math.inf
    counted_at: float = -math.inf
    counted_rows: int | None = None
    """Rows by Postgres's estimate, counted every GROWING_SECONDS while there is no graph."""
    grew: tuple[bool, bool] = (False, False)
    """True where it grew fast before the last two counts: a model's pause of some seconds does not end a load."""
    had_graph: bool = False
    """True if it had a graph, until the keeper itself drops a valid one, as it does when a load multiplies a small
    table."""
    rows_per_move: int = MIN_MOVED_ROWS
    """How many rows one transaction moves into its graph."""

    @property
    def growing(self) -> bool:
        """True while it is filled by a load. One that lost its graph otherwise has readers who miss it."""
        return any(self.grew) and not self.had_graph

    def count(self, rows: int | None) -> None:
        """Note how many rows there are. None: it has a graph."""
        if rows is None:
            self.counted_at, self.counted_rows, self.grew, self.had_graph = -math.inf, None, (False, False), True
        elif monotonic() - self.counted_at >= GROWING_SECONDS:
            grows = self.counted_rows is not None and rows - self.counted_rows >= GROWING_ROWS
            self.counted_at, self.counted_rows, self.grew = monotonic(), rows, (self.grew[1], grows)


def _seconds_since(at: float | None) -> float:
    return 0.0 if at is None else monotonic() - at


class GraphKeeper:
    """Maintains the graphs of all generations that are not retired. It runs in every vectors worker; an advisory lock
    makes one of them the leader.

    Law: wherever it is killed, searches stay correct, and the next leader continues from the state of the catalogue.
    """

    def __init__(self, settings: PostgresSettings, generations: Generations, metrics: Metrics) -> None:
        """generations: returns the generations that are not retired, by name."""
        self._settings = settings
        self._generations = generations
        self._metrics = metrics
        self._histories: dict[str, _TableHistory] = {}

    async def run(self) -> BaseException:
        """Work until cancelled. After a failure it waits, and tries again."""
        failures = 0
        while True:
            wait = LEADER_CHECK_SECONDS
            try:
                async with unlimited(self._settings, "graph") as connection:
                    await self._lead(connection)
                failures = 0
            except PenstockError as error:
                wait = backoff(
                    failures,
                    base=RETRY_BASE_SECONDS,
                    cap=RETRY_CAP_SECONDS,
                    random=random.random(),  # noqa: S311  jitter
                    retry_after=None,
                )
                failures += 1
                log.warning("graph_delayed", reason=str(error)[:200], seconds=round(wait, 1))
            await asyncio.sleep(wait)

    async def _lead(self, connection: Connection) -> None:
        """Work as the leader until cancelled. Returns at once when another worker is the leader."""
        if not await lead_session(connection, GRAPH_LOCK):
            self._metrics.front_rows.clear()
            return
        await connection.execute("SET enable_seqscan = off")  # an index finds the rows outside of the graph
        while True:
            worked = await self.turn(connection)
            await asyncio.sleep(0.0 if worked else IDLE_SECONDS)

    async def turn(self, connection: Connection) -> bool:
        """Take one step for each generation; returns False when there was nothing to do. Raises Retryable,
        Misconfigured."""
        worked = False
        waiting: dict[str, int] = {}
        with translated("graph"):
            for generation in (await self._generations()).values():
                if generation.vectors != "pgvector":
                    continue
                try:
                    table = await self._read_table(connection, generation)
                    waiting[generation.name] = table.waiting
                    step, index = next_step(table)
                    if step == "move":
                        worked |= await self._move(
                            connection, generation, into_graph=bool(table.own or table.successor), busy=table.busy
                        )
                    elif step != "rest":
                        await self._change(connection, generation, step, index, alone=table.builds_alone)
                        worked = True
                except UndefinedTable:  # the generation was retired meanwhile
                    continue
        self._metrics.front_rows.clear()
        for name, rows in waiting.items():
            self._metrics.front_rows.labels(generation=name).set(rows)
        return worked

    async def _read_table(self, connection: Connection, generation: Generation) -> Table:
        """Read what the next step depends on."""
        graphs_by_name = await graph.graphs(connection, generation)
        own, successor = (
            graphs_by_name.get(graph.own_name(generation)),
            graphs_by_name.get(graph.successor_name(generation)),
        )
        front = await graph.has_waiting_index(connection, generation)
        waiting = await graph.waiting(connection, generation, most=READ_WHOLE_ROWS + 1) if front else 0
        builds = (
            generation.state != "building"  # the command that fills a new generation builds its graph
            and await graph.may_build(connection, generation)
            and not await graph.is_building(connection, generation)
        )
        estimated = await graph.estimated_rows(connection, generation) if own is None else None
        rows = 0
        if estimated is not None and estimated > 2 * READ_WHOLE_ROWS:
            rows = READ_WHOLE_ROWS + 1  # without reading as many, every second of a load
        elif own is None or waiting:  # otherwise the step does not depend on it
            most = READ_WHOLE_ROWS + 1 if own is None or waiting > FRONT_ROWS else GRAPH_FROM_ROWS
            rows = await graph.rows(connection, generation, most=most)
        pending = await work.pending(
            connection, generation.name, within_seconds=BUSY_AT_MOST_SECONDS, most=BUSY_DOCUMENTS + 1
        )
        history = self._histories.setdefault(generation.chunk_table, _TableHistory())
        if own is not None or rows < GRAPH_FROM_ROWS:
            history.without_graph_since = None
        elif history.without_graph_since is None:
            history.without_graph_since = monotonic()
        if own is not None and waiting and generation.state != "building" and monotonic() >= history.check_late_at:
            began = monotonic()
            if await work.is_live_late(connection, generation.name, LATE_SECONDS, at_most=BUSY_AT_MOST_SECONDS):
                history.late_until = monotonic() + LATE_FOR_SECONDS
            # The check is slow while much is pending in a stalled store.
            history.check_late_at = monotonic() + LATE_CHECK_PAUSE_FACTOR * (monotonic() - began)
        history.quiet_since = None if pending else history.quiet_since or monotonic()
        history.count(estimated)
        return Table(
            own,
            successor,
            older=graphs_by_name.get(graph.older_name(generation)),
            rows=rows,
            waiting=waiting,
            loaded=estimated is not None and estimated > LOAD_ROWS,
            growing=history.growing,
            busy=pending > BUSY_DOCUMENTS,
            quiet_seconds=_seconds_since(history.quiet_since),
            late=monotonic() < history.late_until,
            vacuumed=bool(own and waiting) and await graph.is_vacuumed(connection, generation),
            without_seconds=_seconds_since(history.without_graph_since),
            sketched=generation.sketched,
            builds=builds,
        )

    async def _change(
        self, connection: Connection, generation: Generation, step: Step, of: Graph | None, *, alone: bool
    ) -> None:
        """Build, drop or rename a graph. It takes minutes where the table is large; queries and writers continue."""
        began, own = monotonic(), graph.own_name(generation)
        log.info("graph_step_started", step=step, generation=generation.name)
        if of is None:
            has_graph = own in await graph.graphs(connection, generation)
            name = graph.successor_name(generation) if has_graph else None
            await build_graph(connection, generation, name=name, alone=alone)
        elif step == "drop":
            await graph.drop_graph(connection, of.name)
            if of.name == own and of.valid:  # not after a build that failed
                self._histories[generation.chunk_table].had_graph = False
        else:
            await graph.rename_graph(connection, of.name, own)
        log.info("graph_step_finished", step=step, generation=generation.name, seconds=round(monotonic() - began, 1))

    async def _move(self, connection: Connection, generation: Generation, *, into_graph: bool, busy: bool) -> bool:
        """Move rows for at most MAX_MOVE_SECONDS; returns whether any was moved. into_graph: there is a graph that the
        rows enter, which is slow. busy: documents are being written, so most of the time is left to them."""
        history = self._histories[generation.chunk_table]
        until, any_moved = monotonic() + MAX_MOVE_SECONDS, False
        while monotonic() < until:
            began = monotonic()
            moved = await graph.move(
                connection, generation, limit=history.rows_per_move if into_graph else MOVED_ROWS_WITHOUT_GRAPH
            )
            took = max(monotonic() - began, 1e-3)
            self._metrics.graph_rows.inc(moved)
            if not moved:
                break
            any_moved = True
            if into_graph:
                fitting = round(moved * MOVE_TRANSACTION_SECONDS / took)
                history.rows_per_move = max(MIN_MOVED_ROWS, min(MAX_MOVED_ROWS, 2 * history.rows_per_move, fitting))
            await asyncio.sleep(rest_after(took, BUSY_SHARE) if busy else 0.0)
        return any_moved
