"""The Pipeline tab's data: for those who operate the service. Half a world is shown as half a world.

Every part has its own short time; one that is away is absent and named in ``away``, and the others are there. What was
seen is shared for a moment, so that many open tabs ask as much as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

from elasticsearch import AsyncElasticsearch

from pipeline.core.canary import MARK
from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.groups import group, groups, kafka_translated
from pipeline.ledger import generations
from pipeline.settings import Settings
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores import elasticsearch
from pipeline.stores.postgres import Connection, Pool, translated
from query import pipeline_parts as parts
from query.embedder import bounded
from topics.offsets import lag

T = TypeVar("T")

PART_SECONDS = 3.0
SHARED_SECONDS = 3.0
KAFKA_SHARED_SECONDS = 15.0
"""Asking every partition where it ends costs a connection."""
WATCHED = (Detect, VectorSink, KeywordSink)
"""The consumers whose lag says how far behind the stores are."""


class PipelineView:
    """What was seen a moment ago is seen again. One a service; safe to share between tasks."""

    def __init__(self, pool: Pool, es: AsyncElasticsearch, settings: Settings) -> None:
        self._pool = pool
        self._es = es
        self._settings = settings
        self._lock = asyncio.Lock()
        self._seen: tuple[float, dict[str, Any]] | None = None
        self._lag: tuple[float, dict[str, Any]] | None = None

    async def look(self) -> dict[str, Any]:
        """Never raises because a server is away: that is what it tells."""
        async with self._lock:
            if self._seen is None or monotonic() - self._seen[0] > SHARED_SECONDS:
                found = await pipeline_view(self._pool, self._es, self._settings, lag=self._recent_lag)
                self._seen = (monotonic(), found)
            return self._seen[1]

    async def _recent_lag(self) -> dict[str, Any]:
        if self._lag is None or monotonic() - self._lag[0] > KAFKA_SHARED_SECONDS:
            found = await kafka_lag(self._settings)
            self._lag = (monotonic(), found)
        return self._lag[1]


async def pipeline_view(
    pool: Pool,
    es: AsyncElasticsearch,
    settings: Settings,
    *,
    lag: Callable[[], Awaitable[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Everything at once, in about PART_SECONDS at most a server. A part that cannot be told is None.

    {at, generation, freshness, pending, lag, dead_letters, divergence, connectors, stores, away}: see docs/page.md.
    """
    away: list[str] = []
    (told, generation), consumers = await asyncio.gather(
        _ledger(pool, away), _part(away, "Kafka", (lag or (lambda: kafka_lag(settings)))())
    )
    entries = None
    if generation is not None:
        entries = await _part(away, "Elasticsearch", _entries(es, generation))
    stores = [
        _store("Postgres", generation is not None, told.pop("holdings", None)),
        # Which index to ask is known from the ledger alone.
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
        **{name: told.get(name) for name in ("freshness", "pending", "dead_letters", "divergence", "connectors")},
        "lag": consumers,
        "stores": stores,
        "away": away,
    }


def _store(name: str, up: bool | None, holds: str | None) -> dict[str, Any]:
    """up None: not known."""
    return {"name": name, "up": up, "holds": holds}


async def _part(away: list[str], what: str, work: Awaitable[T]) -> T | None:
    try:
        async with bounded(PART_SECONDS, what):
            return await work
    except PenstockError as error:
        away.append(f"{what}: {error}")
        return None


async def _ledger(pool: Pool, away: list[str]) -> tuple[dict[str, Any], Generation | None]:
    """On one connection, one part after another; each may fail alone."""
    told: dict[str, Any] = {}
    try:
        async with bounded(2 * PART_SECONDS, "Postgres"):
            with translated("the pipeline's view"):
                async with pool.connection() as connection:
                    generation = await generations.active(connection)
                    now = await _now(connection)
                    for name, ask in (
                        ("pending", lambda: parts.pending(connection, generation)),
                        ("dead_letters", lambda: parts.dead_letters(connection)),
                        ("divergence", lambda: parts.divergence(connection)),
                        ("connectors", lambda: parts.connectors(connection)),
                        ("holdings", lambda: parts.holdings(connection, generation)),
                        ("freshness", lambda: parts.freshness(connection, generation, now)),
                    ):
                        found = await _asked(connection, away, name, ask)
                        if found is not None:
                            told[name] = found
                    return told, generation
    except PenstockError as error:
        away.append(f"the ledger: {error}")
        return told, None


async def _asked(connection: Connection, away: list[str], name: str, ask: Callable[[], Awaitable[Any]]) -> Any | None:
    """In a transaction of its own, which the server ends when it takes too long."""
    try:
        with translated(name.replace("_", " ")):
            async with connection.transaction():
                await connection.execute(
                    "SELECT set_config('statement_timeout', %s, true)", [f"{round(PART_SECONDS * 1000)}ms"]
                )
                return await ask()
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
        # The few of the canaries are counted, and not all the others: that the index knows without looking.
        everything, ours = await asyncio.gather(
            client.count(index=generation.keyword_index),
            client.count(index=generation.keyword_index, query={"prefix": {"source": MARK}}),
        )
        return int(everything["count"]) - int(ours["count"])


async def kafka_lag(settings: Settings) -> dict[str, Any]:
    """Records that the workers have yet to take, by consumer group and topic. Raises Retryable."""
    async with groups(settings.kafka) as kafka:
        with kafka_translated():
            topics = {topic.name for stage in WATCHED for topic in stage.topics.values()}
            logs = await kafka.logs(sorted(topics), datetime.now(UTC))
            found = []
            for stage in WATCHED:
                at = await kafka.committed(group(stage.name))
                for topic in stage.topics.values():
                    records = lag(logs, at, topic.name)
                    found.append({"group": stage.name, "topic": topic.name, "records": records})
    return {"records": _sum(found), "groups": found}


def _sum(found: Sequence[dict[str, Any]]) -> int:
    return sum(one["records"] for one in found)
