"""Many bad records at once, on real Kafka and Postgres: what they cost, what is too many, and where the rest goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from pipeline.core.errors import Poison
from pipeline.core.producers import Unauthorised
from pipeline.ledger.letters import Filter, counts
from pipeline.stages.announce import Announcer
from pipeline.stages.dead import MAX_UNAUTHORISED_PER_MINUTE
from pipeline.stages.detect import Detect
from pipeline.stages.stage import Flooded, Incoming
from tests.support.pipeline.dead_kit import INVALID, Desk, open_desk
from tests.support.query.library import access, deletion, document
from tests.support.space import Space
from topics.codec import encode
from topics.messages import DocumentUpserted
from topics.registry import DEAD_LETTERS, DOCUMENTS_BACKFILL, MAX_MESSAGE_BYTES

pytestmark = pytest.mark.stack


@pytest.fixture
async def desk(space: Space) -> AsyncIterator[Desk]:
    async with open_desk(space) as desk:
        yield desk


def bad(desk: Desk, count: int, source: str = "drive") -> list[Incoming]:
    return [desk.record(f"other/{source}/{n}".encode(), b"{%d" % n, [("n", b"%d" % n)]) for n in range(count)]


def with_errors(records: Sequence[Incoming]) -> list[tuple[Incoming, Poison]]:
    return [(record, INVALID) for record in records]


def detect(desk: Desk, per_minute: int) -> Detect:
    return Detect(
        desk.pool,
        desk.producer,
        desk.letters(per_minute),
        Announcer(desk.pool, desk.producer, desk.metrics),
        lambda _: lambda texts: [len(text.split()) for text in texts],
        desk.metrics,
        batch_size=8,
        grace_seconds=30,
    )


async def letters(desk: Desk) -> int:
    async with desk.pool.connection() as connection:
        return sum(count for _, count in await counts(connection, Filter()))


async def test_the_dead_letters_of_a_batch_are_written_in_one_transaction(desk: Desk) -> None:
    records = bad(desk, 200)
    await desk.letters(1_000).add_all(with_errors(records), stage="detect")
    assert await desk.space.query("SELECT count(*), count(DISTINCT xmin::text) FROM dead_letters") == [(200, 1)]
    sent = await desk.on_topic(DEAD_LETTERS)
    assert sorted((r.key, r.value) for r in sent) == sorted((r.key, r.value) for r in records)


async def test_a_retried_batch_sends_no_dead_letter_twice(desk: Desk) -> None:
    dead, records = desk.letters(1_000), bad(desk, 50)
    await dead.add_all(with_errors(records[:30]), stage="detect")
    await dead.add_all(with_errors(records), stage="detect")
    assert len(await desk.on_topic(DEAD_LETTERS)) == await letters(desk) == 50


async def test_records_beyond_the_limit_are_returned_and_the_others_become_dead_letters(desk: Desk) -> None:
    records = bad(desk, 30)
    with pytest.raises(Flooded) as flood:
        await desk.letters(20).add_all(with_errors(records), stage="detect")
    assert list(flood.value.records) == records[20:]
    assert await letters(desk) == 20


async def test_bad_live_records_beyond_the_limit_move_unchanged_to_the_backfill_topic(desk: Desk) -> None:
    """So they stop nobody's live changes, and nothing of them is lost: there they wait for their turn."""
    stage, records = detect(desk, 20), bad(desk, 30)
    await stage.handle(records)
    assert await letters(desk) == 20
    moved = await desk.on_topic(DOCUMENTS_BACKFILL)
    assert sorted((r.key, r.value, tuple(r.headers)) for r in moved) == sorted(
        (r.key, r.value, tuple(r.headers)) for r in records[20:]
    )
    there = [Incoming(r.topic, r.partition, r.offset, r.key, r.value, list(r.headers), "backfill") for r in moved]
    with pytest.raises(Flooded) as flood:
        await stage.handle(there)
    assert list(flood.value.records) == there
    assert await letters(desk) == 20
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 10, "nothing goes round in a circle"


async def test_once_another_source_succeeds_every_bad_record_becomes_a_dead_letter(desk: Desk) -> None:
    stage, records = detect(desk, 20), bad(desk, 30)
    backfilled = [replace(record, lane="backfill") for record in records]
    with pytest.raises(Flooded):
        await stage.handle(backfilled)
    good = encode(document("good.md", "Some text."))
    await stage.handle([desk.record(good.key, good.value, good.headers)])
    await stage.handle(backfilled)
    await stage.handle(bad(desk, 500))
    assert await letters(desk) == 530
    assert await desk.on_topic(DOCUMENTS_BACKFILL) == []


