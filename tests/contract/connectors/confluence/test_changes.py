"""Changes in Confluence since the last read, in both flavours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from connectors.fakes.confluence import Flavour
from connectors.source import CursorExpired, Document, Gone
from tests.support.connectors.confluence_kit import FLAVOURS, Wiki, wiki


@pytest.fixture(params=FLAVOURS)
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wiki]:
    flavour: Flavour = request.param
    async with wiki(flavour, tmp_path) as made:
        yield made


async def test_a_poll_without_changes_reads_no_page_again(one: Wiki) -> None:
    for n in range(5):
        one.page(f"Page {n}")
    entries, cursor = await one.changes(await one.source.start())
    assert len(entries) == 5  # the overlap: what was there shortly before is seen once
    one.fake.requests.clear()
    entries, cursor = await one.changes(cursor)
    assert entries == []
    assert one.count_requests("storage") == 0
    assert len(one.fake.requests) <= 5
    entries, _ = await one.changes(cursor)
    assert entries == []


async def test_edits_comments_and_new_attachments_are_read_as_changes(one: Wiki) -> None:
    old, commented = one.page("Old"), one.page("Commented")
    one.state.advance(hours=-3)
    for item in (old, commented):
        item.versions[:] = [one.state.now()]
    one.state.advance(hours=3)
    _, cursor = await one.changes(await one.source.start())

    one.state.edit(old.id, body="<p>New words.</p>")
    one.state.add_comment(commented.id, "<p>A question</p>")
    file = one.state.attach(old.id, "b.txt", b"file words", "text/plain")
    entries, cursor = await one.changes(cursor)

    texts = {entry.external_id: entry.content for entry in entries if isinstance(entry, Document)}
    assert texts[old.id] == "New words."
    assert "A question" in texts[commented.id]
    assert texts[file.id] == "file words"
    assert len(entries) == 3
    assert (await one.changes(cursor))[0] == []


async def test_the_overlap_of_polls_catches_pages_that_the_search_index_shows_late(one: Wiki) -> None:
    one.state.freeze(datetime(2026, 11, 21, 10, tzinfo=UTC))
    one.fake.index_delay = timedelta(minutes=4)
    _, cursor = await one.changes(await one.source.start())
    page = one.page("Slow to be found")
    entries, cursor = await one.changes(cursor)
    assert entries == []
    one.state.advance(minutes=5)
    entries, cursor = await one.changes(cursor)
    assert [entry.external_id for entry in entries] == [page.id]
    assert (await one.changes(cursor))[0] == []


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles", "Asia/Kolkata"])
async def test_changes_are_read_whatever_the_time_zone_of_the_account(one: Wiki, zone: str) -> None:
    one.bot.time_zone = zone
    _, cursor = await one.changes(await one.source.start())
    page = one.page("Anywhere")
    entries, _ = await one.changes(cursor)
    assert [entry.external_id for entry in entries] == [page.id]


async def test_a_page_created_while_changes_are_read_is_in_the_same_read(one: Wiki) -> None:
    for n in range(9):
        one.page(f"Page {n}")
    cursor = await one.source.start()
    late: list[str] = []
    met: list[str] = []
    async for page in one.source.changes(cursor):
        met += [entry.external_id for entry in page.entries]
        if not late:
            late.append(one.page("Late").id)
    assert late[0] in met
    assert len(met) == len(set(met)) == 10


async def test_an_interrupted_read_of_changes_resumes_at_its_cursor(one: Wiki) -> None:
    ids = {one.page(f"Page {n}").id for n in range(7)}
    pages = one.source.changes(await one.source.start())
    first = await anext(pages)
    await pages.aclose()  # type: ignore[attr-defined]
    entries, _ = await one.changes(first.cursor)
    rest = {entry.external_id for entry in entries}
    assert rest | {entry.external_id for entry in first.entries} == ids
    assert not rest & {entry.external_id for entry in first.entries}


async def test_a_page_moved_to_the_trash_is_reported_gone_once(one: Wiki) -> None:
    page, other = one.page("Gone soon"), one.page("Gone long ago")
    one.state.trash(other.id)
    _, cursor = await one.changes(await one.source.start())
    one.state.trash(page.id)
    entries, cursor = await one.changes(cursor)
    assert entries == [Gone(page.id)]
    assert (await one.changes(cursor))[0] == []


@pytest.mark.parametrize("cursor", [{}, {"at": 3, "seen": {}, "trash": []}, {"at": "2026-11-21", "seen": 1}])
async def test_a_malformed_cursor_counts_as_expired(one: Wiki, cursor: dict[str, object]) -> None:
    with pytest.raises(CursorExpired):
        await one.changes(cursor)


async def test_many_pages_are_fetched_without_a_request_for_each(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path, page_size=50) as one:
        pages = [one.page(f"Page {n}") for n in range(50)]
        one.state.add_comment(pages[7].id, "<p>Agreed.</p>")
        one.fake.requests.clear()
        entries = {entry.external_id: entry for entry in await one.source.fetch([page.id for page in pages])}
        assert entries.keys() == {page.id for page in pages}
        commented = entries[pages[7].id]
        assert isinstance(commented, Document)
        assert "Agreed." in commented.content
        assert len(one.fake.requests) < 10


async def test_a_page_that_is_fetched_alone_has_the_comments_that_search_does_not_know(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        page = one.page("Page")
        one.fake.index_delay = timedelta(minutes=5)
        one.state.add_comment(page.id, "<p>Agreed.</p>")
        (entry,) = await one.source.fetch([page.id])
        assert isinstance(entry, Document)
        assert "Agreed." in entry.content


async def test_a_comment_that_a_fetch_of_many_pages_lacks_arrives_with_a_later_poll(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path, page_size=50) as one:
        one.state.freeze(datetime(2026, 11, 21, 12, 0, tzinfo=UTC))
        pages = [one.page(f"Page {n}") for n in range(12)]
        _, cursor = await one.changes(await one.source.start())
        one.fake.index_delay = timedelta(minutes=5)
        one.state.advance(minutes=20)
        one.state.add_comment(pages[7].id, "<p>Agreed.</p>")
        fetched = await one.source.fetch([page.id for page in pages])
        assert not any("Agreed." in entry.content for entry in fetched if isinstance(entry, Document))
        one.state.advance(minutes=5)
        entries, _ = await one.changes(cursor)
        (commented,) = (entry for entry in entries if entry.external_id == pages[7].id)
        assert isinstance(commented, Document)
        assert "Agreed." in commented.content
