"""The data of the page's Pipeline tab, for operators.

Each part has a time limit of its own; one that is not available is absent and named in ``away``, and the others are
reported. A report is shared for a moment, so that many open tabs cost as much as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

from elasticsearch import AsyncElasticsearch

from pipeline.core.canary import MARK
from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.diagnosis import ledger
from pipeline.diagnosis.connector_status import connectors
from pipeline.diagnosis.freshness import freshness
from pipeline.diagnosis.lag import read_progress
from pipeline.ledger import generations
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import time_limit
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores import elasticsearch
from pipeline.stores.postgres import Connection, Pool, translated

T = TypeVar("T")

PART_SECONDS = 3.0
SHARED_SECONDS = 3.0
KAFKA_SHARED_SECONDS = 15.0
"""Longer than SHARED_SECONDS because reading the end of every partition costs a connection."""
WATCHED = (Detect, VectorSink, KeywordSink)
"""The stages whose lag delays searches."""


class PipelineView:
    """Caches the report for SHARED_SECONDS. One for each service; safe to share between tasks."""

    def __init__(self, pool: Pool, es: AsyncElasticsearch, settings: Settings) -> None:
        self._pool = pool
        self._es = es
        self._settings = settings
        self._lock = asyncio.Lock()
        self._cached: tuple[float, dict[str, Any]] | None = None
        self._lag: tuple[float, dict[str, Any]] | None = None

    async def look(self) -> dict[str, Any]:
        """The current report; never raises because a server is away."""
        async with self._lock:
            if self._cached is None or monotonic() - self._cached[0] > SHARED_SECONDS:
                view = await pipeline_view(self._pool, self._es, self._settings, lag=self._recent_lag)
                self._cached = (monotonic(), view)
            return self._cached[1]

    async def _recent_lag(self) -> dict[str, Any]:
        if self._lag is None or monotonic() - self._lag[0] > KAFKA_SHARED_SECONDS:
            self._lag = (monotonic(), await kafka_lag(self._settings))
        return self._lag[1]


async def pipeline_view(
    pool: Pool,
    es: AsyncElasticsearch,
    settings: Settings,
    *,
    lag: Callable[[], Awaitable[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Read all parts concurrently, for about PART_SECONDS at most from each server. A part that is away is None.

    {at, generation, freshness, pending, lag, dead_letters, divergence, connectors, stores, away}: see docs/page.md.
    """
    away: list[str] = []
    (report, generation), consumers = await asyncio.gather(
        _ledger(pool, away), _part(away, "Kafka", (lag or (lambda: kafka_lag(settings)))())
    )
    entries = None
    if generation is not None:
        entries = await _part(away, "Elasticsearch", _entries(es, generation))
    stores = [
        _store("Postgres", generation is not None, report.pop("holdings", None)),
        # Only the ledger knows which index is the active one.
        _store(
            "Elasticsearch",
            None if generation is None else entries is not None,
            None if entries is None else f"{entries:,} entries",
        ),
        _store("Kafka", consumers is not None, None),
    ]
    return {
        "at": datetime.now(UTC).isoformat(),
        "generation": None
        if generation is None
        else {"name": generation.name, "model": generation.model, "dimensions": generation.dimensions},
        **{name: report.get(name) for name in ("freshness", "pending", "dead_letters", "divergence", "connectors")},
        "lag": consumers,
        "stores": stores,
        "away": away,
    }


def _store(name: str, up: bool | None, holds: str | None) -> dict[str, Any]:
    """up: None where it is not known."""
    return {"name": name, "up": up, "holds": holds}


async def _part(away: list[str], name: str, work: Awaitable[T]) -> T | None:
    try:
        async with time_limit(PART_SECONDS, name):
            return await work
    except PenstockError as error:
        away.append(f"{name}: {error}")
        return None


async def _ledger(pool: Pool, away: list[str]) -> tuple[dict[str, Any], Generation | None]:
    """Read the parts one after another on one connection; each may fail alone."""
    report: dict[str, Any] = {}
    try:
        async with time_limit(2 * PART_SECONDS, "Postgres"):
            with translated("the pipeline's view"):
                async with pool.connection() as connection:
                    generation = await generations.active(connection)
                    now = await _now(connection)
                    for name, query in (
                        ("pending", lambda: ledger.pending(connection, generation)),
                        ("dead_letters", lambda: ledger.dead_letters(connection)),
                        ("divergence", lambda: ledger.divergence(connection)),
                        ("connectors", lambda: connectors(connection)),
                        ("holdings", lambda: ledger.holdings(connection, generation)),
                        ("freshness", lambda: freshness(connection, generation, now)),
                    ):
                        part = await _bounded(connection, away, name, query)
                        if part is not None:
                            report[name] = part
                    return report, generation
    except PenstockError as error:
        away.append(f"the ledger: {error}")
        return report, None


async def _bounded(
    connection: Connection, away: list[str], name: str, query: Callable[[], Awaitable[Any]]
) -> Any | None:
    """Run a query in a transaction of its own, with a time limit in the server."""
    try:
        with translated(name.replace("_", " ")):
            async with connection.transaction():
                await connection.execute(
                    "SELECT set_config('statement_timeout', %s, true)", [f"{round(PART_SECONDS * 1000)}ms"]
                )
                return await query()
    except PenstockError as error:
        if connection.closed:
            raise
        away.append(str(error))
        return None


async def _now(connection: Connection) -> datetime:
    cursor = await connection.execute("SELECT clock_timestamp()")
    row = await cursor.fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


async def _entries(es: AsyncElasticsearch, generation: Generation) -> int:
    with elasticsearch.translated("counting"):
        client = es.options(request_timeout=PART_SECONDS, max_retries=0, retry_on_timeout=False)
        # Counting all entries is free; the canaries are few.
        total, canaries = await asyncio.gather(
            client.count(index=generation.keyword_index),
            client.count(index=generation.keyword_index, query={"prefix": {"source": MARK}}),
        )
        return int(total["count"]) - int(canaries["count"])


async def kafka_lag(settings: Settings) -> dict[str, Any]:
    """Records that the workers have yet to read, by consumer group and topic. Raises Retryable, Misconfigured."""
    progress = await read_progress(settings.kafka, {stage.name: stage.topics for stage in WATCHED})
    by_group = [
        {"group": stage, "topic": topic.name, "records": progress.lag(stage, topic.name)}
        for stage, topics in progress.stages.items()
        for topic in topics.values()
    ]
    return {"records": sum(entry["records"] for entry in by_group), "groups": by_group}
