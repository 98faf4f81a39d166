"""Burying on real Kafka and Postgres: every byte and header, repeats, the limit, and a world that is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pipeline.core.errors import Deferred, Poison, Retryable
from pipeline.core.producers import Unauthorised
from pipeline.ledger.letters import Filter, counts, page
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import MAX_RETRY_SECONDS
from pipeline.stages.detect import Detect
from tests.support.pipeline.dead_kit import INVALID, Desk, open_desk
from tests.support.query.library import document
from tests.support.space import Space
from topics.codec import Headers, encode
from topics.letters import RawRecord, Replay, mark_replay
from topics.registry import DEAD_LETTERS, DOCUMENTS_LIVE, MAX_MESSAGE_BYTES

pytestmark = pytest.mark.stack


@pytest.fixture
async def desk(space: Space) -> AsyncIterator[Desk]:
    async with open_desk(space) as desk:
        yield desk


@pytest.mark.parametrize("first_failed_at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_a_forged_header_of_a_replay_does_not_make_the_list_of_dead_letters_unreadable(
    desk: Desk, first_failed_at: str
) -> None:
    mark = Replay("documents.live.v1:3:41", 1, datetime.fromisoformat(first_failed_at))
    forged = mark_replay(RawRecord(b"", b"", []), mark).headers
    await desk.dead.add(desk.record(headers=forged), stage="detect", error=Unauthorised("unsigned", "it is not signed"))
    async with desk.pool.connection() as connection:
        [listed] = await page(connection, Filter(), after=None, limit=None)
    assert (listed.code, listed.attempt, listed.replay_of) == ("unsigned", 1, None)


async def test_a_dead_letter_holds_the_record_and_where_and_why_it_failed(desk: Desk) -> None:
    before = datetime.now(UTC)
    record = desk.record(value=b"{broken", headers=[("ce_type", b"x")])
    await desk.write_dead_letter(record)
    [letter] = await desk.on_topic(DEAD_LETTERS)
    assert (letter.key, letter.value) == (b"acme/wiki/a.md", b"{broken")
    headers = dict(letter.headers)
    failed = datetime.fromisoformat(headers["penstock.dead.failed-at"].decode())
    assert before <= failed <= datetime.now(UTC)
    assert list(letter.headers) == [
        ("ce_type", b"x"),
        ("__connect.errors.topic", record.topic.encode()),
        ("__connect.errors.partition", b"2"),
        ("__connect.errors.offset", b"1"),
        ("__connect.errors.stage", b"detect"),
        ("__connect.errors.exception.class.name", b"invalid"),
        ("__connect.errors.exception.message", b"title: too long"),
        ("penstock.dead.attempt", b"1"),
        ("penstock.dead.failed-at", failed.isoformat().encode()),
        ("penstock.dead.first-failed-at", failed.isoformat().encode()),
        ("penstock.dead.own-headers", b"1"),
    ]
    listed = await desk.listed(f"{record.topic}:2:1")
    assert (listed.stage, listed.code, listed.message) == ("detect", "invalid", "title: too long")
    assert (listed.tenant, listed.source, listed.external_id) == ("acme", "wiki", "a.md")
    assert (listed.letter_partition, listed.letter_offset) == (letter.partition, letter.offset)
    assert (listed.attempt, listed.first_failed_at, listed.value_bytes) == (1, failed, 7)
    assert (listed.replayed_at, listed.replay_of, listed.superseded_by) == (None, None, None)


RECORDS: list[tuple[bytes, bytes | None, Headers]] = [
    (b"\xff\xfe/no/utf-8", b"\x00\x80\xff", []),
    (b"acme/wiki/tombstone", None, [("a", b"1")]),
    (b"acme/wiki/empty", b"", [("", b""), ("empty", b"")]),
    (b"", b"no key", [("same", b"1"), ("same", b"2"), ("same", b"1")]),
    (b"acme/wiki/nul\x00\x00", b"x", [("null", None)]),  # type: ignore[list-item]  # Kafka's header may have no value
    (b"acme/wiki/letter", b"x", [("__connect.errors.topic", b"theirs"), ("penstock.dead.own-headers", b"0")]),
    (b"acme/wiki/mark", b"x", [("penstock.replay.of", b"theirs"), ("penstock.replay.own-headers", b"9")]),
    (b"acme/wiki/" + b"n" * 50_000, b"x", []),
    ("acme/wiki/\N{WATER WAVE}\x1b[31m".encode(), b"x", [("\N{WATER WAVE}", b"x")]),
]


async def test_any_record_is_replayed_byte_for_byte(desk: Desk) -> None:
    ids = [await desk.write_dead_letter(desk.record(*parts)) for parts in RECORDS]
    results = await desk.replay(*ids)
    assert [r.reason for r in results.values()] == [None] * len(RECORDS)
    replayed = {(r.partition, r.offset): r for r in await desk.on_topic(DOCUMENTS_LIVE)}
    for id_, (key, value, headers) in zip(ids, RECORDS, strict=True):
        stored = results[id_].stored
        assert stored is not None
        record = replayed[stored.partition, stored.offset]
        assert (record.key, record.value) == (key, value)
        marks = dict(record.headers[len(headers) :])
        assert list(record.headers[: len(headers)]) == headers
        assert (marks["penstock.replay.of"], marks["penstock.replay.attempt"]) == (id_.encode(), b"1")


async def test_a_record_that_fails_repeatedly_is_listed_as_one_dead_letter(desk: Desk) -> None:
    record = desk.record()
    for _ in range(3):
        await desk.write_dead_letter(record)
    assert len(await desk.on_topic(DEAD_LETTERS)) == 1
    await desk.letters(60).add(record, stage="detect", error=INVALID)  # another process knows nothing of it
    assert len(await desk.on_topic(DEAD_LETTERS)) == 2
    async with desk.pool.connection() as connection:
        assert await counts(connection, Filter()) == [("invalid", 1)]
    assert (await desk.listed(f"{record.topic}:2:1")).letter_offset == 0


async def test_an_error_message_invalid_in_postgres_or_utf_8_does_not_prevent_a_dead_letter(desk: Desk) -> None:
    record = desk.record()
    await desk.dead.add(record, stage="detect", error=Poison("odd", "nul \x00 and lone \ud800"))
    assert (await desk.listed(f"{record.topic}:2:1")).message == "nul \N{REPLACEMENT CHARACTER} and lone \\ud800"


async def test_an_unexpected_exception_becomes_a_dead_letter_without_its_message(desk: Desk) -> None:
    record = desk.record()
    await desk.dead.add(record, stage="detect", error=ZeroDivisionError("secret"))
    listed = await desk.listed(f"{record.topic}:2:1")
    assert (listed.code, listed.message) == ("bug", "ZeroDivisionError in detect")


async def test_an_oversized_record_becomes_a_dead_letter_with_only_its_size_and_digest(desk: Desk) -> None:
    largest = await desk.write_dead_letter(desk.record(b"k", b"x" * (MAX_MESSAGE_BYTES - 1)))
    value = await desk.write_dead_letter(desk.record(value=b"x" * (MAX_MESSAGE_BYTES + 1)))
    headers = await desk.write_dead_letter(desk.record(headers=[("h", b"x" * MAX_MESSAGE_BYTES)]))
    results = await desk.replay(largest, value, headers)
    assert results[largest].stored is not None
    assert "value: 27262977 bytes, sha256 " in (results[value].reason or "")
    assert "headers: 27262" in (results[headers].reason or "")
    assert (await desk.listed(value)).value_bytes == MAX_MESSAGE_BYTES + 1


# The limit


async def test_beyond_the_limit_no_dead_letter_is_written_until_the_pause_is_over(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    dead = desk.dead = desk.letters(20)
    metrics = dead._metrics.registry
    records = [desk.record() for _ in range(200)]
    refused = []
    for record in [*records, *records]:  # a lane tries again what was refused
        try:
            await dead.add(record, stage="detect", error=INVALID)
        except Deferred as error:
            refused.append(error)
    assert len(await desk.on_topic(DEAD_LETTERS)) == 20
    assert len(refused) == 360
    assert {e.service for e in refused} == {"dead-letters"}
    assert all("wait 60 s" in str(e) and e.retry_after == MAX_RETRY_SECONDS for e in refused)
    assert "\n" not in str(refused[0])
    assert metrics.get_sample_value("penstock_dead_letter_floods_total") == 1
    desk.clock.now = 45.0
    assert metrics.get_sample_value("penstock_dead_letter_pause_seconds") == 15
    desk.clock.now = 60.0
    for record in records[20:40]:
        await dead.add(record, stage="detect", error=INVALID)
    with pytest.raises(Deferred) as again:
        await dead.add(records[40], stage="detect", error=INVALID)
    assert "wait 120 s" in str(again.value)
    assert metrics.get_sample_value("penstock_dead_letter_floods_total") == 2
    restarted = desk.letters(1000)
    for record in records[40:]:
        await restarted.add(record, stage="detect", error=INVALID)
    async with desk.pool.connection() as connection:
        assert await counts(connection, Filter()) == [("invalid", 200)]


async def test_a_valid_event_is_accepted_while_the_poison_of_its_batch_is_deferred(desk: Desk) -> None:
    good = encode(document("good.md", "Some text."))
    batch = [desk.record(value=b"{"), desk.record(good.key, good.value, good.headers)]
    batch = [replace(record, lane="backfill") for record in batch]

    def detect(per_minute: int) -> Detect:
        announcer = Announcer(desk.pool, desk.producer, desk.metrics)
        return Detect(
            desk.pool,
            desk.producer,
            desk.letters(per_minute),
            announcer,
            lambda _: lambda texts: [len(text.split()) for text in texts],
            desk.metrics,
            batch_size=8,
            grace_seconds=30,
        )

    with pytest.raises(Deferred):
        await detect(0).handle(batch)
    assert await desk.space.query("SELECT external_id FROM documents") == [("good.md",)]
    await detect(1).handle(batch)
    async with desk.pool.connection() as connection:
        assert len(await page(connection, Filter(), after=None, limit=None)) == 1


# A world that is away


async def test_a_dead_letter_refused_by_kafka_is_retryable(desk: Desk) -> None:
    record = desk.record(value=random.Random(0).randbytes(100_000))  # compression leaves it as large as it is
    await desk.configure(DEAD_LETTERS, max_message_bytes="1000")
    with pytest.raises(Retryable) as away:
        await desk.write_dead_letter(record)
    assert away.value.service == "kafka"
    assert await desk.on_topic(DEAD_LETTERS) == []
    await desk.configure(DEAD_LETTERS, max_message_bytes=str(MAX_MESSAGE_BYTES + 2**16))
    id_ = await desk.write_dead_letter(record)
    assert (await desk.listed(id_)).letter_offset == 0
    assert [r.value for r in await desk.on_topic(DEAD_LETTERS)] == [record.value]


async def test_an_interrupted_dead_letter_is_written_by_the_next_attempt(desk: Desk) -> None:
    record = desk.record()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):  # the producer gathers a batch for four times as long
            await desk.write_dead_letter(record)
    id_ = await desk.write_dead_letter(record)
    records = await desk.on_topic(DEAD_LETTERS)
    assert 1 <= len(records) <= 2
    assert {r.value for r in records} == {record.value}
    assert (await desk.listed(id_)).letter_offset in {r.offset for r in records}


async def test_an_outage_of_postgres_after_a_dead_letter_was_sent_neither_loses_nor_repeats_it(desk: Desk) -> None:
    record = desk.record()
    dsn = desk.space.settings.postgres.dsn.get_secret_value()
    database = conninfo_to_dict(dsn)["dbname"]
    admin = make_conninfo(**{**conninfo_to_dict(dsn), "dbname": "postgres"})
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS false')
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database])
        with pytest.raises(Retryable) as away:
            await desk.write_dead_letter(record)
        assert away.value.service == "postgres"
        assert len(await desk.on_topic(DEAD_LETTERS)) == 1
        connection.execute(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS true')
    id_ = await _write_after_outage(desk, record)
    assert len(await desk.on_topic(DEAD_LETTERS)) == 1
    assert (await desk.listed(id_)).letter_offset == 0


async def _write_after_outage(desk: Desk, record: object) -> str:
    for _ in range(50):
        try:
            return await desk.write_dead_letter(record)  # type: ignore[arg-type]
        except Retryable:
            await asyncio.sleep(0.2)
    raise AssertionError("Postgres did not come back")


# The list


async def test_the_list_of_dead_letters_is_filtered_and_paged_newest_first(desk: Desk) -> None:
    for n in range(5):
        await desk.write_dead_letter(desk.record(key=f"acme/wiki/{n}.md".encode()))
    await desk.dead.add(desk.record(key=b"other/drive/x"), stage="identities", error=Poison("wrong_topic", "x"))
    async with desk.pool.connection() as connection:

        async def names(chosen: Filter, after: str | None = None, limit: int | None = None) -> list[str]:
            letters = await page(connection, chosen, after=after, limit=limit)
            return [letter.external_id or "" for letter in letters]

        everything = ["x", "4.md", "3.md", "2.md", "1.md", "0.md"]
        assert await names(Filter()) == everything
        first = await page(connection, Filter(), after=None, limit=2)
        assert await names(Filter(), after=first[-1].id, limit=2) == everything[2:4]
        assert await names(Filter(tenant="other")) == ["x"]
        assert await names(Filter(stage="identities")) == ["x"]
        assert await names(Filter(source="wiki")) == everything[1:]
        assert await names(Filter(code="invalid", tenant="other")) == []
        assert await names(Filter(since=datetime.now(UTC) + timedelta(hours=1))) == []
        assert await counts(connection, Filter()) == [("invalid", 5), ("wrong_topic", 1)]
