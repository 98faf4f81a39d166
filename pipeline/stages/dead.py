"""Dead letters: copies of poison records on the topic dead-letters.v1, byte for byte and with Kafka Connect's header
names, listed in a table of the ledger."""

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

MAX_REMEMBERED_LETTERS = 5_000
"""The latest letters that this process has stored on the topic, which a batch that is tried again need not send."""
MAX_UNAUTHORISED_PER_MINUTE = 1_000
"""So many records of a stage that no producer in force has signed are copied to letters: whoever may write a topic
packs very many of them into a small batch. Beyond that, one letter stands for those of a batch and a partition."""
MAX_RETRY_SECONDS = 5.0
"""Refused records are tried again at least this often during a pause, because it ends early when the fault turns out to
be confined to some sources."""


@dataclass(slots=True)
class _StoredLetter:
    """A letter that Kafka has stored."""

    failure: Failure
    key: bytes | None
    value_bytes: int | None
    stored: Stored


@dataclass(slots=True)
class _Sending:
    """A letter that is being sent."""

    failure: Failure
    record: RawRecord
    delivery: Delivery
    others: Sequence[str]
    """The ids of the other records that the letter stands for."""


class DeadLetters:
    """Sends poison records to the dead-letter topic, and lists them in the ledger.

    Law: after ``add_all`` returns, the records are on the topic and listed. A record that is added again is listed
    once, and one process does not send it twice. At most ``per_minute`` letters of a stage are sent in a minute, unless
    the fault is confined to some sources (``pipeline.core.flood`` decides that). Of the records that nobody in
    force has signed, MAX_UNAUTHORISED_PER_MINUTE are copied; a letter with their offsets stands for the others.
    """

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
        """By stage: accepted conversations are no evidence that documents can be accepted."""
        self._per_minute = per_minute
        self._sent: OrderedDict[str, _StoredLetter] = OrderedDict()
        """The letters that were sent, by id, oldest first."""
        self._unlisted: dict[str, _StoredLetter] = {}
        """Those of them that are not listed in the ledger yet."""
        self._listing = asyncio.Lock()
        self._unauthorised: Counter[str] = Counter()
        """By stage: the records that nobody in force has signed, in this minute."""
        self._minute = 0.0
        metrics.show_pause(self._pause)

    def _pause(self) -> float:
        """The seconds for which bad records wait."""
        return max((flood.pause(self._clock()) for flood in self._floods.values()), default=0.0)

    def count_accepted(self, records: Iterable[Incoming], *, stage: str) -> None:
        """Count valid records that a stage has accepted: evidence that not every source's records fail there."""
        for source, count in Counter(source_of(record.key) for record in records).items():
            self._floods[stage].count_accepted(source, count, self._clock())

    async def add(self, record: Incoming, *, stage: str, error: Exception) -> None:
        """Send and list the letter of one record; see ``add_all``."""
        await self.add_all([(record, error)], stage=stage)

    async def add_all(self, poison: Sequence[tuple[Incoming, Exception]], *, stage: str) -> None:
        """Send and list the letters of some records, with one wait for Kafka and one transaction for all of them.

        Raises Retryable when Kafka or Postgres cannot be reached, and Flooded with the records that exceed the limit;
        the others were added. A record whose error is a Retryable of Kafka is not poison, and no letter is written: the
        error is raised again. (One partition may lack a leader while the others work.)
        """
        for _, error in poison:
            if isinstance(error, Retryable) and error.service == "kafka":
                raise error
        refused, refusal = await self._send(poison, stage)
        await self._list([record for record, _ in poison])
        if refusal is not None:
            raise Flooded(
                f"more than {self._per_minute} dead letters in a minute: the next ones wait {refusal.seconds:.0f} s."
                " Look at `penstock dead list`; once the cause is fixed, a restart continues"
                " (PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE)",
                refused,
                retry_after=min(refusal.seconds, MAX_RETRY_SECONDS),
            )

    async def _send(
        self, poison: Sequence[tuple[Incoming, Exception]], stage: str
    ) -> tuple[list[Incoming], Refusal | None]:
        """Send the letters of these records and wait until Kafka has stored them. Returns the records that the limit
        refused, and how long it refuses them."""
        refused: list[Incoming] = []
        refusal: Refusal | None = None
        sending: list[_Sending] = []
        excess: defaultdict[tuple[str, int], list[tuple[Incoming, Exception]]] = defaultdict(list)
        async with certain():
            for record, error in poison:
                id_ = letter_id(record.topic, record.partition, record.offset)
                if id_ in self._sent:
                    continue
                if isinstance(error, Unauthorised):  # no evidence about the source it names: no pause
                    if not self._is_copied(stage):
                        excess[record.topic, record.partition].append((record, error))
                        continue
                elif not _raw(record).too_large and (no := self._refusal(id_, record, stage)) is not None:
                    refusal = no
                    refused.append(record)
                    continue
                sending.append(await self._begin(record, error, stage))
            for alike in excess.values():
                sending.append(await self._begin(*alike[-1], stage, [record for record, _ in alike[:-1]]))
            await self._stored(sending)
        return refused, refusal

    def _is_copied(self, stage: str) -> bool:
        """Whether a letter keeps a copy of another record that nobody in force has signed."""
        if (now := self._clock()) - self._minute >= 60:
            self._minute = now
            self._unauthorised.clear()
        self._unauthorised[stage] += 1
        return self._unauthorised[stage] <= MAX_UNAUTHORISED_PER_MINUTE

    async def _begin(self, record: Incoming, error: Exception, stage: str, others: Sequence[Incoming] = ()) -> _Sending:
        """Send the letter of a record. others: records before it on its partition that are not copied."""
        _, replay = read_replay(record.headers)
        whole, code, now = _raw(record), error.code if isinstance(error, Poison) else "bug", datetime.now(UTC)
        message = str(error) if isinstance(error, Poison) else f"{type(error).__name__} in {stage}"
        if others:
            message += (
                f"; {len(others)} more from offset {others[0].offset} on are not copied, because there are more than"
                f" {MAX_UNAUTHORISED_PER_MINUTE:,} in a minute: they stay in their topic for as long as it keeps them"
            )
        failure = Failure(
            record.topic,
            record.partition,
            record.offset,
            stage,
            code,
            message,
            attempt=replay.attempt + 1 if replay else 1,
            failed_at=now,
            first_failed_at=replay.first_failed_at if replay else now,
            replay_of=replay.letter if replay else None,
        )
        about = {"penstock.stage": stage, "penstock.dead_letter.code": code}
        with tracing.begin("dead letter", "producer", parent=of(record), attributes=about):
            sealed = seal(whole, failure)
            delivery = await self._producer.send_raw(DEAD_LETTERS, sealed.key, sealed.value, sealed.headers)
        ids = [letter_id(other.topic, other.partition, other.offset) for other in others]
        return _Sending(failure, whole, delivery, ids)

    async def _stored(self, sending: Sequence[_Sending]) -> None:
        """Wait until Kafka has answered for every letter, and remember the stored ones. Raises the first NotDelivered,
        at the end, so that stored letters are not sent again."""
        failed: NotDelivered | None = None
        for letter in sending:
            try:
                stored = await asyncio.shield(letter.delivery)
            except NotDelivered as error:
                failed = failed or error
            else:
                done = _StoredLetter(letter.failure, letter.record.key, letter.record.value_bytes, stored)
                self._sent |= dict.fromkeys([*letter.others, letter.failure.id], done)
                self._unlisted[letter.failure.id] = done
        while len(self._sent) > MAX_REMEMBERED_LETTERS:
            self._sent.popitem(last=False)
        if sending and failed is None:
            used("dead-letters")
            used("kafka")
        if failed is not None:
            raise failed

    async def _list(self, records: Sequence[Incoming]) -> None:
        """List the letters of these records, together with those that other lanes have sent meanwhile. There is one
        transaction at a time."""
        ids = {letter_id(record.topic, record.partition, record.offset) for record in records}
        async with self._listing:
            waiting = dict(self._unlisted) if ids & self._unlisted.keys() else {}
            try:
                await self._insert(waiting)
            except Poison:  # Postgres refuses one of the letters, perhaps another lane's
                waiting = {id_: letter for id_, letter in waiting.items() if id_ in ids}
                await self._insert(waiting)
        by_cause: dict[tuple[str, str, bytes], list[_StoredLetter]] = {}
        for letter in waiting.values():
            self._metrics.dead_letters.labels(stage=letter.failure.stage, reason=letter.failure.code).inc()
            cause = letter.failure.stage, letter.failure.code, source_of(letter.key)
            by_cause.setdefault(cause, []).append(letter)
        for (stage, code, _), letters_alike in by_cause.items():  # one line for each cause, however many letters
            first = letters_alike[0]
            log.warning(
                "record_dead_lettered",
                stage=stage,
                code=code,
                count=len(letters_alike),
                topic=first.failure.topic,
                partition=first.failure.partition,
                offset=first.failure.offset,
                bytes=first.value_bytes,
                attempt=first.failure.attempt,
            )

    async def _insert(self, sent: Mapping[str, _StoredLetter]) -> None:
        if not sent:
            return
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                rows = [(letter.failure, letter.key, letter.value_bytes, letter.stored) for letter in sent.values()]
                await letters.insert(connection, rows)
        for id_ in sent:
            del self._unlisted[id_]

    def _refusal(self, letter: str, record: Incoming, stage: str) -> Refusal | None:
        """Ask the stage's limit for another letter; returns its refusal, or None when the letter may be sent."""
        refusal = self._floods[stage].admit(letter, source_of(record.key), self._clock())
        if refusal is not None and refusal.new:
            self._metrics.dead_letter_floods.inc()
            log.error(
                "dead_letter_flood", per_minute=self._per_minute, pause_seconds=refusal.seconds, in_a_row=refusal.trips
            )
        return refusal


def _raw(record: Incoming) -> RawRecord:
    """The record without the marks of a replay."""
    return RawRecord(record.key, record.value, read_replay(record.headers)[0])
