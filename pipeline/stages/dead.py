"""Dead letters: the record byte for byte on dead-letters.v1 under Kafka Connect's header names, listed in a table."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from pipeline.core.errors import Poison, Retryable
from pipeline.core.flood import Flood, Refusal
from pipeline.core.identity import source_of
from pipeline.core.producers import Unauthorised
from pipeline.kafka.client import certain
from pipeline.kafka.producer import Delivery, NotDelivered, Producer, Stored
from pipeline.ledger import letters
from pipeline.observability import tracing
from pipeline.observability.metrics import Metrics
from pipeline.observability.traced_records import of
from pipeline.stages.stage import Flooded, Incoming, used
from pipeline.stores.postgres import Pool, translated
from topics.letters import Failure, RawRecord, letter_id, read_replay, seal
from topics.registry import DEAD_LETTERS

log = structlog.get_logger()

REMEMBERED = 5_000
"""Letters known to be on the topic: a batch that is tried again does not send them again."""
LOOK_AGAIN_SECONDS = 5.0
"""During a pause: it ends early when it turns out that the fault is one source's alone."""


@dataclass(slots=True)
class _Sent:
    failure: Failure
    key: bytes | None
    value_bytes: int | None
    stored: Stored


class DeadLetters:
    """Law: after ``bury_all`` returns, the records are on the dead letter topic, and listed; repeats are listed once,
    and not sent twice by one process. Beyond ``per_minute`` letters of a stage nothing is buried, unless the fault is
    confined to some sources (core/flood.py)."""

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
        self._floods: defaultdict[str, Flood] = defaultdict(lambda: Flood(per_minute))
        """By stage: people who talk say nothing of whether documents get through."""
        self._per_minute = per_minute
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._unlisted: dict[str, _Sent] = {}
        self._listing = asyncio.Lock()
        metrics.dead_letter_pause.set_function(
            lambda: max((flood.pause(clock()) for flood in self._floods.values()), default=0.0)
        )

    def passed(self, records: Iterable[Incoming], *, stage: str) -> None:
        """Say that a stage has accepted valid records: then a failure of others there is not everybody's."""
        for source, count in Counter(source_of(record.key) for record in records).items():
            self._floods[stage].passed(source, count, self._clock())

    async def bury(self, record: Incoming, *, stage: str, error: Exception) -> None:
        """``bury_all`` of one record."""
        await self.bury_all([(record, error)], stage=stage)

    async def bury_all(self, poison: Sequence[tuple[Incoming, Exception]], *, stage: str) -> None:
        """Send and list the letters of some records: one wait for Kafka and one transaction for all of them. Raises
        Retryable when Kafka or Postgres cannot be reached, and Flooded when there are too many letters.

        What Kafka did not take is given back: one partition can be without a leader while the others go on, and what
        the ledger has accepted already only waits for its hint.
        """
        for _, error in poison:
            if isinstance(error, Retryable) and error.service == "kafka":
                raise error
        refused, refusal = await self._send(poison, stage)
        await self._list([record for record, _ in poison])
        if refusal is not None:
            raise Flooded(
                f"more than {self._per_minute} dead letters in a minute: the next ones wait {refusal.seconds:.0f} s."
                " Look at `penstock dead list`; what is mended goes on at a restart"
                " (PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE)",
                refused,
                retry_after=min(refusal.seconds, LOOK_AGAIN_SECONDS),
            )

    async def _send(
        self, poison: Sequence[tuple[Incoming, Exception]], stage: str
    ) -> tuple[list[Incoming], Refusal | None]:
        """Returns the records for which there were too many letters already, and for how long that holds."""
        refused: list[Incoming] = []
        refusal: Refusal | None = None
        sending: list[tuple[Failure, RawRecord, Delivery]] = []
        async with certain():
            for record, error in poison:
                id_ = letter_id(record.topic, record.partition, record.offset)
                if id_ in self._sent:
                    continue
                own, replay = read_replay(record.headers)
                whole = RawRecord(record.key, record.value, own)
                forged = isinstance(error, Unauthorised)  # it says nothing of the source that it names, and never waits
                if not (forged or whole.too_large) and (no := self._refusal(id_, record, stage)) is not None:
                    refusal = no
                    refused.append(record)
                    continue
                code = error.code if isinstance(error, Poison) else "bug"
                now = datetime.now(UTC)
                failure = Failure(
                    record.topic,
                    record.partition,
                    record.offset,
                    stage,
                    code,
                    str(error) if isinstance(error, Poison) else f"{type(error).__name__} in {stage}",
                    attempt=replay.attempt + 1 if replay else 1,
                    failed_at=now,
                    first_failed_at=replay.first_failed_at if replay else now,
                    replay_of=replay.letter if replay else None,
                )
                about = {"penstock.stage": stage, "penstock.dead_letter.code": code}
                with tracing.begin("dead letter", "producer", parent=of(record), attributes=about):
                    sealed = seal(whole, failure)
                    delivery = await self._producer.send_raw(DEAD_LETTERS, sealed.key, sealed.value, sealed.headers)
                sending.append((failure, whole, delivery))
            await self._stored(sending)
        return refused, refusal

    async def _stored(self, sending: Sequence[tuple[Failure, RawRecord, Delivery]]) -> None:
        """Wait for Kafka. Raises the first NotDelivered, after all have an end: what is stored is not sent again."""
        failed: NotDelivered | None = None
        for failure, whole, delivery in sending:
            try:
                stored = await asyncio.shield(delivery)
            except NotDelivered as error:
                failed = failed or error
            else:
                self._sent[failure.id] = self._unlisted[failure.id] = _Sent(
                    failure, whole.key, whole.value_bytes, stored
                )
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        if sending and failed is None:
            used("dead-letters")
            used("kafka")
        if failed is not None:
            raise failed

    async def _list(self, records: Sequence[Incoming]) -> None:
        """One transaction at a time, with whatever waits for one: several lanes' letters together."""
        ids = {letter_id(record.topic, record.partition, record.offset) for record in records}
        async with self._listing:
            waiting = dict(self._unlisted) if ids & self._unlisted.keys() else {}
            try:
                await self._insert(waiting)
            except Poison:  # Postgres refuses one of them: perhaps another lane's
                waiting = {id_: letter for id_, letter in waiting.items() if id_ in ids}
                await self._insert(waiting)
        by_cause: dict[tuple[str, str, bytes], list[_Sent]] = {}
        for letter in waiting.values():
            self._metrics.dead_letters.labels(stage=letter.failure.stage, reason=letter.failure.code).inc()
            cause = letter.failure.stage, letter.failure.code, source_of(letter.key)
            by_cause.setdefault(cause, []).append(letter)
        for (stage, code, _), alike in by_cause.items():  # of a flood not a line each
            first = alike[0]
            log.warning(
                "record_dead_lettered",
                stage=stage,
                code=code,
                count=len(alike),
                topic=first.failure.topic,
                partition=first.failure.partition,
                offset=first.failure.offset,
                bytes=first.value_bytes,
                attempt=first.failure.attempt,
            )

    async def _insert(self, sent: Mapping[str, _Sent]) -> None:
        if not sent:
            return
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                rows = [(letter.failure, letter.key, letter.value_bytes, letter.stored) for letter in sent.values()]
                await letters.insert(connection, rows)
        for id_ in sent:
            del self._unlisted[id_]

    def _refusal(self, letter: str, record: Incoming, stage: str) -> Refusal | None:
        refusal = self._floods[stage].admit(letter, source_of(record.key), self._clock())
        if refusal is not None and refusal.new:
            self._metrics.dead_letter_floods.inc()
            log.error(
                "dead_letter_flood", per_minute=self._per_minute, pause_seconds=refusal.seconds, in_a_row=refusal.trips
            )
        return refusal
