"""Checks what the graph of the vectors, or their sketches, find: for some searches, the nearest passages are also
determined by all vectors.

A graph returns fewer of the nearest passages the larger its table is, and whoever searches does not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic

import structlog

from pipeline.core.errors import PenstockError
from pipeline.embedding.port import Vectors
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import Connection
from query.model import Candidate
from query.retrieval.vectors import NeighbourQuery, Scan, Tuning, nearest
from query.telemetry import QueryMetrics

log = structlog.get_logger(__name__)

NEIGHBOURS = 10
SCAN_SECONDS = 30.0
"""The time limit of one check. An exact scan of a million rows takes some seconds."""
LEAST_PAUSE_SECONDS, PAUSE_FACTOR = 10.0, 100
"""The pause after a check: this many seconds, or this many times its duration if that is longer, so that checks take at
most a hundredth of one of the database's processors."""
EQUAL = 1e-6
"""The largest difference of two cosines that count as equal: of many passages with the same text, any may be found."""

Connect = Callable[[float, str, str], AbstractAsyncContextManager[Connection]]


class RecallCheck:
    """Compares searches through a graph or by sketches with scans of all vectors.

    Law: it delays no search, never raises, and runs one check at a time.
    """

    def __init__(self, connect: Connect, tuning: Tuning, metrics: QueryMetrics) -> None:
        """connect: opens a connection, given its time limit in seconds, its purpose and its tenant."""
        self._connect = connect
        self._tuning = tuning
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._due_at = monotonic()

    def offer(self, query: NeighbourQuery, vector: Vectors, scan: Scan, *, limit: int) -> None:
        """Check a search that has just been answered, unless it is too early."""
        if monotonic() < self._due_at or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.create_task(self._check(query, vector, scan, limit), name="recall")

    async def _check(self, query: NeighbourQuery, vector: Vectors, scan: Scan, limit: int) -> None:
        began = monotonic()
        outcome = "unfinished"
        try:
            async with self._connect(SCAN_SECONDS, "recall", query.caller.tenant) as connection:
                exact = await self._nearest(connection, query, vector, "exact", NEIGHBOURS)
                walked = await self._nearest(connection, query, vector, scan, limit)
            if exact:
                self._metrics.recall.observe(recall(walked, exact))
            outcome = "compared"
        except PenstockError as error:
            log.warning("recall_not_checked", reason=str(error)[:200])
        except Exception as error:  # noqa: BLE001  (a mistake of ours; its text may quote the question)
            log.error("recall_check_crashed", kind=type(error).__name__)
        finally:
            self._metrics.recall_checks.labels(outcome=outcome).inc()
            now = monotonic()
            self._due_at = now + max(LEAST_PAUSE_SECONDS, PAUSE_FACTOR * (now - began))

    async def _nearest(
        self, connection: Connection, query: NeighbourQuery, vector: Vectors, scan: Scan, limit: int
    ) -> list[Candidate]:
        candidates, _ = await nearest(
            connection, query, vector, scan, limit=limit, timeout_seconds=SCAN_SECONDS, tuning=self._tuning
        )
        return candidates

    async def aclose(self) -> None:
        """Cancel the running check."""
        if self._task is not None:
            await cancel_and_wait([self._task])


def recall(candidates: Sequence[Candidate], exact: Sequence[Candidate]) -> float:
    """The share of the nearest passages that are among the candidates. Both are in order, nearest first."""
    least = exact[-1].score - EQUAL
    return sum(candidate.score >= least for candidate in candidates[: len(exact)]) / len(exact)
