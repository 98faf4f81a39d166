"""Changes in Confluence since the last read, in both flavours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from connectors.source import CursorExpired, Document, Gone
from tests.support.connectors.confluence_kit import Wiki, wiki


async def test_a_poll_without_changes_reads_no_page_again(site: Wiki) -> None:
    for n in range(5):
        site.page(f"Page {n}")
    entries, cursor = await site.changes(await site.source.start())
    assert len(entries) == 5  # the overlap: what was there shortly before is seen once
    site.fake.requests.clear()
    entries, cursor = await site.changes(cursor)
    assert entries == []
    assert site.count_requests("storage") == 0
    assert len(site.fake.requests) <= 5
    entries, _ = await site.changes(cursor)
    assert entries == []


async def test_edits_comments_and_new_attachments_are_read_as_changes(site: Wiki) -> None:
    old, commented = site.page("Old"), site.page("Commented")
    site.state.advance(hours=-3)
    for item in (old, commented):
        item.versions[:] = [site.state.now()]
    site.state.advance(hours=3)
    _, cursor = await site.changes(await site.source.start())

    site.state.edit(old.id, body="<p>New words.</p>")
    site.state.add_comment(commented.id, "<p>A question</p>")
    file = site.state.attach(old.id, "b.txt", b"file words", "text/plain")
    entries, cursor = await site.changes(cursor)

    texts = {entry.external_id: entry.content for entry in entries if isinstance(entry, Document)}
    assert texts[old.id] == "New words."
    assert "A question" in texts[commented.id]
    assert texts[file.id] == "file words"
    assert len(entries) == 3
    assert (await site.changes(cursor))[0] == []


async def test_the_overlap_of_polls_catches_pages_that_the_search_index_shows_late(site: Wiki) -> None:
    site.state.freeze(datetime(2026, 11, 21, 10, tzinfo=UTC))
    site.fake.index_delay = timedelta(minutes=4)
    _, cursor = await site.changes(await site.source.start())
    page = site.page("Slow to be found")
    entries, cursor = await site.changes(cursor)
    assert entries == []
    site.state.advance(minutes=5)
    entries, cursor = await site.changes(cursor)
    assert [entry.external_id for entry in entries] == [page.id]
    assert (await site.changes(cursor))[0] == []


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles", "Asia/Kolkata"])
async def test_changes_are_read_whatever_the_time_zone_of_the_account(site: Wiki, zone: str) -> None:
    site.bot.time_zone = zone
    _, cursor = await site.changes(await site.source.start())
    page = site.page("Anywhere")
    entries, _ = await site.changes(cursor)
    assert [entry.external_id for entry in entries] == [page.id]


async def test_a_page_created_while_changes_are_read_is_in_the_same_read(site: Wiki) -> None:
    for n in range(9):
        site.page(f"Page {n}")
    cursor = await site.source.start()
    late: list[str] = []
    met: list[str] = []
    async for page in site.source.changes(cursor):
        met += [entry.external_id for entry in page.entries]
        if not late:
            late.append(site.page("Late").id)
    assert late[0] in met
    assert len(met) == len(set(met)) == 10


async def test_an_interrupted_read_of_changes_resumes_at_its_cursor(site: Wiki) -> None:
    ids = {site.page(f"Page {n}").id for n in range(7)}
    pages = site.source.changes(await site.source.start())
    first = await anext(pages)
    await pages.aclose()  # type: ignore[attr-defined]
    entries, _ = await site.changes(first.cursor)
    rest = {entry.external_id for entry in entries}
    assert rest | {entry.external_id for entry in first.entries} == ids
    assert not rest & {entry.external_id for entry in first.entries}


async def test_a_page_moved_to_the_trash_is_reported_gone_once(site: Wiki) -> None:
    page, other = site.page("Gone soon"), site.page("Gone long ago")
    site.state.trash(other.id)
    _, cursor = await site.changes(await site.source.start())
    site.state.trash(page.id)
    entries, cursor = await site.changes(cursor)
    assert entries == [Gone(page.id)]
    assert (await site.changes(cursor))[0] == []


@pytest.mark.parametrize("cursor", [{}, {"at": 3, "seen": {}, "trash": []}, {"at": "2026-11-21", "seen": 1}])
async def test_a_malformed_cursor_counts_as_expired(site: Wiki, cursor: dict[str, object]) -> None:
    with pytest.raises(CursorExpired):
        await site.changes(cursor)


async def test_many_pages_are_fetched_without_a_request_for_each(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path, page_size=50) as site:
        pages = [site.page(f"Page {n}") for n in range(50)]
        site.state.add_comment(pages[7].id, "<p>Agreed.</p>")
        site.fake.requests.clear()
        entries = {entry.external_id: entry for entry in await site.source.fetch([page.id for page in pages])}
        assert entries.keys() == {page.id for page in pages}
        commented = entries[pages[7].id]
        assert isinstance(commented, Document)
        assert "Agreed." in commented.content
        assert len(site.fake.requests) < 10


async def test_a_page_that_is_fetched_alone_has_the_comments_that_search_does_not_know(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        page = site.page("Page")
        site.fake.index_delay = timedelta(minutes=5)
        site.state.add_comment(page.id, "<p>Agreed.</p>")
        (entry,) = await site.source.fetch([page.id])
        assert isinstance(entry, Document)
        assert "Agreed." in entry.content


async def test_a_comment_that_a_fetch_of_many_pages_lacks_arrives_with_a_later_poll(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path, page_size=50) as site:
        site.state.freeze(datetime(2026, 11, 21, 12, 0, tzinfo=UTC))
        pages = [site.page(f"Page {n}") for n in range(12)]
        _, cursor = await site.changes(await site.source.start())
        site.fake.index_delay = timedelta(minutes=5)
        site.state.advance(minutes=20)
        site.state.add_comment(pages[7].id, "<p>Agreed.</p>")
        fetched = await site.source.fetch([page.id for page in pages])
        assert not any("Agreed." in entry.content for entry in fetched if isinstance(entry, Document))
        site.state.advance(minutes=5)
        entries, _ = await site.changes(cursor)
        (commented,) = (entry for entry in entries if entry.external_id == pages[7].id)
        assert isinstance(commented, Document)
        assert "Agreed." in commented.content
