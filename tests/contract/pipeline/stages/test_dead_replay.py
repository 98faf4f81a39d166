"""Replaying on real Kafka and Postgres: what is marked, what fails again, and what cannot be sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from pipeline.core.conversations import subject_digest
from pipeline.ledger.letters import Filter, ids, page
from pipeline.stages.identities import Identities
from pipeline.stages.stage import Incoming
from tests.support.pipeline.dead_kit import Desk, open_desk
from tests.support.space import Space, now
from topics.codec import encode
from topics.messages import IdentityChanged
from topics.registry import DEAD_LETTERS, DOCUMENTS_INDEXED, DOCUMENTS_LIVE, IDENTITIES

pytestmark = pytest.mark.stack


@pytest.fixture
async def desk(space: Space) -> AsyncIterator[Desk]:
    async with open_desk(space) as desk:
        yield desk


async def waiting(desk: Desk) -> list[str]:
    async with desk.pool.connection() as connection:
        return await ids(connection, Filter())


async def test_a_replayed_dead_letter_is_marked_and_no_longer_waits(desk: Desk) -> None:
    one, two = [await desk.write_dead_letter(desk.record()) for _ in range(2)]
    results = await desk.replay(one, one)
    assert list(results) == [one]
    stored = results[one].stored
    assert stored is not None
    letter = await desk.listed(one)
    assert letter.replayed_at is not None
    assert (letter.replayed_partition, letter.replayed_offset) == (stored.partition, stored.offset)
    assert letter.superseded_by is None
    assert await waiting(desk) == [two]
    async with desk.pool.connection() as connection:
        assert len(await page(connection, Filter(show="all"), after=None, limit=None)) == 2


async def test_a_replay_that_fails_again_is_a_new_dead_letter_that_refers_to_the_previous_one(desk: Desk) -> None:
    chain = [await desk.write_dead_letter(desk.record(value=b"{bad", headers=[("own", b"1")]))]
    for attempt in (2, 3):
        [result] = (await desk.replay(chain[-1])).values()
        assert result.stored is not None
        [record] = [
            r
            for r in await desk.on_topic(DOCUMENTS_LIVE)
            if (r.partition, r.offset) == (result.stored.partition, result.stored.offset)
        ]
        again = Incoming(
            record.topic, record.partition, record.offset, record.key, record.value, list(record.headers), "live"
        )
        chain.append(await desk.write_dead_letter(again))
        old, new = await desk.listed(chain[-2]), await desk.listed(chain[-1])
        assert (new.attempt, new.replay_of, new.first_failed_at) == (attempt, chain[-2], old.first_failed_at)
        assert old.superseded_by == chain[-1]
        assert await waiting(desk) == [chain[-1]]
    letter = (await desk.on_topic(DEAD_LETTERS))[-1]
    headers = dict(letter.headers)
    assert letter.headers[0] == ("own", b"1")
    assert headers["penstock.dead.own-headers"] == b"1", "the marks of a replay are no headers of the record"
    assert headers["penstock.dead.attempt"] == b"3"
    assert headers["penstock.dead.replay-of"] == chain[1].encode()
    assert headers["penstock.dead.first-failed-at"] < headers["penstock.dead.failed-at"]


async def test_dead_letters_that_cannot_be_replayed_are_named_and_the_others_replayed(desk: Desk) -> None:
    gone, kept, strange, foreign, moved = [
        await desk.write_dead_letter(record)
        for record in (
            desk.record(),
            desk.record(),
            desk.record(topic=DOCUMENTS_INDEXED),
            desk.record(),
            desk.record(),
        )
    ]
    admin = AIOKafkaAdminClient(bootstrap_servers=desk.space.settings.kafka.bootstrap)
    await admin.start()
    await admin.delete_records({TopicPartition(desk.name(DEAD_LETTERS), 0): RecordsToDelete(1)})
    await admin.close()
    async with desk.pool.connection() as connection:  # a letter that stands elsewhere, as after a topic made anew
        await connection.execute("UPDATE dead_letters SET letter_offset = 1 WHERE id = %s", [foreign])
        await connection.execute("UPDATE dead_letters SET letter_offset = 99 WHERE id = %s", [moved])
    results = await desk.replay("no:such:1", gone, strange, foreign, moved, kept)
    assert results[kept].stored is not None
    reasons = {id_: r.reason or "" for id_, r in results.items() if not r.settled}
    assert set(reasons) == {"no:such:1", gone, strange, foreign, moved}
    assert "no dead letter" in reasons["no:such:1"]
    assert all("have left the topic" in reasons[id_] for id_ in (gone, foreign, moved))
    assert "documents.indexed.v1" in reasons[strange]
    assert sorted(await waiting(desk)) == sorted([gone, strange, foreign, moved])


async def test_dead_letters_are_replayed_in_the_order_they_were_written(desk: Desk) -> None:
    desk.dead = desk.letters(1_000)
    letters = [await desk.write_dead_letter(desk.record(value=b"%d" % n)) for n in range(250)]
    assert await waiting(desk) == letters
    results = await desk.replay(*letters)
    assert all(r.stored for r in results.values())
    assert [r.value for r in await desk.on_topic(DOCUMENTS_LIVE)] == [b"%d" % n for n in range(250)]


def identity(groups: list[str], minutes: float) -> IdentityChanged:
    return IdentityChanged(
        tenant="acme", source="wiki", principal="ann", groups=groups, observed_at=now() + timedelta(minutes=minutes)
    )


async def test_replaying_an_older_identity_does_not_replace_the_newest_in_the_compacted_topic(desk: Desk) -> None:
    """identities.v1 keeps the record that was sent last: a ledger restored from a backup would read the older one."""
    stage = Identities(desk.pool, desk.dead)

    def record(message: IdentityChanged, value: bytes | None = None) -> Incoming:
        encoded = encode(message)
        return desk.record(encoded.key, value or encoded.value, encoded.headers, IDENTITIES)

    old, newest = record(identity(["staff", "board"], -10)), record(identity(["staff"], -5))
    broken, newer = record(identity([], 0), b"{"), record(identity(["staff", "new"], -1))
    letters = [await desk.write_dead_letter(r, stage="identities") for r in (old, broken, newer)]
    await stage.handle([newest])
    results = await desk.replay(*letters)
    first, second, third = (results[id_] for id_ in letters)
    assert (first.stored, first.settled) == (None, True)
    assert "newer" in (first.reason or "")
    assert (second.stored, second.settled) == (None, False)
    assert "still invalid" in (second.reason or "")
    assert third.stored is not None
    assert [r.value for r in await desk.on_topic(IDENTITIES)] == [newer.value]
    assert await waiting(desk) == [letters[1]]
    listed = await desk.listed(letters[0])
    assert listed.replayed_at is not None
    assert listed.replayed_offset is None


@pytest.mark.parametrize("table", ["person_floors", "membership_floors"])
async def test_replaying_the_identity_of_somebody_who_was_forgotten_sends_nothing(desk: Desk, table: str) -> None:
    """The stage refuses the record, and the compacted topic would hold the name for good."""
    message = identity(["staff"], -10)
    encoded = encode(message)
    record = desk.record(encoded.key, encoded.value, encoded.headers, IDENTITIES)
    letter = await desk.write_dead_letter(record, stage="identities")
    which = subject_digest(message.principal) if table == "person_floors" else message.source
    await desk.space.execute(f"INSERT INTO {table} VALUES (%s, %s, %s)", message.tenant, which, now())
    result = (await desk.replay(letter))[letter]
    assert (result.stored, result.settled) == (None, True)
    assert await desk.on_topic(IDENTITIES) == []


async def test_valid_identities_are_accepted_before_the_bad_ones_of_their_batch_become_dead_letters(desk: Desk) -> None:
    desk.dead = desk.letters(0)
    good = encode(identity(["staff"], 0))
    batch = [
        desk.record(b"acme/wiki/bob", b"{", good.headers, IDENTITIES),
        desk.record(good.key, good.value, good.headers, IDENTITIES),
    ]
    from pipeline.core.errors import Deferred

    with pytest.raises(Deferred):
        await Identities(desk.pool, desk.dead).handle(batch)
    assert await desk.space.query("SELECT principal FROM memberships") == [("ann",)]
    desk.dead = desk.letters(1)
    await Identities(desk.pool, desk.dead).handle(batch)
    assert len(await waiting(desk)) == 1
