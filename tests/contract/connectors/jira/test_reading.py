"""Issues, comments and files as documents; listings, full reads and their cursors."""

from __future__ import annotations

from datetime import timedelta

import pytest

import connectors.room as room
from connectors.fakes.jira_state import Grant
from connectors.portions import in_portions
from connectors.source import CursorExpired, Document, Gone, Unreadable
from connectors.web import Limits
from pipeline.core.errors import Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.jira_kit import Office
from tests.support.connectors.reading import everything, listing, read


async def test_an_issue_is_a_document_with_its_comments_and_metadata(office: Office) -> None:
    issue = office.state.add_issue(
        office.eng,
        "Printer <b>burns</b>",
        "It is on fire.\n\nReally & truly.",
        reporter=office.otto.account_id,
        assignee=office.sam.account_id,
        labels=["fire", "urgent"],
        status="In Progress",
    )
    office.state.comment(issue, "Use water.", office.ines)
    document = await read(office.jira(site_url="https://jira.acme.example"), issue.id)
    assert document.title == "ENG-1: Printer <b>burns</b>"
    assert document.content == "It is on fire.\n\nReally & truly.\n\n## Comments\n\n**Ines**:\n\nUse water."
    assert document.media_type == "text/markdown"
    assert document.source_url == "https://jira.acme.example/browse/ENG-1"
    assert document.author == "Otto"
    assert document.source_modified_at is not None
    assert abs(document.source_modified_at - issue.updated) < timedelta(milliseconds=1)
    assert document.metadata == {
        "kind": "issue",
        "project": "ENG",
        "key": "ENG-1",
        "type": "Task",
        "status": "In Progress",
        "priority": "Medium",
        "assignee": "Sam",
        "reporter": "Otto",
        "labels": ["fire", "urgent"],
        "comments": 1,
    }


async def test_large_issues_of_a_page_are_read_a_few_at_a_time(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 12_000)
    source = office.jira()
    start = await source.start()
    ids = {office.state.add_issue(office.eng, f"Issue {number}", "x" * 5_000).id for number in range(8)}
    for reading in (source.full(None), source.changes(start)):
        pages = [page async for page in reading]
        assert {entry.external_id for page in pages for entry in page.entries if isinstance(entry, Document)} == ids
        assert max(len(page.entries) for page in pages) <= 2
        assert pages[0].cursor is None, "an interruption reads the whole page again"
        assert pages[-1].cursor is not None


