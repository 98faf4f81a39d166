"""Dead letters: the record byte for byte on dead-letters.v1 under Kafka Connect's header names, listed in a table."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from pipeline import tracing
from pipeline.core.errors import Deferred, Poison, Retryable
from pipeline.core.flood import Flood
from pipeline.kafka import store
from pipeline.ledger import letters
from pipeline.stages.stage import Incoming, used
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics
from pipeline.traced.records import of
from topics.letters import Failure, RawRecord, letter_id, read_replay, seal
from topics.producer import Producer, Stored
from topics.registry import DEAD_LETTERS

log = structlog.get_logger()

REMEMBERED = 5_000
"""Letters known to be on the topic: a batch that is tried again does not send them again."""


@dataclass(slots=True)
class _Sent:
    failure: Failure
    stored: Stored
    listed: bool = False


class DeadLetters:
    """Law: after ``bury`` returns, the record is on the dead letter topic, and listed; repeats are listed once, and not
    sent twice by one process. Beyond ``per_minute`` letters nothing is buried: intake stands still (core/flood.py)."""

    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        metrics: Metrics,
        *,
        per_minute: int = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._producer = producer
        self._metrics = metrics
        self._clock = clock
        self._flood = Flood(per_minute)
        self._per_minute = per_minute
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        metrics.dead_letter_pause.set_function(lambda: self._flood.pause(clock()))

    async def bury(self, record: Incoming, *, stage: str, error: Exception) -> None:
        """Raises Retryable when Kafka or Postgres cannot be reached, and (Deferred) when there are too many letters.

        What Kafka did not take is given back: one partition can be without a leader while the others go on, and what
        the ledger has accepted already only waits for its hint.
        """
        if isinstance(error, Retryable) and error.service == "kafka":
            raise error
        code = error.code if isinstance(error, Poison) else "bug"
        about = {"penstock.stage": stage, "penstock.dead_letter.code": code}
        with tracing.begin("dead letter", "producer", parent=of(record), attributes=about):
            await self._bury(record, stage, code, error)

    async def _bury(self, record: Incoming, stage: str, code: str, error: Exception) -> None:
        own, replay = read_replay(record.headers)
        whole = RawRecord(record.key, record.value, own)
        sent = self._sent.get(letter_id(record.topic, record.partition, record.offset))
        if sent is None:
            now = datetime.now(UTC)
            failure = Failure(
                record.topic, record.partition, record.offset, stage, code,
                str(error) if isinstance(error, Poison) else f"{type(error).__name__} in {stage}",
                attempt=replay.attempt + 1 if replay else 1,
                failed_at=now,
                first_failed_at=replay.first_failed_at if replay else now,
                replay_of=replay.letter if replay else None,
            )  # fmt: skip
            self._admit(failure.id)
            sealed = seal(whole, failure)
            stored = await store(self._producer.send_raw(DEAD_LETTERS, sealed.key, sealed.value, sealed.headers))
            sent = self._sent[failure.id] = _Sent(failure, stored)
            while len(self._sent) > REMEMBERED:
                self._sent.popitem(last=False)
            used("dead-letters")
            used("kafka")
        if sent.listed:
            return
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                await letters.insert(connection, sent.failure, whole.key, whole.value_bytes, sent.stored)
        sent.listed = True
        self._metrics.dead_letters.labels(stage, sent.failure.code).inc()
        log.warning(
            "dead_letter", stage=stage, code=sent.failure.code, topic=record.topic, partition=record.partition,
            offset=record.offset, bytes=whole.value_bytes, attempt=sent.failure.attempt,
        )  # fmt: skip

    def _admit(self, letter: str) -> None:
        refusal = self._flood.admit(letter, self._clock())
        if refusal is None:
            return
        if refusal.new:
            self._metrics.dead_letter_floods.inc()
            log.error("dead_letter_flood", per_minute=self._per_minute, pause_seconds=refusal.seconds,
                      in_a_row=refusal.trips)  # fmt: skip
        raise Deferred(
            f"more than {self._per_minute} dead letters in a minute: intake waits {refusal.seconds:.0f} s. Look at"
            " `penstock dead list`; what is mended goes on at a restart (PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE)",
            retry_after=refusal.seconds,
            service="dead-letters",
        )
