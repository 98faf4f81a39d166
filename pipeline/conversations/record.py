"""conversations: writes the questions and answers of members from Kafka into the tables, and forgets them on request.

A member's history is a function of the set of messages: it has every pair that was observed after the newest request to
forget it. So duplicates, replays and any order give the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from pipeline.conversations import tables
from pipeline.conversations.tables import Member, Mention
from pipeline.core.conversations import (
    Pair,
    Place,
    first_change,
    group,
    is_chunked,
    pair_digest,
    regroup_from,
    subject_digest,
)
from pipeline.core.errors import Poison
from pipeline.core.model import CountTokens, Lane
from pipeline.core.normalise import clean
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import ConversationSettings
from pipeline.stages.admission import UNCHECKED, Unchecked
from pipeline.stages.dead import DeadLetters
from pipeline.stages.events import check_record
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stores.postgres import Connection, Pool, translated
from topics.codec import BadMessage, decode
from topics.messages import ConversationForgotten, ConversationRecorded
from topics.registry import CONVERSATIONS, Topic

Said = ConversationRecorded | ConversationForgotten

MOST_TOKENS = 32_000_000
MOST_MENTIONS = 200_000
"""The longest history of a member, some 150 MB: nothing is added to a longer one until something of it is forgotten.
Somebody who asks a hundred questions a day has it after years; a program that asks one after the other, in days."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one member's messages, in pairs."""

    recorded: int = 0
    known: int = 0
    forgotten: int = 0
    """Removed, or ignored because they had been forgotten before they came."""
    full: int = 0
    """Ignored because the history is as long as one may be."""


