"""Replay: dead letters back to the topics they came from, byte for byte. What is newer by then stays: events order
themselves by version and observed_at, however late they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from pipeline.core.errors import Poison, Retryable
from pipeline.kafka.producer import Delivery, DeliveryRefused, NotDelivered, Producer, Stored
from pipeline.kafka.reader import Reader
from pipeline.ledger import letters
from pipeline.ledger.letters import Letter
from pipeline.stages.admission import UNCHECKED, Unchecked
from pipeline.stages.identities import Tombstone, read_identity
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, translated
from topics.letters import Letter as Sealed
from topics.letters import NotALetter, RawRecord, Replay, mark_replay, unseal
from topics.registry import (
    CONVERSATIONS,
    DOCUMENTS_BACKFILL,
    DOCUMENTS_LIVE,
    IDENTITIES,
    INDEX_BACKFILL,
    INDEX_LIVE,
)

GROUP = 100
GROUP_BYTES = 8 * 1024 * 1024
"""Letters on their way at once, and their bytes: what is in memory, and what is sent twice after a crash."""
DELIVERY_SECONDS = 60.0

CONSUMED = (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES, CONVERSATIONS, INDEX_LIVE, INDEX_BACKFILL)


class CannotReplay(Exception):
    """This letter cannot be replayed. One line that says why; the others go on."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one letter."""

    id: str
    letter: Letter | None
    """None: unknown."""
    stored: Stored | None = None
    """Where its record stands now, on the letter's topic."""
    reason: str | None = None
    """Why nothing was sent."""
    settled: bool = True
    """It was sent, or need not be: False when it still waits for somebody."""


class Replayer:
    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        reader: Reader,
        *,
        topic_prefix: str,
        admission: Unchecked = UNCHECKED,
    ) -> None:
        """reader: of dead-letters.v1."""
        self._admission = admission
        self._pool = pool
        self._producer = producer
        self._reader = reader
        self._topics = {topic_prefix + topic.name: topic for topic in CONSUMED}

    async def replay(self, ids: Sequence[str]) -> AsyncIterator[Result]:
        """Replay these letters, each in its own right. Raises Retryable when Kafka or Postgres cannot be reached: what
        was yielded is done, the rest can be replayed later (twice does no harm)."""
        waiting = iter(dict.fromkeys(ids))
        while some := list(islice(waiting, GROUP)):
            with translated("dead letters"):
                async with self._pool.connection() as connection:
                    listed = await letters.get(connection, some)
            for id_ in some:
                if id_ not in listed:
                    yield Result(id_, None, reason="no dead letter has this id", settled=False)
            group: list[tuple[Letter, Delivery]] = []
            size = 0
            for letter in listed.values():
                try:
                    record = await self._original(letter)
                    delivery = await self._send(letter, record)
                except CannotReplay as error:
                    yield Result(letter.id, letter, reason=str(error), settled=False)
                    continue
                if delivery is None:
                    yield await self._obsolete(letter)
                    continue
                group.append((letter, delivery))
                size += len(record.value or b"")
                if size > GROUP_BYTES:
                    for result in await self._delivered(group):
                        yield result
                    group, size = [], 0
            for result in await self._delivered(group):
                yield result

    async def _original(self, letter: Letter) -> RawRecord:
        sealed = await read_letter(self._reader, letter)
        if sealed.omitted:
            what = "; ".join(f"{part}: {size}" for part, size in sealed.omitted.items())
            raise CannotReplay(f"it was too large to be kept ({what}): publish it again, smaller")
        return sealed.record

    async def _send(self, letter: Letter, record: RawRecord) -> Delivery | None:
        """None: it need not be sent. Raises CannotReplay, Retryable."""
        topic = self._topics.get(letter.topic)
        if topic is None:
            raise CannotReplay(f"nothing reads its topic {letter.topic} here")
        if topic is IDENTITIES and not await self._still_newest(letter, record):
            return None
        marked = mark_replay(record, Replay(letter.id, letter.attempt, letter.first_failed_at))
        try:
            return await self._producer.send_raw(topic, marked.key, marked.value, marked.headers)
        except DeliveryRefused as error:
            raise CannotReplay(str(error)) from error
        except NotDelivered as error:
            raise Retryable(str(error), service="kafka") from error

    async def _still_newest(self, letter: Letter, record: RawRecord) -> bool:
        """identities.v1 is compacted: of each key it keeps the record sent last. An older or still unreadable one sent
        now would push the newest out of the topic, and a ledger restored from a backup would never hear of it."""
        incoming = Incoming(
            letter.topic, letter.partition, letter.offset, record.key, record.value, record.headers, "live"
        )
        try:
            message = read_identity(incoming, now=datetime.now(UTC))
        except Poison as error:
            raise CannotReplay(f"it is still {error.code}: mend it at the source and publish it again") from error
        if isinstance(message, Tombstone):  # it would take away what nobody has said was forgotten
            raise CannotReplay("it is a tombstone: `penstock forget` sends those")
        if (refusal := await self._admission.refusal(incoming, message)) is not None:
            raise CannotReplay(f"it is still {refusal.code}: {refusal}")
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                return not await letters.newer_identity_known(connection, message)

    async def _obsolete(self, letter: Letter) -> Result:
        await self._mark([(letter.id, None)])
        return Result(letter.id, letter, reason="a newer set of this principal's groups is known: not sent")

    async def _delivered(self, group: Sequence[tuple[Letter, Delivery]]) -> list[Result]:
        """Wait for a group and mark what has arrived. Raises Retryable when something may not have."""
        if not group:
            return []
        await asyncio.wait([delivery for _, delivery in group], timeout=DELIVERY_SECONDS)
        results, unknown = [], None
        for letter, delivery in group:
            error = delivery.exception() if delivery.done() else TimeoutError()
            if error is None:
                results.append(Result(letter.id, letter, delivery.result()))
            elif isinstance(error, DeliveryRefused):
                results.append(Result(letter.id, letter, reason=str(error), settled=False))
            else:
                unknown = error
        await self._mark([(result.id, result.stored) for result in results if result.stored])
        if unknown is not None:
            text = str(unknown) or f"Kafka did not confirm within {DELIVERY_SECONDS:.0f} s"
            raise Retryable(f"{text} (replay again what `penstock dead list` still shows)", service="kafka")
        return results

    async def _mark(self, done: Sequence[tuple[str, Stored | None]]) -> None:
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                await letters.mark_replayed(connection, done)


async def read_letter(reader: Reader, letter: Letter) -> Sealed:
    """The letter as it stands on dead-letters.v1. Raises CannotReplay when it is not (or no longer) there."""
    if letter.letter_partition is None or letter.letter_offset is None:
        raise CannotReplay("it was buried by a version that did not remember where")
    raw = await reader.read(letter.letter_partition, letter.letter_offset)
    if raw is not None:
        try:
            sealed = unseal(raw)
        except NotALetter:
            pass
        else:
            if sealed.failure.id == letter.id:  # else the topic was made anew and holds other letters
                return sealed
    raise CannotReplay("its bytes have left the topic dead-letters.v1: publish it again at the source")
