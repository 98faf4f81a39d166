"""Replay: send dead letters back to the topics that they came from, byte for byte.

A replayed event never overwrites a newer one, because version and observed_at order events, however late they arrive.
"""

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

GROUP_LETTERS, GROUP_BYTES = 100, 8 * 1024 * 1024
"""The most letters, and bytes of them, that are in flight at once. They are in memory, and may be sent twice after a
crash."""
DELIVERY_SECONDS = 60.0

CONSUMED = (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES, CONVERSATIONS, INDEX_LIVE, INDEX_BACKFILL)


class CannotReplay(Exception):
    """This letter cannot be replayed; the message is one line that says why. Other letters can."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one letter."""

    id: str
    letter: Letter | None
    """None: no letter has this id."""
    stored: Stored | None = None
    """Where the replayed record is stored, on the topic that the letter's record came from. None: nothing was sent."""
    reason: str | None = None
    """Why nothing was sent."""
    settled: bool = True
    """True when it was sent or need not be; False when it still waits for an operator."""


class Replayer:
    """Replays dead letters to the topics that the stages consume."""

    def __init__(
        self,
        pool: Pool,
        producer: Producer,
        reader: Reader,
        *,
        topic_prefix: str,
        admission: Unchecked = UNCHECKED,
    ) -> None:
        """reader: reads the topic dead-letters.v1. topic_prefix: that of the names of all topics, on a shared
        cluster."""
        self._admission = admission
        self._pool = pool
        self._producer = producer
        self._reader = reader
        self._topics = {topic_prefix + topic.name: topic for topic in CONSUMED}

    async def replay(self, ids: Sequence[str]) -> AsyncIterator[Result]:
        """Replay these letters, independently of each other, and yield each one's result. Raises Retryable when Kafka
        or Postgres cannot be reached: what was yielded is done, and the rest can be replayed later. (Replaying a letter
        twice does no harm.)"""
        remaining = iter(dict.fromkeys(ids))
        while group_ids := list(islice(remaining, GROUP_LETTERS)):
            with translated("dead letters"):
                async with self._pool.connection() as connection:
                    listed = await letters.get(connection, group_ids)
            for id_ in group_ids:
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
        """Read the record that a letter copies. Raises CannotReplay, Retryable."""
        sealed = await read_letter(self._reader, letter)
        if sealed.omitted:
            what = "; ".join(f"{part}: {size}" for part, size in sealed.omitted.items())
            raise CannotReplay(f"it was too large to be kept ({what}): publish it again, smaller")
        return sealed.record

    async def _send(self, letter: Letter, record: RawRecord) -> Delivery | None:
        """Send a letter's record; None: it is not sent, because something newer is known. Raises CannotReplay,
        Retryable."""
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
        """Whether the ledger knows nothing newer than this record of identities.v1. Raises CannotReplay, Retryable.

        The topic is compacted: it retains the record of each key that was sent last. An older or invalid record that is
        sent now would replace the newest one, and a ledger restored from a backup could not read that again.
        """
        incoming = Incoming(
            letter.topic, letter.partition, letter.offset, record.key, record.value, record.headers, "live"
        )
        try:
            message = read_identity(incoming, now=datetime.now(UTC))
        except Poison as error:
            raise CannotReplay(f"it is still {error.code}: fix it at the source and publish it again") from error
        if isinstance(message, Tombstone):  # it would remove groups that may have been published since
            raise CannotReplay("it is a tombstone, which is not replayed: run `penstock forget` again")
        if (refusal := await self._admission.refusal(incoming, message)) is not None:
            raise CannotReplay(f"it is still {refusal.code}: {refusal}")
        with translated("dead letters"):
            async with self._pool.connection() as connection:
                return not await letters.newer_identity_known(connection, message)

    async def _obsolete(self, letter: Letter) -> Result:
        """Mark a letter as done although nothing is sent."""
        await self._mark([(letter.id, None)])
        return Result(
            letter.id, letter, reason="not sent: the ledger has newer groups of this principal, or was to forget it"
        )

    async def _delivered(self, group: Sequence[tuple[Letter, Delivery]]) -> list[Result]:
        """Wait until Kafka has stored a group of letters, and mark those as replayed. Raises Retryable when some may
        not be stored, after marking the others."""
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
    """Read a letter from dead-letters.v1. Raises CannotReplay when it is not there, or no longer."""
    if letter.letter_partition is None or letter.letter_offset is None:
        raise CannotReplay("its record cannot be found: an older version did not store its position")
    raw = await reader.read(letter.letter_partition, letter.letter_offset)
    if raw is not None:
        try:
            sealed = unseal(raw)
        except NotALetter:
            pass
        else:
            if sealed.failure.id == letter.id:  # otherwise the topic was recreated, and holds other letters
                return sealed
    raise CannotReplay("its bytes have left the topic dead-letters.v1: publish it again at the source")
