"""Members' histories: what stands in the tables, what is found, and what is forgotten."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import psycopg
import pytest

from pipeline.conversations import record
from pipeline.conversations.record import Conversations
from pipeline.core.conversations import PAIRS_PER_CHUNK, group, pair_digest, render
from pipeline.kafka.groups import group as group_name
from pipeline.kafka.groups import groups
from pipeline.maintenance.recover import open_recovery
from pipeline.stages.stage import Incoming
from query.modes.history import NEAREST_CHUNKS
from tests.support.pipeline.conversations_kit import (
    GATE,
    START,
    TABLES,
    Desk,
    as_grouped,
    count,
    forgotten,
    moment,
    recorded,
    sent,
    tokens_of,
)
from tests.support.space import Space
from topics.codec import encode
from topics.messages import AnyMessage, IdentityChanged
from topics.messages import Pair as Sent
from topics.registry import CONVERSATIONS

pytestmark = pytest.mark.stack


async def test_a_history_below_the_gate_is_served_whole_newest_first_and_not_chunked(desk: Desk) -> None:
    pairs = [sent(n) for n in range(5)]
    await desk.take(recorded(*pairs))
    assert await desk.member() == (tokens_of(pairs), False)
    assert await desk.chunks() == []
    whole = await desk.history("anything")
    assert whole.served == "whole"
    assert [p.text for p in whole.pieces] == [render(p.question, p.answer) for p in reversed(pairs)]
    assert (whole.left_out, whole.tokens, whole.notes) == (0, tokens_of(pairs), [])

    budget = tokens_of(pairs[-2:]) + 1
    trimmed = await desk.history(budget=budget)
    assert [p.first_at for p in trimmed.pieces] == [moment(4), moment(3)]
    assert sum(p.tokens for p in trimmed.pieces) <= budget
    assert trimmed.notes == ["the history's 3 oldest pairs did not fit the budget"]


async def test_a_history_that_reaches_the_gate_is_chunked_permanently(desk: Desk) -> None:
    pairs = [sent(n) for n in range(60)]
    edge = next(n for n in range(60) if tokens_of(pairs[:n]) >= GATE)
    await desk.take(recorded(*pairs[: edge - 1]))
    assert (await desk.member())[1] is False
    await desk.take(recorded(*pairs[edge - 1 : edge], conversation="last"))
    assert await desk.member() == (tokens_of(pairs[:edge]), True)
    stands = await desk.chunks()
    expected = group(as_grouped(pairs[:edge]))
    assert [(row[0], row[1]) for row in stands] == [(c.position, c.text) for c in expected]
    assert [row[2] for row in stands] == count([c.text for c in expected])
    assert (await desk.history()).served == "newest", "no vector, no question: still nothing waits"

    await desk.take(forgotten(5, "c"))
    assert await desk.member() == (tokens_of(pairs[edge - 1 : edge]), True), "one way"
    with pytest.raises(psycopg.errors.CheckViolation, match="one-way"):
        await desk.space.execute("UPDATE conversation_members SET is_chunked = false, chunked_at = NULL")


async def test_messages_in_any_order_batches_and_repetitions_give_the_same_history(desk: Desk) -> None:
    """The same messages three times over, torn into other batches each time, and a history that a plain model says."""
    dice = random.Random(7)
    said = [
        recorded(
            *(sent(n) for n in range(at, at + dice.randrange(1, 6))),
            observed=at,
            conversation=f"c{at % 3}",
            member=dice.choice(["ada", "bob"]),
        )
        for at in range(0, 50, 2)
    ]
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


@pytest.mark.parametrize("what", ["MOST_TOKENS", "MOST_MENTIONS"])
async def test_a_member_who_never_stops_fills_no_disk(desk: Desk, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    pairs = [sent(n) for n in range(6)]
    monkeypatch.setattr(record, what, tokens_of(pairs[:3]) if what == "MOST_TOKENS" else 3)
    await desk.take(recorded(*pairs[:3], observed=1))
    await desk.take(recorded(*pairs[3:5], observed=2, conversation="later"), recorded(pairs[4], member="bob"))
    assert len((await desk.history()).pieces) == 3
    assert await desk.space.query("SELECT count(*) FROM conversation_pairs WHERE member = 'bob'") == [(1,)]
    await desk.take(forgotten(1, "c"), recorded(pairs[5], observed=3))
    assert [piece.text for piece in (await desk.history()).pieces] == [render(pairs[5].question, pairs[5].answer)]


async def test_forgetting_a_member_removes_everything_and_a_replay_restores_nothing(desk: Desk) -> None:
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


async def test_an_answer_that_is_recorded_after_its_document_was_erased_leaves_nothing(desk: Desk) -> None:
    """A conversation may be recorded hours after the answer, and from Kafka again after a recovery."""
    pairs = [sent(n) for n in range(40)]
    secret = Sent(question="Who?", answer="canary-81d", asked_at=moment(3.5), answer_id=UUID(int=4_711))
    others = [render(p.question, p.answer) for p in pairs]
    document = UUID(int=815)
    await desk.space.execute(
        "INSERT INTO documents (id, tenant, source, external_id, seq, deleted_at, erased_at)"
        " VALUES (%s, 'acme', 'hr', 'erased', 1, now(), NULL)",
        document,
    )
    await desk.space.execute("INSERT INTO answer_provenance VALUES ('acme', %s, %s)", secret.answer_id, [document])
    await desk.take(recorded(*pairs, secret))
    assert any("canary-81d" in text for _, text, *_ in await desk.chunks()), "it is only deleted"
    await desk.space.execute("UPDATE documents SET erased_at = now()")
    for again in (recorded(*pairs, secret, observed=1), recorded(secret, conversation="other")):
        await desk.take(again)
        for name in TABLES:
            rows = await desk.space.query(f"SELECT t::text FROM conversation_{name} t")
            assert not [row for (row,) in rows if "canary" in row], name
        assert "".join(text for _, text, *_ in await desk.chunks()).count("What about") == len(others)
    assert await desk.member() == (tokens_of(pairs), True)
    assert await desk.space.query("SELECT count(*) FROM conversation_provenance WHERE documents <> '{}'") == [(0,)]


async def test_a_pair_recorded_in_two_conversations_stays_until_both_are_forgotten(desk: Desk) -> None:
    shared = sent(1)
    later = shared.model_copy(update={"asked_at": moment(50)})
    await desk.take(recorded(shared, sent(2), conversation="a"), recorded(later, conversation="b", observed=1))
    assert await desk.space.query("SELECT count(*) FROM conversation_pairs") == [(2,)]
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(2), moment(1)]
    await desk.take(forgotten(2, "a"))
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(50)]
    await desk.take(forgotten(2, "b"))
    assert await desk.member() is None


async def test_forgetting_a_conversation_is_limited_to_its_source_and_forgetting_a_member_is_not(desk: Desk) -> None:
    await desk.take(recorded(sent(1), source="chat"), recorded(sent(2), source="phone"))
    await desk.take(forgotten(2, "c"))
    assert [p.first_at for p in (await desk.history()).pieces] == [moment(2)]
    await desk.take(forgotten(3))
    assert (await desk.history()).pieces == ()


async def test_a_members_history_is_never_served_to_another_member_or_tenant(desk: Desk) -> None:
    """Every member of every tenant, short histories and long ones, asked with everybody's words."""
    askers = [(tenant, member) for tenant in ("acme", "rival") for member in ("ada", "bob", "ADA", "ad")]
    for n, (tenant, member) in enumerate(askers):
        own = [sent(i, topic=f"secret{n}x") for i in range(3 if n % 2 else 35)]
        await desk.take(recorded(*own, tenant=tenant, member=member))
    await desk.embed()
    for n, (tenant, member) in enumerate(askers):
        for other in range(len(askers)):
            history = await desk.history(f"What about secret{other}x number 3?", tenant=tenant, member=member)
            assert history.pieces
            assert all(f"secret{n}x" in piece.text for piece in history.pieces)
            assert not any(f"secret{o}x" in p.text for o in range(len(askers)) if o != n for p in history.pieces)
            assert len(history.pieces) == (3 if n % 2 else min(NEAREST_CHUNKS, 4))
    for tenant, member in (
        ("acme", "nobody"),
        ("", "ada"),
        ("acme", ""),
        ("acme", "a%"),
        ("acme\x00", "ada"),
        ("x", "\ud800"),
    ):
        assert (await desk.history("secret", tenant=tenant, member=member)).pieces == ()