class Conversations(FinalStage):
    """The stage. See pipeline.stages.stage.Stage for its law."""

    name = "conversations"
    topics: dict[Lane, Topic] = {"live": CONVERSATIONS}  # noqa: RUF012
    batch_size = 50

    def __init__(
        self,
        pool: Pool,
        dead: DeadLetters | None,
        count_tokens: CountTokens,
        metrics: Metrics,
        settings: ConversationSettings,
        admission: Unchecked = UNCHECKED,
    ) -> None:
        """dead: None where no records are handled. count_tokens: the count for the gate (cl100k), whatever model
        embeds."""
        self._admission = admission
        self._pool = pool
        self._dead = dead
        self._count_tokens = count_tokens
        self._metrics = metrics
        self._settings = settings

    async def handle(self, batch: Sequence[Incoming]) -> None:
        assert self._dead is not None
        now = datetime.now(UTC)
        sorted_batch = await self._admission.sort(
            batch,
            lambda record: read_conversation(record, now=now),
            lambda message: message,
            stage=self.name,
            concerns_tenant=lambda message: isinstance(message, ConversationForgotten) and message.conversation is None,
        )
        said: dict[Member, list[Said]] = {}
        for message in sorted_batch.accepted:
            said.setdefault(Member(message.tenant, message.member), []).append(message)
        for who, messages in said.items():
            await self._accept(who, messages)
        self._dead.count_accepted(sorted_batch.valid, stage=self.name)
        await self._dead.add_all(sorted_batch.poison, stage=self.name)  # last: a flood must not delay valid records

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        assert self._dead is not None
        await self._dead.add(record, stage=self.name, error=error)

    async def erase(self, tenant: str, answers: Collection[UUID]) -> int:
        """Remove the pairs that were recorded with one of these answers, in all conversations; returns how many."""
        if not answers:
            return 0
        with translated("conversations"):
            async with self._pool.connection() as connection:
                members = await tables.members_answered(connection, tenant, answers)
            erased = 0
            for who in members:
                async with self._pool.connection() as connection, connection.transaction():
                    await tables.lock(connection, who)
                    touched = await tables.erase_answers(connection, who, answers)
                    before = await tables.times(connection, who, touched)
                    if (place := first_change(before, {})) is not None:
                        await tables.settle_pairs(connection, who, touched)
                        await self._regroup(connection, who, place)
                    erased += len(before)
        return erased

    async def _accept(self, who: Member, messages: Sequence[Said]) -> None:
        """Write one member's messages in one transaction."""
        with translated("conversations"):
            async with self._pool.connection() as connection, connection.transaction():
                await tables.lock(connection, who)
                outcome = await self._write(connection, who, messages)
        for name, count in (
            ("recorded", outcome.recorded),
            ("known", outcome.known),
            ("forgotten", outcome.forgotten),
            ("full", outcome.full),
        ):
            self._metrics.conversation_pairs.labels(outcome=name).inc(count)

    async def _write(self, connection: Connection, who: Member, messages: Sequence[Said]) -> Outcome:
        forgotten = await self._forget(connection, who, [m for m in messages if isinstance(m, ConversationForgotten)])
        recorded = [m for m in messages if isinstance(m, ConversationRecorded)]
        pairs, mentions, ignored = await self._not_forgotten(connection, who, recorded)
        full = 0
        if pairs and await tables.is_full(connection, who, forgotten, tokens=MOST_TOKENS, mentions=MOST_MENTIONS):
            full, pairs, mentions = len(pairs), {}, []
        touched = forgotten | pairs.keys()
        before = await tables.times(connection, who, touched)
        new = [pair for digest, pair in pairs.items() if digest not in before]
        if new:
            tokens = await self._count([pair.text for pair in new])
            await tables.add_pairs(connection, who, list(zip(new, tokens, strict=True)))
        named = await tables.answers(connection, who, pairs)
        named |= {mention.answer_id for mention in mentions if mention.answer_id is not None}
        await tables.add_mentions(connection, who, mentions)
        await tables.settle_provenance(connection, who, named)  # of a mention that is said twice the newer one counts
        if named and (erased := await tables.erased_answers(connection, who, named)):
            gone = await tables.erase_answers(connection, who, erased)
            before |= await tables.times(connection, who, gone)
            touched |= gone
        after = await tables.first_mentions(connection, who, touched)
        if (place := first_change(before, after)) is not None:
            await tables.settle_pairs(connection, who, touched)
            await self._regroup(connection, who, place)
        return Outcome(len(new), len(pairs) - len(new), len(before.keys() - after.keys()) + ignored, full)

    async def _forget(self, connection: Connection, who: Member, wishes: Sequence[ConversationForgotten]) -> set[bytes]:
        """Remove the mentions that are to be forgotten; returns the digests of their pairs."""
        floors: dict[bytes, datetime] = {}
        touched: set[bytes] = set()
        for wish in wishes:
            subject = subject_digest(who.member)
            said_in = None
            if wish.conversation is not None:
                said_in = wish.source, wish.conversation
                subject = subject_digest(who.member, *said_in)
            floors[subject] = max(wish.observed_at, floors.get(subject, wish.observed_at))
            touched |= await tables.forget(connection, who, until=wish.observed_at, said_in=said_in)
        if floors:
            await tables.raise_floors(connection, who, floors)
        return touched

    async def _not_forgotten(
        self, connection: Connection, who: Member, messages: Sequence[ConversationRecorded]
    ) -> tuple[dict[bytes, Pair], list[Mention], int]:
        """The pairs and mentions that were observed after the last request to forget them, and the number of other
        pairs."""
        everything = subject_digest(who.member)
        subjects = {
            place: subject_digest(who.member, *place) for place in {(m.source, m.conversation) for m in messages}
        }
        floors = await tables.floors(connection, who, [everything, *subjects.values()])
        pairs: dict[bytes, Pair] = {}
        mentions: list[Mention] = []
        ignored = 0
        for message in messages:
            place = (message.source, message.conversation)
            floor = max((floors[s] for s in (everything, subjects[place]) if s in floors), default=None)
            if floor is not None and message.observed_at <= floor:
                ignored += len(message.pairs)
                continue
            for sent in message.pairs:
                question, answer = clean(sent.question), clean(sent.answer)
                pair = Pair(question, answer, sent.asked_at, pair_digest(question, answer))
                pairs[pair.digest] = min(pair, pairs.get(pair.digest, pair), key=lambda p: p.time)
                mentions.append(
                    Mention(pair.digest, *place, sent.asked_at, message.observed_at, sent.id, sent.answer_id)
                )
        return pairs, mentions, ignored

    async def _regroup(self, connection: Connection, who: Member, place: Place) -> None:
        """Update the member's token count, the gate, and the chunks from the first one that may differ."""
        tokens, already = await tables.standing(connection, who)
        chunked = is_chunked(already=already, tokens=tokens, gate_tokens=self._settings.gate_tokens)
        await tables.save_member(connection, who, tokens=tokens, chunked=chunked)
        if not chunked:
            return
        position, number = regroup_from(await tables.pairs_before(connection, who, place) if already else 0)
        chunks = group(await tables.pairs_from(connection, who, number), first_position=position)
        counts = await self._count([chunk.text for chunk in chunks])
        await tables.replace_chunks(connection, who, position, list(zip(chunks, counts, strict=True)))

    async def _count(self, texts: Sequence[str]) -> list[int]:
        return await asyncio.to_thread(self._count_tokens, texts)


def read_conversation(record: Incoming, *, now: datetime) -> Said:
    """Parse and check one record. Raises Poison; the text never quotes content."""
    try:
        message = decode(record.value, record.headers)
    except BadMessage as error:
        raise Poison(error.code, str(error)) from error
    if isinstance(message, Said):
        check_record(record, message, now=now)
        return message
    raise Poison("wrong_topic", f"{message.kind} does not belong on {record.topic}")
