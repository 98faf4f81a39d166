"""Gauges of the whole system for Prometheus: pending documents, consumer lag, dead letters, the age of each source.

One detect worker at a time exports them. It reads the ledger and Kafka and not the workers, so that a worker that has
stopped shows as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from time import monotonic
from typing import Any, TypeVar, get_args

import structlog
from prometheus_client import Gauge

from pipeline.core.canary import is_canary
from pipeline.core.errors import Fenced, PenstockError, Retryable
from pipeline.core.model import STORES, Lane
from pipeline.diagnosis.lag import Logs, Offsets, StageTopics, read_progress
from pipeline.ledger import skipped
from pipeline.observability.labels import Labelled
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import KafkaSettings
from pipeline.stores.leader import leading
from pipeline.stores.postgres import VITALS_LOCK, Connection, Pool, translated
from topics.registry import INDEX_BACKFILL, INDEX_LIVE

log = structlog.get_logger()
T = TypeVar("T")

FINISH_SECONDS = 2.0
MAX_POSTGRES_SHARE = 0.05
"""Largest part of Postgres's time that the queries take: with millions of documents pending they take seconds, and so
run less often."""
WRITING_THE_LEDGER = frozenset({"detect", "identities"})
"""Stages whose progress connectors compare with what they have published (connectors/runner/reconcile.py)."""
MAX_COUNTED_DEAD_LETTERS = 100_000

SINK_TOPICS: StageTopics = {
    stage: {"live": INDEX_LIVE, "backfill": INDEX_BACKFILL} for stage in ("vectors", "keywords")
}
"""The topics of the stages that run in other workers."""

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
"""Letters older than a week do not count: some are never replayed, because the source has sent the document again."""
_SOURCES = """
    SELECT DISTINCT ON (source) source, max(silent) OVER (PARTITION BY source), access, every,
        max(certificate) OVER (PARTITION BY source) FROM (
        SELECT source, coalesce(access_every_seconds, 600) AS every,
            extract(epoch FROM clock_timestamp() - coalesce(seen_at,
                (SELECT max((done->>'succeeded_at')::timestamptz) FROM jsonb_each(activities) one (name, done))
            )) AS silent,
            extract(epoch FROM clock_timestamp()
                - least((activities->'sweep'->>'succeeded_at')::timestamptz,
                        (activities->'groups'->>'succeeded_at')::timestamptz)) AS access,
            (SELECT extract(epoch FROM clock_timestamp() - f.complete_until) FROM connector_freshness f
                WHERE f.tenant = c.tenant AND f.source = c.source) AS certificate
        FROM connectors c WHERE NOT paused AND removed_at IS NULL
    ) one ORDER BY source, access / every DESC NULLS LAST
