"""Confluence, read: everything, and what is there, in both flavours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from threading import get_ident
from typing import Any

import pytest

import connectors.room as room
from connectors.atlassian import Person
from connectors.confluence import cloud, content
from connectors.confluence.markup import users
from connectors.source import Document, Gone, Listed, Unreadable
from connectors.strangers import Strangers
from tests.support.connectors.confluence_kit import Wiki


async def test_first_crawl_reads_pages_blog_posts_comments_and_attachments(site: Wiki) -> None:
    top = site.page(
        "Runbook", f'<p>Ask <ac:link><ri:user ri:{_user_key(site)}="{site.ann.account_id}"/></ac:link>.</p>'
    )
    post = site.page("News", kind="blogpost")
    comment = site.state.add_comment(top.id, "<p>Is this still true?</p>", author=site.ann.account_id, selection="Ask")
    site.state.add_comment(top.id, "<p>It is.</p>", parent=comment.id, author=site.bob.account_id, selection="Ask")
    file = site.state.attach(post.id, "notes.txt", b"Bring your own mug.", "text/plain")
    site.state.attach(post.id, "photo.png", b"\x89PNG", "image/png")

    results = await site.full()

    assert set(results) == {top.id, post.id, file.id}  # a picture has no text
    page = results[top.id]
    assert isinstance(page, Document)
    assert page.content == (
        "Ask @Ann.\n\n## Comments\n\n**Ann** about “Ask”:\n\nIs this still true?\n\n**Bob** answers:\n\nIt is."
    )
    assert (page.title, page.author, page.media_type) == ("Runbook", "Bot", "text/markdown")
    assert (
        page.source_url
        == f"{site.url}{'/spaces/ENG/pages/' if site.fake.cloud else '/pages/viewpage.action?pageId='}{top.id}"
    )
    assert page.metadata == {"space": "ENG", "type": "page"}
    attached = results[file.id]
    assert isinstance(attached, Document)
    assert (attached.title, attached.content) == ("notes.txt", "Bring your own mug.")
    assert attached.metadata["page"] == post.id
    assert not list(site.folder.iterdir())  # no file is left behind


async def test_large_pages_are_read_a_few_at_a_time(site: Wiki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 25_000)
    start = await site.source.start()
    ids = {site.page(f"Page {number}", f"<p>{'x' * 5_000}</p>").id for number in range(8)}
    for reading in (site.source.full(None), site.source.changes(start)):
        pages = [page async for page in reading]
        assert {entry.external_id for page in pages for entry in page.entries if isinstance(entry, Document)} == ids
        assert max(len(page.entries) for page in pages) <= 2
        assert pages[0].cursor is None, "an interruption reads the whole page again"
        assert pages[-1].cursor is not None


async def test_invented_mentions_do_not_keep_it_from_all_other_requests(
    site: Wiki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data Center takes a request for each: a page of 16 MB took hours, each time that it was read. And it was searched
    for them while nothing else had its turn."""
    invented = "".join(f'<ri:user ri:{_user_key(site)}="nobody{number}"/>' for number in range(50))
    page = site.page("Runbook", f'<ri:user ri:{_user_key(site)}="{site.ann.account_id}"/>{invented}')
    requested: list[str] = []
    threads: set[int] = set()
    people = site.source._site.people

    async def noted_people(ids: Sequence[str], **more: Any) -> Mapping[str, Person]:
        requested.extend(ids)
        return await people(ids, **more)

    def noted(text: str) -> set[str]:
        threads.add(get_ident())
        return users(text)

    monkeypatch.setattr(site.source._site, "people", noted_people)
    monkeypatch.setattr(site.source, "_strangers", Strangers(5))
    monkeypatch.setattr("connectors.confluence.source.PEOPLE_AT_ONCE", 2)
    monkeypatch.setattr(content, "users", noted)
    for _ in range(3):
        [entry] = await site.source.fetch([page.id])
        assert isinstance(entry, Document)
        assert entry.content.startswith("@Ann")
    assert len(requested) < 10
    assert threads
    assert get_ident() not in threads


async def test_labels_are_metadata_and_a_change_of_them_is_another_revision(site: Wiki) -> None:
    """A label makes no new version in Confluence. A favourite is a label that only its owner sees."""
    page = site.page("Travel")
    plain = (await site.full())[page.id]
    site.state.label(page.id, "travel", "policy")
    [[listed]] = [entries async for entries in site.source.slim() if entries]
    [read] = await site.source.fetch([page.id])
    assert isinstance(plain, Document)
    assert isinstance(read, Document)
    assert "labels" not in plain.metadata
    assert read.metadata == {"space": "ENG", "type": "page", "labels": ["policy", "travel"]}
    assert isinstance(listed, Listed)
    assert listed.revision == read.revision != plain.revision


