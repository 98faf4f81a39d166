"""Members' histories on the real Postgres: what stands in the tables, what is found, and what is forgotten."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import psycopg
import pytest

from pipeline.conversations.embed import ConversationVectors
from pipeline.conversations.record import Conversations
from pipeline.core.conversations import PAIRS_PER_CHUNK, Pair, group, made_by, pair_digest, render
from pipeline.core.model import Generation
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedded, Embedder
from pipeline.embedding.tokens import byte_pairs
from pipeline.kafka import producer
from pipeline.ledger import generations
from pipeline.settings import ConversationSettings, dist
from pipeline.stages.dead import DeadLetters
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, open_pool
from pipeline.telemetry import Metrics
from query.conversations import History, K, history
from tests.space import Space
from topics.codec import encode
from topics.messages import AnyMessage, ConversationForgotten, ConversationRecorded, IdentityChanged
from topics.messages import Pair as Sent
from topics.registry import CONVERSATIONS

pytestmark = pytest.mark.stack

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
GATE = 400
TABLES = ("members", "pairs", "mentions", "chunks", "floors")
count = byte_pairs().count


def moment(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def sent(n: int, topic: str = "leave") -> Sent:
    return Sent(question=f"What about {topic} number {n}?", answer=f"It is rule {n} of {topic}.", asked_at=moment(n))


def as_grouped(pairs: Sequence[Sent]) -> list[Pair]:
    return [Pair(p.question, p.answer, p.asked_at, pair_digest(p.question, p.answer)) for p in pairs]


def tokens_of(pairs: Sequence[Sent]) -> int:
    return sum(count([render(p.question, p.answer) for p in pairs]))


def recorded(
    *pairs: Sent, observed: float = 0, member: str = "ada", conversation: str = "c", tenant: str = "acme",
    source: str = "chat",
) -> ConversationRecorded:  # fmt: skip
    return ConversationRecorded(
        tenant=tenant, source=source, observed_at=moment(observed), member=member, conversation=conversation,
        pairs=list(pairs),
    )  # fmt: skip


def forgotten(
    observed: float, conversation: str | None = None, *, member: str = "ada", tenant: str = "acme"
) -> ConversationForgotten:
    return ConversationForgotten(
        tenant=tenant, source="chat", observed_at=moment(observed), member=member, conversation=conversation
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
    pending: list[Incoming] = field(default_factory=list)

    def record(self, message: AnyMessage, key: bytes | None = None) -> Incoming:
        self.offset += 1
        record = encode(message)
        name = self.space.settings.kafka.topic_prefix + CONVERSATIONS.name
        return Incoming(name, 0, self.offset, key or record.key, record.value, record.headers, "live")

    async def take(self, *messages: AnyMessage) -> None:
        await self.stage.handle([self.record(message) for message in messages])

    async def embed(self, embedder: Embedder | None = None) -> int:
        """Until nothing waits; returns the rounds."""
        worker = ConversationVectors(
            self.pool, embedder or self.embedder, self.metrics, ConversationSettings(embeddings_per_second=10_000)
        )
        rounds = 0
        while await worker.turn():
            rounds += 1
            assert rounds < 50
        return rounds

    async def chunks(self, member: str = "ada", tenant: str = "acme") -> list[tuple[Any, ...]]:
        return await self.space.query(
            "SELECT position, text, tokens, digest, embedding::text, made_by FROM conversation_chunks"
            " WHERE member = %s AND tenant = %s ORDER BY position", member, tenant,
        )  # fmt: skip

    async def member(self, member: str = "ada") -> tuple[int, bool] | None:
        rows = await self.space.query("SELECT tokens, is_chunked FROM conversation_members WHERE member = %s", member)
        return rows[0] if rows else None  # type: ignore[return-value]

    async def history(
        self, question: str | None = None, *, budget: int = 10**6, member: str = "ada", tenant: str = "acme"
    ) -> History:
        vector = (self.generation, await self.embedder.embed_query(question)) if question else None
        async with self.pool.connection() as connection:
            return await history(connection, tenant, member, budget, question=vector)

    async def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Everything but what was drawn from a clock."""
        return {
            "members": await self.space.query("SELECT tenant, member, tokens, is_chunked FROM conversation_members"
                                              " ORDER BY 1, 2"),
            "pairs": await self.space.query("SELECT * FROM conversation_pairs ORDER BY 1, 2, 3"),
            "mentions": await self.space.query("SELECT * FROM conversation_mentions ORDER BY 1, 2, 3, 4, 5, 6"),
            "floors": await self.space.query("SELECT * FROM conversation_floors ORDER BY 1, 2"),
            "chunks": await self.space.query("SELECT tenant, member, digest, position, first_at, last_at, tokens, text"
                                             " FROM conversation_chunks ORDER BY 1, 2, 4"),
        }  # fmt: skip


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