async def test_a_flood_of_records_that_nobody_has_signed_makes_few_letters_and_loses_none_silently(desk: Desk) -> None:
    """A batch of one kilobyte filled the topic and the table with a letter for each of its million records."""
    dead, records = desk.letters(20), bad(desk, 2_500)
    flood: list[tuple[Incoming, Exception]] = [(r, Unauthorised("unsigned", "it carries no header")) for r in records]
    for at in range(0, 2_500, 500):
        for _ in range(2):  # a batch that is tried again
            await dead.add_all(flood[at : at + 500], stage="detect")
    assert await letters(desk) == len(await desk.on_topic(DEAD_LETTERS)) == MAX_UNAUTHORISED_PER_MINUTE + 3
    shown = await desk.space.query('SELECT "offset", message FROM dead_letters ORDER BY "offset" DESC LIMIT 3')
    for (offset, message), last in zip(shown, (2_499, 1_999, 1_499), strict=True):
        assert offset == records[last].offset
        assert f"; 499 more from offset {records[last - 499].offset} on are not copied" in message
    desk.clock.now += 60
    await dead.add_all(
        [(record, error) for record, (_, error) in zip(bad(desk, 2), flood, strict=False)], stage="detect"
    )
    assert await letters(desk) == MAX_UNAUTHORISED_PER_MINUTE + 5


async def test_an_oversized_record_becomes_a_dead_letter_even_beyond_the_limit(desk: Desk) -> None:
    """It could not be moved: only its size and digest are kept."""
    stage = detect(desk, 1)
    await stage.handle([desk.record(), desk.record(value=b"x" * (MAX_MESSAGE_BYTES + 1))])
    assert await letters(desk) == 2
    assert await desk.on_topic(DOCUMENTS_BACKFILL) == []


def detect_with_live_budget(desk: Desk, live_per_second: float) -> Detect:
    """With a burst of ten times the rate."""
    return Detect(
        desk.pool,
        desk.producer,
        desk.letters(20),
        Announcer(desk.pool, desk.producer, desk.metrics),
        lambda _: lambda texts: [len(text.split()) for text in texts],
        desk.metrics,
        batch_size=32,
        grace_seconds=30,
        live_per_second=live_per_second,
    )


def upserts(desk: Desk, count: int, **fields: object) -> list[Incoming]:
    encoded = [encode(document(f"{n}.md", f"Some text {n}.", **fields)) for n in range(count)]
    return [desk.record(e.key, e.value, e.headers) for e in encoded]


async def test_valid_documents_beyond_a_sources_budget_move_unchanged_to_the_backfill_topic(desk: Desk) -> None:
    stage, records = detect_with_live_budget(desk, 2), upserts(desk, 30)
    await stage.handle(records)
    moved = await desk.on_topic(DOCUMENTS_BACKFILL)
    assert len(moved) >= 9
    by_key = {record.key: record for record in records}
    for record in moved:
        original = by_key.pop(record.key)
        assert (record.value, list(record.headers)) == (original.value, original.headers)
    assert await desk.space.query("SELECT count(*) FROM documents") == [(len(by_key),)]

    await stage.handle([replace(by, lane="backfill") for by in records])
    assert await desk.space.query("SELECT count(*) FROM documents") == [(30,)]
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == len(moved), "the backfill topic moves nothing anywhere"


async def test_a_flood_of_one_source_does_not_defer_documents_of_another(desk: Desk) -> None:
    stage = detect_with_live_budget(desk, 1)
    await stage.handle(upserts(desk, 30) + upserts(desk, 3, source="drive"))
    assert await desk.space.query("SELECT count(*) FROM documents WHERE source = 'drive'") == [(3,)]


async def test_deletes_and_access_changes_are_never_deferred_by_the_sources_budget(desk: Desk) -> None:
    stage = detect_with_live_budget(desk, 0.1)
    documents = [document(f"{n}.md", f"Some text {n}.") for n in range(20)]
    backfilled = [encode(of) for of in documents]
    await stage.handle([replace(desk.record(e.key, e.value, e.headers), lane="backfill") for e in backfilled])
    changes = [encode(access(of, ["boss"])) for of in documents[:10]] + [encode(deletion(of)) for of in documents[10:]]
    await stage.handle([desk.record(e.key, e.value, e.headers) for e in changes])
    assert await desk.space.query("SELECT count(*) FROM documents WHERE deleted_at IS NULL") == [(10,)]
    assert await desk.space.query(
        "SELECT count(*) FROM documents d JOIN access_sets a ON a.id = d.access_id"
        " WHERE d.deleted_at IS NULL AND a.acl_tags = ARRAY['wiki/boss']"
    ) == [(10,)]
    assert not await desk.on_topic(DOCUMENTS_BACKFILL)