"""
"""Paused and removed connectors are left out: they do not follow their source on purpose. Where two tenants have a
source of one name, the worse one counts. A worker that ends in good order removes its sign of life; it is then silent
since its last activity. least() ignores NULL."""


class Vitals:
    """Runs in every detect worker. A gauge is never older than one interval: while Postgres or Kafka is away, or
    another worker exports the gauges, it has no value rather than an old one."""

    def __init__(
        self,
        pool: Pool,
        kafka: KafkaSettings,
        stages: StageTopics,
        metrics: Metrics,
        *,
        every_seconds: float,
    ) -> None:
        """stages: the topics that each stage reads, by stage; its consumer group is ``penstock-NAME``."""
        self._pool = pool
        self._kafka = kafka
        self._stages = stages
        self._metrics = metrics
        self._every = every_seconds
        self._ends: dict[str, tuple[datetime, Offsets]] = {}
        """By stage, a moment and the end offsets of its partitions then; until the stage has committed them."""

    async def run(self) -> BaseException:
        """Export the gauges until cancelled; waits while Postgres or Kafka is away."""
        while True:
            is_outage = False
            try:
                await self._lead()
            except PenstockError as error:
                is_outage = isinstance(error, Retryable) and not isinstance(error, Fenced)
                log.warning("vitals_failed", reason=str(error)[:200])
            self._forget_ledger()
            self._metrics.lag.clear()
            self._metrics.outage.clear()  # a worker that does not export the lag does not read Kafka
            self._metrics.outage.labels(service="postgres").set(is_outage)
            await asyncio.sleep(self._every)

    async def _lead(self) -> None:
        """Export the gauges while this worker is the leader. Raises Retryable, Misconfigured."""
        with translated("vitals"):
            async with self._pool.connection() as connection, leading(connection, VITALS_LOCK) as is_leader:
                while is_leader:
                    took = await self.look(connection)
                    await asyncio.sleep(max(self._every, took / MAX_POSTGRES_SHARE))

    async def look(self, connection: Connection) -> float:
        """Set all gauges; returns the seconds that Postgres took. The lag has no value while Kafka is away. Raises
        Retryable, Misconfigured."""
        began = monotonic()
        async with connection.transaction():
            pending = await (await connection.execute(_PENDING)).fetchall()
            dead = await (await connection.execute(_DEAD, [MAX_COUNTED_DEAD_LETTERS])).fetchall()
            sources = await (await connection.execute(_SOURCES)).fetchall()
            unread = Counter[str]()
            for entry in await skipped.by_source(connection) or ():
                unread[entry["source"]] += entry["documents"]
        took = monotonic() - began
        self._metrics.outage.labels(service="postgres").set(0)
        self._forget_ledger()
        m = self._metrics
        waiting = {(store, lane): (0, 0.0) for store in STORES for lane in get_args(Lane)}
        oldest: dict[str, float] = {}
        for store, lane, source, count, age in pending:
            documents, longest = waiting[store, lane]
            waiting[store, lane] = documents + count, max(longest, age)
            if lane == "live" and not is_canary(source):
                oldest[source] = max(oldest.get(source, 0.0), age)
        for (store, lane), (documents, longest) in waiting.items():
            m.pending.labels(store=store, lane=lane).set(documents)
            m.oldest_pending.labels(store=store, lane=lane).set(longest)
        _set(m.source_pending, oldest.items())
        _set(m.waiting_dead_letters, [*((stage, 0.0) for stage in self._stages), *dead])
        _set(m.skipped_documents, unread.items())
        _set(m.seen_age, [(source, seen) for source, seen, *_ in sources])
        _set(m.access_age, [(source, access) for source, _, access, *_ in sources])
        _set(m.access_interval, [(source, every) for source, _, _, every, _ in sources])
        _set(m.certificate_age, [(source, age) for source, *_, age in sources])
        async with connection.transaction():
            [now] = await (await connection.execute("SELECT clock_timestamp()")).fetchone() or (None,)
        try:
            progress = await _undisturbed(read_progress(self._kafka, self._stages))
        except PenstockError as error:
            m.lag.clear()
            m.outage.labels(service="kafka").set(isinstance(error, Retryable))
            log.warning("lag_not_measured", reason=str(error)[:200])
            return took
        m.outage.labels(service="kafka").set(0)
        for stage in self._stages:
            for lane, records in progress.lag_by_lane(stage).items():
                m.lag.labels(stage=stage, lane=lane).set(records)
        await self._note_handled(connection, now, progress.logs, progress.committed)
        return took

    async def _note_handled(
        self, connection: Connection, now: datetime, logs: Logs, done: Mapping[str, Offsets]
    ) -> None:
        """Record up to which moment all messages have been handled. now: a moment before the offsets were read."""
        handled = {}
        for stage in WRITING_THE_LEDGER & self._stages.keys():
            names = {topic.name for topic in self._stages[stage].values()}
            mine = {partition: log for partition, log in logs.items() if partition[0] in names}
            moment, ends = self._ends.setdefault(stage, (now, {partition: log.end for partition, log in mine.items()}))
            remaining = [
                log.behind(done[stage].get(partition)) - max(0, log.end - ends.get(partition, 0))
                for partition, log in mine.items()
            ]
            if max(remaining, default=0) <= 0:
                handled[stage] = moment
                del self._ends[stage]
        if handled:
            async with connection.transaction():
                await connection.cursor().executemany(
                    "INSERT INTO handled VALUES (%s, %s) ON CONFLICT (stage) DO UPDATE SET until = EXCLUDED.until",
                    sorted(handled.items()),
                )

    def _forget_ledger(self) -> None:
        m = self._metrics
        for gauge in (
            m.pending,
            m.oldest_pending,
            m.source_pending,
            m.waiting_dead_letters,
            m.skipped_documents,
            m.seen_age,
            m.access_age,
            m.access_interval,
            m.certificate_age,
        ):
            gauge.clear()


async def _undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Await the work; when cancelled, give it FINISH_SECONDS to end: aiokafka leaves its socket open when it is
    cancelled while it connects."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=FINISH_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _set(gauge: Labelled[[str], Gauge], values: Iterable[tuple[str, float | None]]) -> None:
    for label, value in values:
        if value is not None:
            gauge.labels(label).set(max(0.0, float(value)))