@pytest.fixture
async def desk(space: Space) -> AsyncIterator[Desk]:
    async with open_desk(space) as desk:
        yield desk


async def test_below_the_gate_everything_is_served_newest_first_and_nothing_is_chunked(desk: Desk) -> None:
    pairs = [sent(n) for n in range(5)]
    await desk.take(recorded(*pairs))
    assert await desk.member() == (tokens_of(pairs), False)
    assert await desk.chunks() == []
    whole = await desk.history("anything")
    assert whole.served == "whole"
    assert [p.text for p in whole.pieces] == [render(p.question, p.answer) for p in reversed(pairs)]
    assert (whole.left_out, whole.tokens, whole.note) == (0, tokens_of(pairs), None)

    budget = tokens_of(pairs[-2:]) + 1
    trimmed = await desk.history(budget=budget)
    assert [p.first_at for p in trimmed.pieces] == [moment(4), moment(3)]
    assert sum(p.tokens for p in trimmed.pieces) <= budget
    assert trimmed.note == "the history's 3 oldest pairs did not fit the budget"


async def test_at_the_gate_a_history_is_chunked_for_good(desk: Desk) -> None:
    pairs = [sent(n) for n in range(60)]
    edge = next(n for n in range(60) if tokens_of(pairs[:n]) >= GATE)
    await desk.take(recorded(*pairs[: edge - 1]))
    assert (await desk.member())[1] is False
    await desk.take(recorded(*pairs[edge - 1 : edge], conversation="last"))
    assert await desk.member() == (tokens_of(pairs[:edge]), True)
    stands = await desk.chunks()
    wanted = group(as_grouped(pairs[:edge]))
    assert [(row[0], row[1]) for row in stands] == [(c.position, c.text) for c in wanted]
    assert [row[2] for row in stands] == count([c.text for c in wanted])
    assert (await desk.history()).served == "newest", "no vector, no question: still nothing waits"

    await desk.take(forgotten(5, "c"))
    assert await desk.member() == (tokens_of(pairs[edge - 1 : edge]), True), "one way"
    with pytest.raises(psycopg.errors.CheckViolation, match="one-way"):
        await desk.space.execute("UPDATE conversation_members SET is_chunked = false, chunked_at = NULL")


async def test_a_pair_more_embeds_the_last_chunk_alone(desk: Desk) -> None:
    pairs = [sent(n) for n in range(34)]
    await desk.take(recorded(*pairs))
    await desk.embed()
    before = await desk.chunks()
    assert len(before) == 4
    assert all(row[4] and row[5] == made_by(desk.generation) for row in before)
    await desk.take(recorded(sent(34)))
    after = await desk.chunks()
    assert after[:3] == before[:3]
    assert [row[4] for row in after] == [*(row[4] for row in before[:3]), None]
    embedded = desk.metrics.conversation_chunks._value.get()
    await desk.embed()
    assert desk.metrics.conversation_chunks._value.get() == embedded + 1


async def test_any_order_any_batches_duplicates_and_a_replay_end_alike(desk: Desk) -> None:
    """The same messages three times over, torn into other batches each time, and a history that a plain model says."""
    dice = random.Random(7)
    said = [
        recorded(*(sent(n) for n in range(at, at + dice.randrange(1, 6))), observed=at, conversation=f"c{at % 3}",
                 member=dice.choice(["ada", "bob"]))
        for at in range(0, 50, 2)
    ]  # fmt: skip
    wishes = [forgotten(17, "c1"), forgotten(30, "c2", member="bob"), forgotten(9, member="bob")]
    alive: dict[str, dict[bytes, datetime]] = {"ada": {}, "bob": {}}
    for message in said:
        floors = [w for w in wishes if w.member == message.member and w.conversation in (None, message.conversation)]
        if all(message.observed_at > w.observed_at for w in floors):
            for p in message.pairs:
                digest = pair_digest(p.question, p.answer)
                alive[message.member][digest] = min(p.asked_at, alive[message.member].get(digest, p.asked_at))
    dumps = []
    for seed in range(3):
        messages: list[AnyMessage] = [*said, *wishes, *dice.sample(said, 5)]
        random.Random(seed).shuffle(messages)
        if seed == 2:
            messages = [*said, *wishes]  # a replay from offset 0 over what is there already
        while messages:
            size = random.Random(len(messages)).randrange(1, 9)
            await desk.take(*messages[:size])
            messages = messages[size:]
        dumps.append(await desk.dump())
        if seed == 0:
            for name in TABLES:
                await desk.space.execute(f"DELETE FROM conversation_{name}")
    for name in TABLES:
        if name != "members":  # whether a history was over the gate before something was forgotten of it: see the ADR
            assert dumps[0][name] == dumps[1][name] == dumps[2][name], name
    held: dict[str, dict[bytes, datetime]] = {"ada": {}, "bob": {}}
    for _, member, digest, asked_at, *_ in dumps[0]["pairs"]:
        held[member][digest] = asked_at
    assert held == alive