async def test_the_nearest_chunks_of_a_history_are_exact(desk: Desk) -> None:
    words = ["holiday", "router", "salary", "kitchen", "parking", "laptop", "visa", "printer"]
    pairs = [sent(n, topic=f"{words[n // PAIRS_PER_CHUNK]} office") for n in range(80)]
    await desk.take(recorded(*pairs))
    await desk.embed()
    chunks = await desk.chunks()
    assert len(chunks) == 8
    vectors = np.array([[float(x) for x in row[4].strip("[]").split(",")] for row in chunks])
    for word in words:
        question = await desk.embedder.embed_query(f"the {word}")
        expected = [chunks[i][1] for i in np.argsort(-(vectors @ question), kind="stable")[:NEAREST_CHUNKS]]
        history = await desk.history(f"the {word}")
        assert (history.served, [p.text for p in history.pieces]) == ("nearest", expected)
        assert word in history.pieces[0].text
        assert history.pieces[0].score == pytest.approx(float(np.max(vectors @ question)), abs=2e-3)
    small = await desk.history("the visa", budget=chunks[0][2] * 2)
    assert len(small.pieces) == 2
    assert small.notes == [f"the history's {NEAREST_CHUNKS - 2} chunks did not fit the budget"]
    plan = await desk.space.query(
        "EXPLAIN SELECT FROM conversation_chunks WHERE tenant = 'acme' AND member = 'ada' ORDER BY embedding <=> %s",
        chunks[0][4],
    )
    assert not any("hnsw" in line for (line,) in plan)