async def test_a_deferred_edit_withdraws_access_at_once(desk: Desk) -> None:
    """An edited document that fewer people may read now: its text may wait, the people who lost it may not."""
    stage = detect_with_live_budget(desk, 0.1)
    await stage.handle([replace(record, lane="backfill") for record in upserts(desk, 20)])
    await stage.handle(upserts(desk, 20, acl_tags=["boss"]))
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 19
    assert await desk.space.query(
        "SELECT a.acl_tags, count(*) FROM documents d JOIN access_sets a ON a.id = d.access_id GROUP BY 1"
    ) == [(["wiki/boss"], 20)]


async def test_a_deferred_edit_narrows_at_once_the_access_another_event_of_its_batch_grants(desk: Desk) -> None:
    stage = detect_with_live_budget(desk, 0.1)
    wide = document("a.md", "Some text.", acl_tags=["everyone"])
    narrow = document("a.md", "Other text.", acl_tags=["boss"])
    await stage.handle([desk.record(e.key, e.value, e.headers) for e in map(encode, (wide, narrow))])
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 1
    assert await desk.space.query("SELECT a.acl_tags FROM documents d JOIN access_sets a ON a.id = d.access_id") == [
        (["wiki/boss"],)
    ]


def page(name: str, **fields: object) -> DocumentUpserted:
    """A page that costs as much as 301 small documents."""
    return document(name, "<p>Some text.</p>" + " " * 300 * 1024, media_type="text/html", **fields)


async def test_large_pages_use_up_their_sources_budget(desk: Desk) -> None:
    stage = detect_with_live_budget(desk, 20)  # 200 small documents at once
    pages = [page(f"{n}.html") for n in range(5)]
    notes = [document("note.md", "Some text.", source="drive")]
    await stage.handle([desk.record(e.key, e.value, e.headers) for e in map(encode, pages + notes)])
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 4
    assert await desk.space.query("SELECT source, count(*) FROM documents GROUP BY 1 ORDER BY 1") == [
        ("drive", 1),
        ("wiki", 1),
    ]


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        pytest.param("#\n" * 20_000, "text/markdown", marks=pytest.mark.slow),
        ("a\x1e" * 20_000, "text/x-penstock-messages"),
        ("<li>#" * 10_000, "text/html"),
        pytest.param("word " * 250_000, "text/plain", marks=pytest.mark.slow),
    ],
    ids=["lines", "messages", "tags", "words"],
)
async def test_documents_that_take_long_to_cut_use_up_their_sources_budget(
    desk: Desk, content: str, media_type: str
) -> None:
    """One of them held up all tenants' revocations for as long as thousands of ordinary documents."""
    stage = detect_with_live_budget(desk, 20)
    slow = [document(f"{n}.txt", content, media_type=media_type) for n in range(3)]
    await stage.handle([desk.record(e.key, e.value, e.headers) for e in map(encode, slow)])
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 2


async def test_a_document_that_took_longer_than_expected_uses_up_its_sources_budget(desk: Desk) -> None:
    """Texts without line ends took seven times what they were charged."""
    stage = detect_with_live_budget(desk, 20)
    for n in range(2):
        event = encode(document(f"{n}.txt", "\U0001f44d" * 400_000, media_type="text/plain"))
        await stage.handle([desk.record(event.key, event.value, event.headers)])
    assert len(await desk.on_topic(DOCUMENTS_BACKFILL)) == 1


async def test_a_revocation_is_accepted_before_the_pages_of_its_batch_are_converted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = detect_with_live_budget(desk, 0)
    note = document("note.md", "Some text.")
    encoded = encode(note)
    await stage.handle([desk.record(encoded.key, encoded.value, encoded.headers)])
    readers = "SELECT a.acl_tags FROM documents d JOIN access_sets a ON a.id = d.access_id"

    def convert(html: str) -> str:
        raise MemoryError

    monkeypatch.setattr("pipeline.core.html.to_markdown", convert)
    batch = [encode(message) for message in (page("1.html"), access(note, ["boss"]), page("2.html"))]
    with pytest.raises(MemoryError):
        await stage.handle([desk.record(e.key, e.value, e.headers) for e in batch])
    assert await desk.space.query(readers) == [(["wiki/boss"],)]
