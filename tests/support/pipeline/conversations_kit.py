"""Members' histories on the real Postgres, without workers: the real stage, the real embedder, called directly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pipeline.conversations.embed import ConversationVectors
from pipeline.conversations.record import Conversations
from pipeline.core.conversations import Pair, pair_digest, render
from pipeline.core.model import Generation
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder, OneModel
from pipeline.embedding.tokens import byte_pairs
from pipeline.kafka.client import producer
from pipeline.ledger import generations
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import ConversationSettings, dist
from pipeline.stages.dead import DeadLetters
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, open_pool
from query.access.callers import Caller
from query.modes.history import History, history
from tests.support.space import Space
from topics.codec import encode
from topics.messages import AnyMessage, ConversationForgotten, ConversationRecorded
from topics.messages import Pair as Sent
from topics.registry import CONVERSATIONS

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
GATE = 400
TABLES = ("members", "pairs", "mentions", "chunks", "floors")
count = byte_pairs().count


def moment(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def sent(n: int, topic: str = "leave") -> Sent:
    """Its answer was made from no document (``known``)."""
    return Sent(
        question=f"What about {topic} number {n}?",
        answer=f"It is rule {n} of {topic}.",
        asked_at=moment(n),
        answer_id=UUID(int=n),
    )


def as_grouped(pairs: Sequence[Sent]) -> list[Pair]:
    return [Pair(p.question, p.answer, p.asked_at, pair_digest(p.question, p.answer)) for p in pairs]


def tokens_of(pairs: Sequence[Sent]) -> int:
    return sum(count([render(p.question, p.answer) for p in pairs]))


def recorded(
    *pairs: Sent,
    observed: float = 0,
    member: str = "ada",
    conversation: str = "c",
    tenant: str = "acme",
    source: str = "chat",
) -> ConversationRecorded:
    return ConversationRecorded(
        tenant=tenant,
        source=source,
        observed_at=moment(observed),
        member=member,
        conversation=conversation,
        pairs=list(pairs),
    )


def forgotten(
    observed: float, conversation: str | None = None, *, member: str = "ada", tenant: str = "acme"
) -> ConversationForgotten:
    return ConversationForgotten(
        tenant=tenant, source="chat", observed_at=moment(observed), member=member, conversation=conversation
    )


async def known(pool: Pool, *messages: AnyMessage) -> None:
    """Whatever these answers are, each was made from no document."""
    async with pool.connection() as connection:
        await connection.cursor().executemany(
            "INSERT INTO answer_provenance (tenant, answer_id, documents) VALUES (%s, %s, '{}') ON CONFLICT DO NOTHING",
            [
                (message.tenant, pair.answer_id)
                for message in messages
                if isinstance(message, ConversationRecorded)
                for pair in message.pairs
                if pair.answer_id is not None
            ],
        )


@dataclass
class Desk:
    space: Space
    pool: Pool
    stage: Conversations
    embedder: Embedder
    metrics: Metrics
    generation: Generation
    offset: int = 0

    def record(self, message: AnyMessage, key: bytes | None = None) -> Incoming:
        self.offset += 1
        record = encode(message)
        name = self.space.settings.kafka.topic_prefix + CONVERSATIONS.name
        return Incoming(name, 0, self.offset, key or record.key, record.value, record.headers, "live")

    async def take(self, *messages: AnyMessage) -> None:
        await known(self.pool, *messages)
        await self.stage.handle([self.record(message) for message in messages])

    async def embed(self, embedder: Embedder | None = None) -> int:
        """Until nothing waits; returns the rounds."""
        worker = ConversationVectors(
            self.pool,
            OneModel(embedder or self.embedder),
            self.metrics,
            ConversationSettings(embeddings_per_second=10_000),
        )
        rounds = 0
        while await worker.turn():
            rounds += 1
            assert rounds < 50
        return rounds

    async def chunks(self, member: str = "ada", tenant: str = "acme") -> list[tuple[Any, ...]]:
        return await self.space.query(
            "SELECT position, text, tokens, digest, embedding::text, made_by FROM conversation_chunks"
            " WHERE member = %s AND tenant = %s ORDER BY position",
            member,
            tenant,
        )

    async def member(self, member: str = "ada") -> tuple[int, bool] | None:
        rows = await self.space.query("SELECT tokens, is_chunked FROM conversation_members WHERE member = %s", member)
        return rows[0] if rows else None  # type: ignore[return-value]

    async def history(
        self, question: str | None = None, *, budget: int = 10**6, member: str = "ada", tenant: str = "acme"
    ) -> History:
        vector = (self.generation, await self.embedder.embed_query(question)) if question else None
        async with self.pool.connection() as connection:
            return await history(connection, Caller(tenant, frozenset()), member, budget, question=vector)

    async def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Everything but what was drawn from a clock."""
        return {
            "members": await self.space.query(
                "SELECT tenant, member, tokens, is_chunked FROM conversation_members ORDER BY 1, 2"
            ),
            "pairs": await self.space.query("SELECT * FROM conversation_pairs ORDER BY 1, 2, 3"),
            "mentions": await self.space.query("SELECT * FROM conversation_mentions ORDER BY 1, 2, 3, 4, 5, 6"),
            "floors": await self.space.query("SELECT * FROM conversation_floors ORDER BY 1, 2"),
            "chunks": await self.space.query(
                "SELECT tenant, member, digest, position, first_at, last_at, tokens, text"
                " FROM conversation_chunks ORDER BY 1, 2, 4"
            ),
        }


@asynccontextmanager
async def open_desk(space: Space, gate: int = GATE) -> AsyncIterator[Desk]:
    metrics = Metrics()
    model = embedder(space.settings.embedding, dist() / "models")
    async with open_pool(space.settings.postgres) as pool, producer(space.settings.kafka) as kafka:
        dead = DeadLetters(pool, kafka, metrics)
        stage = Conversations(pool, dead, count, metrics, ConversationSettings(gate_tokens=gate))
        async with pool.connection() as connection:
            generation = await generations.active(connection)
        yield Desk(space, pool, stage, model, metrics, generation)
    await model.aclose()