async def test_bad_conversation_records_become_dead_letters_and_the_good_ones_are_stored(desk: Desk) -> None:
    good = recorded(sent(1))
    wrong_key = desk.record(recorded(sent(2)), key=b"acme/bob")
    slashes = desk.record(recorded(sent(2)), key=b"acme/https://people.example/bob")
    future = datetime.now(UTC) + timedelta(hours=1)
    late = desk.record(good.model_copy(update={"observed_at": future}))
    alien = desk.record(
        IdentityChanged(tenant="acme", source="wiki", principal="ada", observed_at=START, groups=["staff"])
    )
    broken = Incoming(late.topic, 0, 99, b"acme/ada", b'{"canary": 1', encode(good).headers, "live")
    await desk.stage.handle([wrong_key, slashes, late, alien, broken, desk.record(good)])
    letters = await desk.space.query(
        "SELECT code, tenant, source, external_id, message FROM dead_letters ORDER BY code"
    )
    assert [row[0] for row in letters] == ["from_the_future", "invalid", "wrong_key", "wrong_key", "wrong_topic"]
    assert all(row[2] is None and row[3] is None for row in letters), "no member is named"
    assert {row[1] for row in letters} == {"acme"}
    assert not any("canary" in row[4] or "What about" in row[4] for row in letters)
    assert len((await desk.history()).pieces) == 1


async def test_a_recovery_rewinds_the_conversations_consumer_group(desk: Desk, space: Space) -> None:
    """`penstock recover` takes the conversations' group back too."""
    async with groups(space.settings.kafka) as consumers, open_recovery(space.settings, lambda *_: None) as recovery:
        start = datetime.now(UTC)
        await space.publish(*(recorded(sent(n), member=f"m{n}") for n in range(5)), topic=CONVERSATIONS)
        name = group_name(Conversations.name)
        logs = await consumers.logs([CONVERSATIONS.name], start)
        await consumers.commit(name, {place: log.end for place, log in logs.items()})
        await recovery.rewind(start)
        committed = await consumers.committed(name)
        assert sum(log.end - committed[place] for place, log in logs.items()) == 5
