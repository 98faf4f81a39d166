"""Rows enter their generation's HNSW graph in the background, and graphs are built when that is cheaper than growing.

The sinks write rows outside of the graph, where queries read them exactly; see docs/adr/0030-rows-before-the-graph.md.
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
from pipeline.ledger import work
from pipeline.ledger.generation_tables import build_graph
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores import graph
from pipeline.stores.leader import lead_session
from pipeline.stores.postgres import GRAPH_LOCK, Connection, translated, unlimited

log = structlog.get_logger()

IDLE_SECONDS = 1.0
"""Between two looks when there is nothing to do."""
BUSY_SHARE = 0.25
"""Share of the time in which rows are moved while documents are being written."""
NOT_MINE_SECONDS = 5.0
"""Between two looks whether the worker that had the turn is gone."""
MOVE_SECONDS = 0.15
"""Target duration of one transaction of moving: a sink that wants one of its rows waits so long, and whoever waits for
that sink too."""
LEAST_MOVED, MOST_MOVED = 8, 200
"""Rows of such a transaction: about 25 of 1,536 dimensions."""
MOVED_WITHOUT_GRAPH = 1_000
"""Rows where there is no graph for them yet: 0.1 s."""
TURN_SECONDS = 2.0
"""Rows are moved for so long before the table is looked at again."""
LOOK_PAUSE = 20
"""Times as long as the last look for late changes took, until the next."""
RETRY_BASE_SECONDS, RETRY_CAP_SECONDS = 1.0, 30.0

Generations = Callable[[], Awaitable[Mapping[str, Generation]]]


@dataclass
class _Seen:
    """Since when a table has been without the graph that it is large enough for, until when its live changes count as
    late and when to look again (all on time.monotonic()), and how many rows a transaction moves into it."""

    without_since: float | None = None
    late_until: float = -math.inf
    look_at: float = -math.inf
    batch: int = LEAST_MOVED


class GraphKeeper:
    """Runs in every vectors worker; an advisory lock lets one of them work at a time. Law: killed anywhere, every
    search is right, and the next one goes on from what the catalogue says."""

    def __init__(self, settings: PostgresSettings, generations: Generations, metrics: Metrics) -> None:
        """generations: the living ones, by name."""
        self._settings = settings
        self._generations = generations
        self._metrics = metrics
        self._seen: dict[str, _Seen] = {}

    async def run(self) -> BaseException:
        """Work until cancelled; outages are waited for."""
        failures = 0
        while True:
            wait = NOT_MINE_SECONDS
            try:
                async with unlimited(self._settings, "graph") as connection:
                    await self._hold(connection)
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

    async def _hold(self, connection: Connection) -> None:
        """As long as the turn is ours: until cancelled. Returns at once when it is another worker's."""
        if not await lead_session(connection, GRAPH_LOCK):
            self._metrics.front_rows.clear()
            return
        await connection.execute("SET enable_seqscan = off")  # what waits is found by its index
        while True:
            worked = await self.turn(connection)
            await asyncio.sleep(0.0 if worked else IDLE_SECONDS)

    async def turn(self, connection: Connection) -> bool:
        """One step for each generation; False: there was nothing to do. Raises Retryable, Misconfigured."""
        worked = False
        waiting: dict[str, int] = {}
        with translated("graph"):
            for generation in (await self._generations()).values():
                try:
                    table = await self._look(connection, generation)
                    waiting[generation.name] = table.waiting
                    step, of = next_step(table)
                    if step == "move":
                        worked |= await self._move(
                            connection, generation, into_graph=bool(table.own or table.successor), busy=table.busy
                        )
                    elif step != "rest":
                        await self._change(connection, generation, step, of, alone=table.builds_alone)
                        worked = True
                except UndefinedTable:  # retired meanwhile
                    continue
        self._metrics.front_rows.clear()
        for name, rows in waiting.items():
            self._metrics.front_rows.labels(generation=name).set(rows)
        return worked

    async def _look(self, connection: Connection, generation: Generation) -> Table:
        graphs_by_name = await graph.graphs(connection, generation)
        own, successor = (
            graphs_by_name.get(graph.own_name(generation)),
            graphs_by_name.get(graph.successor_name(generation)),
        )
        front = await graph.has_waiting_index(connection, generation)
        waiting = await graph.waiting(connection, generation, most=READ_WHOLE_ROWS + 1) if front else 0
        builds = (
            generation.state != "building"  # the command that fills it builds its graph
            and await graph.may_build(connection, generation)
            and not await graph.is_building(connection, generation)
        )
        rows = 0
        if own is None or waiting > FRONT_ROWS:  # only then it matters
            rows = await graph.rows(connection, generation, most=READ_WHOLE_ROWS + 1)
        pending = await work.pending(
            connection, generation.name, within_seconds=BUSY_AT_MOST_SECONDS, most=BUSY_DOCUMENTS + 1
        )
        seen = self._seen.setdefault(generation.chunk_table, _Seen())
        if own is not None or rows < GRAPH_FROM_ROWS:
            seen.without_since = None
        elif seen.without_since is None:
            seen.without_since = monotonic()
        if own is not None and waiting and generation.state != "building" and monotonic() >= seen.look_at:
            began = monotonic()
            if await work.is_live_late(connection, generation.name, LATE_SECONDS, at_most=BUSY_AT_MOST_SECONDS):
                seen.late_until = monotonic() + LATE_FOR_SECONDS
            seen.look_at = monotonic() + LOOK_PAUSE * (monotonic() - began)  # where a store is away, much is pending
        without = 0.0 if seen.without_since is None else monotonic() - seen.without_since
        older, busy = graphs_by_name.get(graph.older_name(generation)), pending > BUSY_DOCUMENTS
        late = monotonic() < seen.late_until
        loaded = own is None and await graph.is_above(connection, generation, LOAD_ROWS)
        return Table(own, successor, older, rows, waiting, loaded, busy, late, without, builds)

    async def _change(
        self, connection: Connection, generation: Generation, step: Step, of: Graph | None, *, alone: bool
    ) -> None:
        """Build, drop or rename: minutes where the table is large; queries and writers go on."""
        began, own = monotonic(), graph.own_name(generation)
        log.info("graph_step_started", step=step, generation=generation.name)
        if of is None:
            has_graph = own in await graph.graphs(connection, generation)
            name = graph.successor_name(generation) if has_graph else None
            await build_graph(connection, generation, name=name, alone=alone)
        elif step == "drop":
            await graph.drop_graph(connection, of.name)
        else:
            await graph.rename_graph(connection, of.name, own)
        log.info("graph_step_finished", step=step, generation=generation.name, seconds=round(monotonic() - began, 1))

    async def _move(self, connection: Connection, generation: Generation, *, into_graph: bool, busy: bool) -> bool:
        """For TURN_SECONDS at most; False: nothing could be moved."""
        seen = self._seen[generation.chunk_table]
        until, any_moved = monotonic() + TURN_SECONDS, False
        while monotonic() < until:
            began = monotonic()
            moved = await graph.move(connection, generation, limit=seen.batch if into_graph else MOVED_WITHOUT_GRAPH)
            took = max(monotonic() - began, 1e-3)
            self._metrics.graph_rows.inc(moved)
            if not moved:
                break
            any_moved = True
            if into_graph:
                fitting = round(moved * MOVE_SECONDS / took)
                seen.batch = max(LEAST_MOVED, min(MOST_MOVED, 2 * seen.batch, fitting))
            await asyncio.sleep(took * (1 / BUSY_SHARE - 1) if busy else 0.0)
        return any_moved