async def test_the_comments_of_an_issue_are_not_read_again_for_each_of_its_documents(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An issue of 32 MB of comments and fifty files was read more than fifty times by a sweep."""
    issue = office.state.add_issue(office.eng, "Many comments")
    for number in range(8):
        office.state.comment(issue, f"{number}" * 5_000, office.ines)
    files = [office.state.attach(issue, f"{number}.txt", b"A file.") for number in range(6)]
    ids = [issue.id, *(f"{issue.id}/attachment/{file.id}" for file in files)]
    source = office.jira()
    await source.fetch(ids)
    monkeypatch.setattr(room, "MAX_HELD_BYTES", 60_000)
    office.fake.requests.clear()
    entries = [entry async for _, some in in_portions(ids, source.fetch) for entry in some]
    assert {entry.external_id for entry in entries if isinstance(entry, Document)} == {*ids}
    of_files = ("/attachment/", "/media/")
    assert len([line for line in office.fake.requests if not any(part in line for part in of_files)]) == 1


async def test_an_issue_without_text_is_its_summary(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "Only a summary")
    assert (await read(office.jira(), issue.id)).content == "Only a summary"


@pytest.mark.parametrize("most", [None, 20])
async def test_all_comments_are_read_although_a_search_holds_only_the_first(office: Office, most: int | None) -> None:
    office.fake.most_comments = most
    issue = office.state.add_issue(office.eng, "Long", "Text.")
    for number in range(130):
        office.state.comment(issue, f"Comment number {number}.", office.ines)
    for entry in ((await everything(office.jira()))[issue.id], await read(office.jira(), issue.id)):
        assert isinstance(entry, Document)
        assert [f"Comment number {number}." in entry.content for number in range(130)] == [True] * 130
    assert (await listing(office.jira()))[issue.id].revision == entry.revision


async def test_comments_and_files_can_be_left_out(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    office.state.comment(issue, "A comment.")
    office.state.comment(issue, "A secret.", visibility=("group", "staff"))
    office.state.attach(issue, "a.txt", b"A file.")
    documents = await everything(office.jira(comments=False, attachments=False))
    assert documents.keys() == {issue.id}
    assert "A comment" not in str(documents[issue.id])


async def test_files_are_documents_of_their_own(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    for name, data, kind in (
        ("über & co.txt", b"About a file.", "text/plain"),
        ("shot.png", b"\x89PNG", "image/png"),
        ("clip", b"\0\0", "video/mp4"),
        ("data.zip", b"PK", "application/zip"),
        ("empty.txt", b"", "text/plain"),
    ):
        office.state.attach(issue, name, data, kind)
    source = office.jira(site_url="https://jira.acme.example")
    documents = await everything(source)
    [id] = documents.keys() - {issue.id}
    file = documents[id]
    assert isinstance(file, Document)
    assert (file.title, file.content) == ("über & co.txt", "About a file.")
    assert file.source_url == "https://jira.acme.example/browse/ENG-1"
    assert file.metadata["key"] == "ENG-1"
    assert await read(source, id) == file
    assert list(office.folder.iterdir()) == []


async def test_a_file_that_is_too_large_or_deleted_meanwhile_is_not_read(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    large = office.state.attach(issue, "large.txt", b"x" * 2_000)
    id = f"{issue.id}/attachment/{large.id}"
    source = office.jira(max_attachment_bytes=1_000)
    [entry] = await source.fetch([id])
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.revision) == ("too_large", (await listing(source))[id].revision)
    issue.attachments.clear()
    assert await source.fetch([id]) == [Gone(id)]


async def test_files_come_from_the_media_store_without_the_credential_and_from_no_other_host(cloud: Office) -> None:
    issue = cloud.state.add_issue(cloud.eng, "One", "Text.")
    file = cloud.state.attach(issue, "a.txt", b"About a file.")
    id = f"{issue.id}/attachment/{file.id}"
    async with served(cloud.fake) as media_store:
        cloud.fake.faults.moved_to = media_store
        [refused] = await cloud.jira().fetch([id])
        assert isinstance(refused, Unreadable)
        assert refused.code == "forbidden_address"
        assert "media_hosts" in refused.message
        assert not any("/media/" in line for line in cloud.fake.requests)
        allowed = cloud.jira(media_hosts=(media_store.removeprefix("http://"),))
        assert (await read(allowed, id)).content == "About a file."


async def test_a_moved_issue_keeps_its_id_and_has_the_access_of_its_new_project(office: Office) -> None:
    hr = office.state.add_project("HR", Grant("user", office.bot.account_id))
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    before = await read(source, issue.id)
    office.state.move(issue, hr)
    after = await read(source, issue.id)
    assert (before.acl_tags, after.acl_tags) == ((f"browse:{office.eng.id}",), (f"browse:{hr.id}",))
    assert after.title == "HR-1: One"
    assert before.revision != after.revision


async def test_an_issue_that_is_moved_to_a_project_that_is_not_read_is_gone(office: Office) -> None:
    hr = office.state.add_project("HR", Grant("user", office.bot.account_id))
    issue = office.state.add_issue(office.eng, "One", "Text.")
    other = office.state.add_issue(hr, "Two", "Text.")
    source = office.jira(projects=("ENG",))
    assert (await everything(source)).keys() == {issue.id}
    assert await source.fetch([other.id]) == [Gone(other.id)]
    office.state.move(issue, hr)
    assert await source.fetch([issue.id]) == [Gone(issue.id)]
    without = office.jira(exclude_projects=("HR",))
    assert (await everything(without)).keys() == set()


async def test_archived_projects_and_issues_are_not_read(data_center: Office) -> None:
    state = data_center.state
    old = state.add_project("OLD", Grant("group", "staff"))
    first, second = state.add_issue(data_center.eng, "One", "Text."), state.add_issue(old, "Two", "Text.")
    source = data_center.jira()
    assert (await everything(source)).keys() == {first.id, second.id}
    first.archived = state.now()
    old.is_archived = True
    again = data_center.jira()
    assert await listing(again) == {}
    assert {type(entry) for entry in await again.fetch([first.id, second.id])} == {Gone}


async def test_ids_that_are_unknown_or_not_ours_are_gone(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    ids = ["99999", "ENG-1", f"{issue.id}/attachment/1", f"{issue.id}/comments/agents", "../secret"]
    entries = await office.jira().fetch([issue.id, *ids])
    assert {entry.external_id for entry in entries if isinstance(entry, Gone)} == set(ids)
    assert len(entries) == 1 + len(ids)


async def test_a_listing_shows_what_a_full_read_returns(office: Office) -> None:
    state = office.state
    level = state.add_level(office.eng, "Board", Grant("group", "staff"), Grant("reporter"))
    for number in range(8):
        issue = state.add_issue(office.eng, f"Issue {number}", "Text.", level=level.id if number % 2 else None)
        state.comment(issue, "A comment.")
        state.comment(issue, "A secret.", visibility=("group", "staff"))
        state.attach(issue, "a.txt", b"About a file.")
    source = office.jira()
    documents, listed = await everything(source), await listing(source)
    assert len(documents) == 24
    assert documents.keys() == listed.keys()
    for id, entry in documents.items():
        assert isinstance(entry, Document)
        shown = listed[id]
        assert (entry.acl_tags, entry.required_tags, entry.revision) == (
            shown.acl_tags,
            shown.required_tags,
            shown.revision,
        )


async def test_pages_are_as_small_as_the_server_makes_them(office: Office) -> None:
    ids = {office.state.add_issue(office.eng, f"Issue {number}", "Text.").id for number in range(9)}
    office.fake.faults.most = 2
    source = office.jira(page_size=50, sweep_page_size=100)
    assert (await everything(source)).keys() == (await listing(source)).keys() == ids


async def test_a_full_read_resumes_after_each_page_and_skips_a_project_that_is_gone(office: Office) -> None:
    state = office.state
    projects = [office.eng, *(state.add_project(key, Grant("group", "staff")) for key in ("OPS", "WEB"))]
    ids = [state.add_issue(project, f"Issue {n}", "Text.").id for project in projects for n in range(4)]
    source = office.jira()
    seen: list[str] = []
    cursors = []
    async for page in source.full(None):
        seen += [entry.external_id for entry in page.entries]
        cursors.append((len(seen), page.cursor))
    assert seen == ids
    for count, cursor in cursors:
        rest = [entry.external_id async for page in office.jira().full(cursor) for entry in page.entries]
        assert rest == ids[count:]
    count, cursor = next((count, cursor) for count, cursor in cursors if count == 7)
    projects[1].is_archived = True
    rest = [entry.external_id async for page in office.jira().full(cursor) for entry in page.entries]
    assert rest == ids[8:]
    with pytest.raises(CursorExpired):
        await everything(source, {"project": "ENG"})


async def test_an_expired_token_restarts_a_full_read_and_a_listing(cloud: Office) -> None:
    for number in range(5):
        cloud.state.add_issue(cloud.eng, f"Issue {number}", "Text.")
    source = cloud.jira()
    pages = source.full(None)
    page = await anext(pages)
    cloud.fake.expire_tokens()
    with pytest.raises(CursorExpired):
        await anext(pages)
    with pytest.raises(CursorExpired):
        await everything(source, page.cursor)
    listed = source.slim()
    await anext(listed)
    cloud.fake.expire_tokens()
    with pytest.raises(Retryable):
        await anext(listed)


async def test_an_issue_that_is_deleted_between_two_pages_hides_no_other(data_center: Office) -> None:
    issues = [data_center.state.add_issue(data_center.eng, f"Issue {number}", "Text.") for number in range(40)]
    source = data_center.jira(sweep_page_size=20)
    pages = source.slim()
    seen = {entry.external_id for entry in await anext(pages) if not hasattr(entry, "part")}  # type: ignore[union-attr]
    for issue in issues[:3]:
        data_center.state.delete(issue)
    async for page in pages:
        seen |= {entry.external_id for entry in page if not hasattr(entry, "part")}  # type: ignore[union-attr]
    assert seen == {issue.id for issue in issues}


async def test_the_credential_is_basic_or_bearer(cloud: Office) -> None:
    cloud.state.add_issue(cloud.eng, "One", "Text.")
    assert len(await everything(cloud.jira(email=None))) == 1
    assert len(await everything(cloud.jira(limits=Limits(patience_seconds=5)))) == 1