async def test_a_full_read_resumes_from_the_cursor_of_any_page(site: Wiki) -> None:
    ids = {site.page(f"Page {n}").id for n in range(8)}
    pages = [page async for page in site.source.full(None)]
    assert len(pages) > 3
    for n, page in enumerate(pages):
        rest = await site.full(page.cursor)
        before = {entry.external_id for earlier in pages[: n + 1] for entry in earlier.entries}
        assert set(rest) | before == ids
        assert len(set(rest) & before) <= 1


async def test_pages_removed_during_a_full_read_hide_no_others(site: Wiki) -> None:
    made = [site.page(f"Page {n}") for n in range(40)]
    site.source = site.connect(page_size=12)
    met: set[str] = set()
    async for page in site.source.full(None):
        met |= {entry.external_id for entry in page.entries}
        for entry in list(page.entries)[:3]:
            site.state.trash(entry.external_id)
    assert met == {item.id for item in made}


async def test_a_listing_holds_the_same_entries_and_revisions_as_a_full_read(site: Wiki) -> None:
    top = site.page("Top")
    below = [site.page(f"Below {n}", parent=top.id) for n in range(4)]
    site.state.add_comment(below[0].id, "<p>Hm.</p>")
    site.state.attach(below[1].id, "a.txt", b"words", "text/plain")
    site.state.attach(below[1].id, "a.zip", b"PK", "application/zip")
    site.page("News", kind="blogpost")
    site.state.trash(below[2].id)
    site.state.restrict(top.id, users={site.bot.account_id})

    listed, read = await site.slim(), await site.full()

    assert set(listed) == set(read)
    for id_, entry in read.items():
        assert isinstance(entry, Document)
        assert (listed[id_].revision, listed[id_].acl_tags) == (entry.revision, entry.acl_tags)
        assert listed[id_].required_tags == entry.required_tags


async def test_a_fetched_document_equals_the_one_of_a_full_read(site: Wiki) -> None:
    """Else every event would be a change."""
    page = site.page("Top")
    site.state.add_comment(page.id, "<p>Hm.</p>")
    file = site.state.attach(page.id, "a.txt", b"words", "text/plain")
    read = await site.full()
    fetched = await site.source.fetch([page.id, file.id])
    assert {entry.external_id: entry for entry in fetched} == read


async def test_every_change_of_content_but_not_of_access_changes_the_revision(site: Wiki) -> None:
    page = site.page("Top")
    seen = [(await site.slim())[page.id].revision]

    async def changed() -> None:
        seen.append((await site.slim())[page.id].revision)

    site.state.edit(page.id, body="<p>Other</p>")
    await changed()
    site.state.edit(page.id, title="Other title")
    await changed()
    remark = site.state.add_comment(page.id, "<p>Hm.</p>")
    await changed()
    site.state.edit(remark.id, body="<p>Hm!</p>")
    await changed()
    site.state.trash(remark.id)
    await changed()
    site.state.add_space("OPS", groups={"staff"})
    site.state.move(page.id, None, space="OPS")
    await changed()
    site.state.restrict(page.id, users={site.bot.account_id})
    same = (await site.slim())[page.id].revision
    assert len(set(seen)) == len(seen) - 1  # without its comment it is as it was before
    assert seen[5] == seen[2]
    assert same == seen[-1]  # access is no content


async def test_an_edit_after_version_renumbering_changes_the_revision(site: Wiki) -> None:
    """Deleting an old version in Confluence renumbers the later ones: 3 becomes 2, and the next edit is 3 again."""
    site.state.freeze(datetime(2026, 11, 21, 10, tzinfo=UTC))
    page = site.page("Top")
    site.state.advance(minutes=1)
    site.state.edit(page.id, body="<p>Two</p>")
    before = (await site.full())[page.id]
    del page.versions[0]
    site.state.advance(minutes=1)
    site.state.edit(page.id, body="<p>Three</p>")
    after = (await site.full())[page.id]
    assert isinstance(before, Document)
    assert isinstance(after, Document)
    assert page.version_number == 2
    assert before.revision != after.revision
    assert before.version is after.version is None  # the runner's grow, Confluence's need not


async def test_trashed_purged_and_unknown_ids_are_gone_until_restored(site: Wiki) -> None:
    page, purged = site.page("Page"), site.page("Purged")
    file = site.state.attach(page.id, "a.txt", b"words", "text/plain")
    site.state.trash(page.id)
    site.state.purge(purged.id)
    requests = [page.id, purged.id, file.id, "99999999", "att99999999", "no id at all", "../../admin"]
    assert set(await site.source.fetch(requests)) == {Gone(id_) for id_ in requests}
    assert await site.slim() == {}
    site.state.restore(page.id)
    assert set(await site.slim()) == {page.id, file.id}


