"""How the whole system is, for Prometheus: what waits, how far the stages are behind, what is known of the sources.

One detect worker shows it at a time. It reads from the ledger and from Kafka, not from the processes concerned, so that
a worker that has stopped shows as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

import structlog
from prometheus_client import Gauge

from pipeline.core.canary import is_canary
from pipeline.core.errors import PenstockError, Retryable
from pipeline.core.model import Lane
from pipeline.kafka import security
from pipeline.ledger import skipped
from pipeline.settings import KafkaSettings
from pipeline.stores.postgres import VITALS_LOCK, Connection, Pool, translated
from pipeline.telemetry import Metrics
from topics.offsets import Groups, OffsetsUnavailable
from topics.offsets import lag as topic_lag
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

log = structlog.get_logger()
T = TypeVar("T")

FINISH_SECONDS = 2.0
SHARE = 0.05
"""Of Postgres's time: with millions of documents pending a look takes seconds, and so comes less often."""
COUNTED = 100_000
"""The gauge of dead letters goes no higher."""

SINK_TOPICS: Mapping[str, Mapping[Lane, Topic]] = {
    stage: {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL} for stage in ("vectors", "keywords")
}
"""What the stages of the other workers read."""

_PENDING = """
    SELECT s.store, d.lane, d.source, count(*), extract(epoch FROM clock_timestamp() - min(s.pending_since))::float8
    FROM index_state s JOIN documents d ON d.id = s.document_id
    WHERE s.seq < s.want_seq AND s.generation IN (SELECT name FROM generations WHERE state <> 'retired')
    GROUP BY s.store, d.lane, d.source
"""
_DEAD = """
    SELECT stage, count(*) FROM (SELECT stage FROM dead_letters
        WHERE replayed_at IS NULL AND dismissed_at IS NULL AND at > now() - interval '7 days' LIMIT %s) waiting
    GROUP BY stage
"""
"""Some letters are let be for good (the source has sent the document again): after a week nobody is told any more."""
_SOURCES = """
    SELECT source, max(extract(epoch FROM clock_timestamp() - coalesce(seen_at,
            (SELECT max((done->>'succeeded_at')::timestamptz) FROM jsonb_each(activities) one (name, done))
        ))) FILTER (WHERE NOT paused),
        max(extract(epoch FROM clock_timestamp()
            - least((activities->'sweep'->>'succeeded_at')::timestamptz,
                    (activities->'groups'->>'succeeded_at')::timestamptz)))
    FROM connectors GROUP BY source
"""
"""Of two tenants' sources with one name the worse one shows. least() passes over what is NULL. A worker that ends in
good order takes its sign of life back: then it is silent since the last thing that it did."""


