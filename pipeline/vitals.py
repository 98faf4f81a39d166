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
from topics.offsets import Groups, Log, OffsetsUnavailable, lag
from topics.registry import INDEX_BACKFILL, INDEX_LIVE, Topic

log = structlog.get_logger()
T = TypeVar("T")

FINISH_SECONDS = 2.0
SHARE = 0.05
"""Of Postgres's time: with millions of documents pending a look takes seconds, and so comes less often."""
WRITING_THE_LEDGER = frozenset({"detect", "identities"})
"""Stages whose progress connectors compare with what they have published (connectors/runner/reconcile.py)."""
Place = tuple[str, int]
"""Topic and partition."""
Logs = Mapping[Place, Log]
Done = Mapping[Place, int]
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
    SELECT DISTINCT ON (source) source, max(silent) OVER (PARTITION BY source), access, every FROM (
        SELECT source, coalesce(access_every_seconds, 600) AS every,
            extract(epoch FROM clock_timestamp() - coalesce(seen_at,
                (SELECT max((done->>'succeeded_at')::timestamptz) FROM jsonb_each(activities) one (name, done))
            )) AS silent,
            extract(epoch FROM clock_timestamp()
                - least((activities->'sweep'->>'succeeded_at')::timestamptz,
                        (activities->'groups'->>'succeeded_at')::timestamptz)) AS access
        FROM connectors WHERE NOT paused AND removed_at IS NULL
    ) one ORDER BY source, access / every DESC NULLS LAST
"""
"""Paused and removed connectors do not follow their source on purpose. Of two tenants' sources with one name the worse
one shows. least() passes over what is NULL. A worker that ends in good order takes its sign of life back: then it is
silent since the last thing that it did."""


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
        self._ends: dict[str, tuple[datetime, Mapping[Place, int]]] = {}
        """By stage: a moment, and where the partitions ended then; kept until the stage has come so far."""

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
        _set(m.seen_age, [(source, seen) for source, seen, _, _ in sources])
        _set(m.access_age, [(source, access) for source, _, access, _ in sources])
        _set(m.access_interval, [(source, every) for source, _, _, every in sources])
        async with connection.transaction():
            [now] = await (await connection.execute("SELECT clock_timestamp()")).fetchone() or (None,)
        try:
            logs, done = await _undisturbed(progress(self._kafka, self._stages))
        except Retryable as error:
            m.lag.clear()
            log.warning("lag_unknown", reason=str(error)[:200])
            return took
        for stage, topics in self._stages.items():
            for lane, topic in topics.items():
                m.lag.labels(stage, lane).set(lag(logs, done[stage], topic.name))
        await self._note_handled(connection, now, logs, done)
        return took

    async def _note_handled(self, connection: Connection, now: datetime, logs: Logs, done: Mapping[str, Done]) -> None:
        """Record up to which moment everything that was sent has been handled. now: before Kafka was asked."""
        handled = {}
        for stage in WRITING_THE_LEDGER & self._stages.keys():
            names = {topic.name for topic in self._stages[stage].values()}
            mine = {place: log for place, log in logs.items() if place[0] in names}
            moment, ends = self._ends.setdefault(stage, (now, {place: log.end for place, log in mine.items()}))
            left = [
                log.behind(done[stage].get(place)) - max(0, log.end - ends.get(place, 0)) for place, log in mine.items()
            ]
            if max(left, default=0) <= 0:
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
            m.pending, m.oldest_pending, m.source_pending, m.waiting_dead_letters, m.skipped_documents, m.seen_age,
            m.access_age, m.access_interval,
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


async def progress(kafka: KafkaSettings, stages: Mapping[str, Mapping[Lane, Topic]]) -> tuple[Logs, Mapping[str, Done]]:
    """The partitions that the stages read, and by stage what its group has committed of them. Raises Retryable."""
    wanted = {topic.name for topics in stages.values() for topic in topics.values()}
    try:
        async with Groups(kafka.bootstrap, kafka.topic_prefix, security(kafka)) as groups:
            logs = await groups.logs(wanted, datetime.now(UTC))
            return logs, {stage: await groups.committed(f"penstock-{stage}") for stage in stages}
    except OffsetsUnavailable as error:
        raise Retryable(str(error), service="kafka") from error