async def test_forgetting_leaves_nothing_and_a_replay_brings_nothing_back(desk: Desk) -> None:
    canary = Sent(question="Where is canary-81d?", answer="In canary-81d.", asked_at=moment(3))
    said = recorded(*(sent(n) for n in range(40)), canary)
    await desk.take(said, recorded(sent(1), member="bob"))
    await desk.embed()
    assert (await desk.history("Where is canary-81d?")).pieces
    await desk.take(forgotten(5))
    for name in TABLES:
        rows = await desk.space.query(f"SELECT t::text FROM conversation_{name} t")
        assert not [row for (row,) in rows if "canary" in row or "ada" in row], name
    await desk.take(said, recorded(canary, observed=5), said)
    assert (await desk.history("Where is canary-81d?")).pieces == ()
    assert await desk.space.query("SELECT DISTINCT member FROM conversation_pairs") == [("bob",)]
    await desk.take(recorded(sent(2), observed=6))
    assert len((await desk.history()).pieces) == 1, "who speaks again begins anew"


async def test_what_was_said_in_two_conversations_stays_while_one_of_them_does(desk: Desk) -> None:
    shared = sent(1)
    later = shared.model_copy(update={"asked_at": moment(50)})
    await desk.take(recorded(shared, sent(2), conversation="a"), recorded(later, conversation="b", observed=1))
    assert await desk.space.query("SELECT count(*) FROM conversation_pairs") == [(2,)]
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(2), moment(1)]
    await desk.take(forgotten(2, "a"))
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(50)]
    await desk.take(forgotten(2, "b"))
    assert await desk.member() is None


async def test_a_conversation_is_its_sources_own_and_a_member_is_everybodys(desk: Desk) -> None:
    await desk.take(recorded(sent(1), source="chat"), recorded(sent(2), source="phone"))
    await desk.take(forgotten(2, "c"))
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(2)]
    await desk.take(forgotten(3))
    assert (await desk.history()).pieces == ()


async def test_nobody_reads_anothers_history(desk: Desk) -> None:
    """Every member of every tenant, short histories and long ones, asked with everybody's words."""
    askers = [(tenant, member) for tenant in ("acme", "rival") for member in ("ada", "bob", "ADA", "ad")]
    for n, (tenant, member) in enumerate(askers):
        own = [sent(i, topic=f"secret{n}x") for i in range(3 if n % 2 else 35)]
        await desk.take(recorded(*own, tenant=tenant, member=member))
    await desk.embed()
    for n, (tenant, member) in enumerate(askers):
        for other in range(len(askers)):
            found = await desk.history(f"What about secret{other}x number 3?", tenant=tenant, member=member)
            assert found.pieces
            assert all(f"secret{n}x" in piece.text for piece in found.pieces)
            assert not any(f"secret{o}x" in p.text for o in range(len(askers)) if o != n for p in found.pieces)
            assert len(found.pieces) == (3 if n % 2 else min(K, 4))
    for tenant, member in (
        ("acme", "nobody"),
        ("", "ada"),
        ("acme", ""),
        ("acme", "a%"),
        ("acme\x00", "ada"),
        ("x", "\ud800"),
    ):
        assert (await desk.history("secret", tenant=tenant, member=member)).pieces == ()


async def test_the_nearest_chunks_are_exactly_the_nearest(desk: Desk) -> None:
    words = ["holiday", "router", "salary", "kitchen", "parking", "laptop", "visa", "printer"]
    pairs = [sent(n, topic=f"{words[n // PAIRS_PER_CHUNK]} office") for n in range(80)]
    await desk.take(recorded(*pairs))
    await desk.embed()
    chunks = await desk.chunks()
    assert len(chunks) == 8
    vectors = np.array([[float(x) for x in row[4].strip("[]").split(",")] for row in chunks])
    for word in words:
        question = await desk.embedder.embed_query(f"the {word}")
        wanted = [chunks[i][1] for i in np.argsort(-(vectors @ question), kind="stable")[:K]]
        found = await desk.history(f"the {word}")
        assert (found.served, [p.text for p in found.pieces]) == ("nearest", wanted)
        assert word in found.pieces[0].text
        assert found.pieces[0].score == pytest.approx(float(np.max(vectors @ question)), abs=2e-3)
    small = await desk.history("the visa", budget=chunks[0][2] * 2)
    assert len(small.pieces) == 2
    assert small.note == f"the history's {K - 2} chunks did not fit the budget"
    plan = await desk.space.query(
        "EXPLAIN SELECT FROM conversation_chunks WHERE tenant = 'acme' AND member = 'ada' ORDER BY embedding <=> %s",
        chunks[0][4],
    )
    assert not any("hnsw" in line for (line,) in plan)