class Vitals:
    """Runs in every detect worker. Law: a number that is shown is at most a look old; while nothing can be learned
    (Postgres or Kafka is away, or another worker shows it) there is none, rather than an old one."""

    def __init__(
        self,
        pool: Pool,
        kafka: KafkaSettings,
        stages: Mapping[str, Mapping[Lane, Topic]],
        metrics: Metrics,
        *,
        every_seconds: float,
    ) -> None:
        """stages: by name, the topics that each reads; its consumer group is ``penstock-NAME``."""
        self._pool = pool
        self._kafka = kafka
        self._stages = stages
        self._metrics = metrics
        self._every = every_seconds

    async def run(self) -> BaseException:
        """Look until cancelled; a world that is down is waited for."""
        while True:
            try:
                await self._lead()
            except PenstockError as error:
                log.warning("vitals_failed", reason=str(error)[:200])
            self._forget_ledger()
            self._metrics.lag.clear()
            await asyncio.sleep(self._every)

    async def _lead(self) -> None:
        """Show it for as long as this worker is the one; returns when another is. Raises Retryable, Misconfigured."""
        with translated("vitals"):
            async with self._pool.connection() as connection:
                async with connection.transaction():
                    cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [VITALS_LOCK])
                    row = await cursor.fetchone()
                if not (row and row[0]):
                    return
                try:
                    while True:
                        took = await self.look(connection)
                        await asyncio.sleep(max(self._every, took / SHARE))
                finally:
                    if not connection.closed and not connection.broken:
                        await connection.rollback()
                        await connection.execute("SELECT pg_advisory_unlock(%s)", [VITALS_LOCK])
                        await connection.commit()

    async def look(self, connection: Connection) -> float:
        """Set the gauges anew; returns the seconds that Postgres took. What Kafka cannot tell is absent. Raises
        Retryable, Misconfigured."""
        began = monotonic()
        async with connection.transaction():
            pending = await (await connection.execute(_PENDING)).fetchall()
            dead = await (await connection.execute(_DEAD, [COUNTED])).fetchall()
            sources = await (await connection.execute(_SOURCES)).fetchall()
            unread = Counter[str]()
            for one in await skipped.by_source(connection) or ():
                unread[one["source"]] += one["documents"]
        took = monotonic() - began
        self._forget_ledger()
        m = self._metrics
        waiting = {(store, lane): (0, 0.0) for store in ("vectors", "keywords") for lane in ("live", "backfill")}
        oldest: dict[str, float] = {}
        for store, lane, source, count, age in pending:
            documents, longest = waiting[store, lane]
            waiting[store, lane] = documents + count, max(longest, age)
            if lane == "live" and not is_canary(source):
                oldest[source] = max(oldest.get(source, 0.0), age)
        for (store, lane), (documents, longest) in waiting.items():
            m.pending.labels(store, lane).set(documents)
            m.oldest_pending.labels(store, lane).set(longest)
        _set(m.source_pending, oldest.items())
        _set(m.waiting_dead_letters, [*((stage, 0.0) for stage in self._stages), *dead])
        _set(m.skipped_documents, unread.items())
        _set(m.seen_age, [(source, seen) for source, seen, _ in sources])
        _set(m.access_age, [(source, access) for source, _, access in sources])
        try:
            behind = await _undisturbed(lag(self._kafka, self._stages))
        except Retryable as error:
            m.lag.clear()
            log.warning("lag_unknown", reason=str(error)[:200])
            return took
        for (stage, lane), records in behind.items():
            m.lag.labels(stage, lane).set(records)
        return took

    def _forget_ledger(self) -> None:
        m = self._metrics
        for gauge in (
            m.pending, m.oldest_pending, m.source_pending, m.waiting_dead_letters, m.skipped_documents, m.seen_age,
            m.access_age,
        ):  # fmt: skip
            gauge.clear()


async def _undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """The outcome; when cancelled, only after a moment to finish: aiokafka leaves its socket open when it is cancelled
    while it connects."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=FINISH_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _set(gauge: Gauge, values: Iterable[tuple[str, float | None]]) -> None:
    for label, value in values:
        if value is not None:
            gauge.labels(label).set(max(0.0, float(value)))


async def lag(kafka: KafkaSettings, stages: Mapping[str, Mapping[Lane, Topic]]) -> dict[tuple[str, Lane], int]:
    """(stage, lane) → records from its group's committed offsets to the end; what it never committed counts from the
    oldest record that is kept. Raises Retryable."""
    wanted = {topic.name for topics in stages.values() for topic in topics.values()}
    found: dict[tuple[str, Lane], int] = {}
    try:
        async with Groups(kafka.bootstrap, kafka.topic_prefix, security(kafka)) as groups:
            logs = await groups.logs(wanted, datetime.now(UTC))
            for stage, topics in stages.items():
                done = await groups.committed(f"penstock-{stage}")
                for lane, topic in topics.items():
                    found[stage, lane] = topic_lag(logs, done, topic.name)
    except OffsetsUnavailable as error:
        raise Retryable(str(error), service="kafka") from error
    return found