async def test_a_moved_page_stays_the_same_document(site: Wiki) -> None:
    page, elsewhere = site.page("Wanderer"), site.page("Elsewhere")
    site.state.add_space("OPS", users={site.bot.account_id})
    before = (await site.full())[page.id]
    site.state.move(page.id, elsewhere.id)
    after = (await site.full())[page.id]
    assert before == after
    site.state.move(page.id, None, space="OPS")
    moved = (await site.full())[page.id]
    assert isinstance(moved, Document)
    assert moved.acl_tags == ("space:OPS",)
    assert moved.metadata["space"] == "OPS"


async def test_only_the_configured_spaces_are_read(site: Wiki) -> None:
    for key in ("OPS", "HR"):
        site.state.add_space(key, groups={"staff"})
    page = site.state.add_page("OPS", "Ops", "<p>o</p>")
    hidden = site.state.add_page("HR", "Pay", "<p>h</p>")
    site.source = site.connect(spaces=["ENG", "OPS"])
    assert set(await site.full()) == {page.id}
    assert await site.source.fetch([hidden.id]) == [Gone(hidden.id)]
    entries, _ = await site.changes(await site.source.start())
    assert [entry.external_id for entry in entries] == [page.id]
    site.source = site.connect(exclude_spaces=["HR"])
    assert set(await site.full()) == {page.id}


async def test_comments_attachments_and_blog_posts_that_are_switched_off_are_not_read(site: Wiki) -> None:
    page = site.page("Page")
    site.state.add_comment(page.id, "<p>Said</p>")
    file = site.state.attach(page.id, "a.txt", b"words", "text/plain")
    post = site.page("News", kind="blogpost")
    site.source = site.connect(comments=False, attachments=False, blog_posts=False)
    read = await site.full()
    assert set(read) == set(await site.slim()) == {page.id}
    assert "Said" not in read[page.id].content  # type: ignore[union-attr]
    assert await site.source.fetch([file.id, post.id]) == [Gone(file.id), Gone(post.id)]


async def test_all_comments_and_attachments_are_read_over_several_pages_of_results(site: Wiki) -> None:
    page = site.page("Busy")
    for n in range(60):
        site.state.add_comment(page.id, f"<p>Remark {n}.</p>")
        site.state.attach(page.id, f"{n}.txt", b"words", "text/plain")
    site.source = site.connect(page_size=50)
    read, listed = await site.full(), await site.slim()
    assert len(read) == len(listed) == 61
    assert all(f"Remark {n}." in read[page.id].content for n in range(60))  # type: ignore[union-attr]
    assert listed[page.id].revision == read[page.id].revision


async def test_a_page_of_more_comments_than_are_read_is_not_read_again_with_each_sweep(
    site: Wiki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "MAX_COMMENTS", 3)
    page = site.page("Busy")
    first, *_ = [site.state.add_comment(page.id, f"<p>Remark {n}.</p>") for n in range(5)]
    site.state.add_comment(page.id, "<p>Reply.</p>", parent=first.id)
    listed, read, [fetched] = await site.slim(), await site.full(), await site.source.fetch([page.id])
    assert isinstance(fetched, Document)
    assert fetched == read[page.id]
    assert fetched.revision == listed[page.id].revision


async def test_broken_and_too_large_attachments_are_unreadable_entries(site: Wiki) -> None:
    page = site.page("Page")
    broken = site.state.attach(page.id, "broken.pdf", b"%PDF-1.7 no more", "application/pdf")
    large = site.state.attach(page.id, "large.txt", b"x" * 2_000, "text/plain")
    site.source = site.connect(max_attachment_bytes=1_000)
    read = await site.full()
    for item, code in ((broken, "broken"), (large, "too_large")):
        entry = read[item.id]
        assert isinstance(entry, Unreadable)
        assert (entry.code, entry.acl_tags) == (code, ("space:ENG",))
        assert entry.revision == (await site.slim())[item.id].revision  # the same bytes are not tried again


async def test_an_attachment_larger_than_its_declared_size_is_unreadable(site: Wiki) -> None:
    page = site.page("Page")
    file = site.state.attach(page.id, "grown.txt", b"x", "text/plain")
    site.source = site.connect(max_attachment_bytes=1_000)
    shown = (await site.source._site.get([file.id]))[0]
    file.data = b"x" * 100_000
    entry = await site.source._files.read(shown, {}, None)
    assert isinstance(entry, Unreadable)
    assert entry.code == "too_large"


def _user_key(site: Wiki) -> str:
    return "account-id" if site.fake.cloud else "userkey"