async def test_missing_embeddings_are_counted_and_block_nothing(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(30))))
    await desk.embed()
    await desk.take(recorded(*(sent(n) for n in range(30, 45))))
    found = await desk.history("rule 3")
    assert (found.served, len(found.pieces), found.without_embedding) == ("nearest", 3, 2)
    assert found.note == "2 chunks of the history are not embedded yet"
    await desk.take(recorded(*(sent(n) for n in range(35)), member="bob"))
    found = await desk.history("rule 3", member="bob")
    assert (found.served, len(found.pieces), found.without_embedding) == ("newest", 4, 4)
    assert found.pieces[0].first_at == moment(30)


class Other:
    """Another model of the same size: every vector points elsewhere."""

    def __init__(self, real: Embedder, model: str) -> None:
        self.real = real
        self.model = model
        self.revision = "2"
        self.dimensions, self.input_window = real.dimensions, real.input_window
        self.document_prefix = self.query_prefix = ""
        self.count_tokens = real.count_tokens

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        embedded = await self.real.embed_documents(texts)
        return Embedded(np.roll(embedded.vectors, 1, axis=1), embedded.refused, embedded.tokens)


async def test_models_never_mix(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(40))))
    await desk.embed()
    first = await desk.chunks()
    await desk.space.execute("UPDATE generations SET model = 'other', revision = '2' WHERE state = 'active'")
    async with desk.pool.connection() as connection:
        new = await generations.active(connection)
    assert await desk.embed() == 0, "a worker with the old model writes nothing"
    desk.generation = new
    found = await desk.history("rule 3")
    assert (found.served, found.without_embedding) == ("newest", 4), "the old vectors are found no more"
    await desk.embed(Other(desk.embedder, "other"))  # type: ignore[arg-type]
    second = await desk.chunks()
    assert {row[5] for row in second} == {made_by(new)}
    assert all(a[4] != b[4] and a[1] == b[1] for a, b in zip(first, second, strict=True))
    assert (await desk.history("rule 3")).without_embedding == 0


async def test_a_generation_that_only_cuts_otherwise_costs_nothing(desk: Desk) -> None:
    await desk.take(recorded(*(sent(n) for n in range(40))))
    await desk.embed()
    before = await desk.chunks()
    await desk.space.execute("UPDATE generations SET params = params || '{\"target\": 99}' WHERE state = 'active'")
    assert await desk.embed() == 0
    assert await desk.chunks() == before


async def test_a_chunk_longer_than_the_window_is_embedded_with_its_end(desk: Desk) -> None:
    """The local model reads 254 tokens: what is asked last must be found too."""
    filler = " ".join(f"Item {n} of the inventory is stored on shelf {n}." for n in range(60))
    long = [Sent(question=f"List {n}?", answer=filler, asked_at=moment(n)) for n in range(2)]
    end = Sent(question="Who feeds the penguins?", answer="The penguins are fed by Olga.", asked_at=moment(5))
    await desk.take(recorded(*long, end))
    await desk.embed()
    [(_, text, _, _, vector, _)] = await desk.chunks()
    held = np.array([float(x) for x in vector.strip("[]").split(",")])
    beginning = (await desk.embedder.embed_documents([text])).vectors[0]
    question = await desk.embedder.embed_query("Who feeds the penguins?")
    assert np.linalg.norm(held) == pytest.approx(1, abs=1e-2)
    assert held @ question > beginning @ question


async def test_bad_records_are_dead_letters_and_the_good_ones_of_their_batch_stand(desk: Desk) -> None:
    good = recorded(sent(1))
    wrong_key = desk.record(recorded(sent(2)), key=b"acme/bob")
    future = datetime.now(UTC) + timedelta(hours=1)
    late = desk.record(good.model_copy(update={"observed_at": future}))
    alien = desk.record(
        IdentityChanged(tenant="acme", source="wiki", principal="ada", observed_at=START, groups=["staff"])
    )
    broken = Incoming(late.topic, 0, 99, b"acme/ada", b'{"canary": 1', encode(good).headers, "live")
    await desk.stage.handle([wrong_key, late, alien, broken, desk.record(good)])
    letters = await desk.space.query(
        "SELECT code, tenant, source, external_id, message FROM dead_letters ORDER BY code"
    )
    assert [row[0] for row in letters] == ["from_the_future", "invalid", "wrong_key", "wrong_topic"]
    assert all(row[2] is None and row[3] is None for row in letters if row[0] != "wrong_topic"), "no member is named"
    assert {row[1] for row in letters if row[0] != "wrong_topic"} == {"acme"}
    assert not any("canary" in row[4] or "What about" in row[4] for row in letters)
    assert len((await desk.history()).pieces) == 1
