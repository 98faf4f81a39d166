"""The poll for changes, its cursor, and what only a sweep finds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.fakes.jira_state import Grant
from connectors.set_aside import SetAside
from connectors.source import CursorExpired, Document, Gone
from tests.support.connectors.jira_kit import Office
from tests.support.connectors.reading import changed, everything, listing, read


def downloads(office: Office) -> int:
    return sum("/media/" in line or "/secure/attachment/" in line for line in office.fake.requests)


async def test_a_poll_reads_what_was_updated_once(office: Office) -> None:
    state = office.state
    issues = [state.add_issue(office.eng, f"Issue {number}", "Text.") for number in range(8)]
    source = office.jira()
    state.advance(days=1)
    entries, cursor = await changed(source, await source.start())
    assert entries == {}
    state.edit(issues[1], description="An edit.")
    state.comment(issues[2], "A comment.")
    new = state.add_issue(office.eng, "New", "Text.")
    entries, cursor = await changed(source, cursor)
    assert entries.keys() == {issues[1].id, issues[2].id, new.id}
    entries, cursor = await changed(source, cursor)
    assert entries == {}


async def test_an_update_that_the_search_shows_late_is_read(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    cursor = (await changed(source, await source.start()))[1]
    office.state.edit(issue, description="An edit.")
    office.fake.index_delay = timedelta(minutes=5)
    entries, cursor = await changed(source, cursor)
    assert entries == {}
    office.state.advance(minutes=5)
    entries, cursor = await changed(source, cursor)
    assert entries.keys() == {issue.id}


async def test_the_search_is_by_the_servers_clock_and_no_written_time(office: Office) -> None:
    """Jira reads a written time in the time zone of the account's profile, which is Sydney here."""
    source = office.jira()
    at = datetime.now(UTC) - timedelta(minutes=30)
    await changed(source, {"at": at.isoformat(), "seen": {}})
    [search] = [line for line in office.fake.requests if "updated" in line]
    assert "updated+%3E%3D+%22-40m%22" in search or "updated+%3E%3D+%22-41m%22" in search


@pytest.mark.parametrize(
    "cursor", [{}, {"at": "soon", "seen": {}}, {"at": "2026-01-01", "seen": []}, {"at": "2020-01-01", "seen": {}}]
)
async def test_a_cursor_that_is_old_or_unknown_has_expired(office: Office, cursor: dict[str, object]) -> None:
    with pytest.raises(CursorExpired):
        await changed(office.jira(), cursor)


async def test_files_of_an_updated_issue_are_read_only_if_they_are_new_or_their_access_changed(office: Office) -> None:
    state = office.state
    level = state.add_level(office.eng, "Board", Grant("group", "staff"))
    issue = state.add_issue(office.eng, "One", "Text.")
    first = state.attach(issue, "a.txt", b"About a.")
    source = office.jira()
    await everything(source)
    cursor = (await changed(source, await source.start()))[1]
    assert downloads(office) == 1
    state.edit(issue, description="An edit.")
    entries, cursor = await changed(source, cursor)
    assert (entries.keys(), downloads(office)) == ({issue.id}, 1)
    second = state.attach(issue, "b.txt", b"About b.")
    entries, cursor = await changed(source, cursor)
    assert (entries.keys(), downloads(office)) == ({issue.id, f"{issue.id}/attachment/{second.id}"}, 2)
    state.edit(issue, level=level.id)
    entries, cursor = await changed(source, cursor)
    assert downloads(office) == 4
    for id in (issue.id, f"{issue.id}/attachment/{first.id}", f"{issue.id}/attachment/{second.id}"):
        entry = entries[id]
        assert isinstance(entry, Document)
        assert len(entry.required_tags) == 1
    state.edit(issue, attachments=[])
    entries, cursor = await changed(source, cursor)
    assert {id for id, entry in entries.items() if isinstance(entry, Gone)} == entries.keys() - {issue.id}
    assert len(entries) == 3


async def test_reading_one_document_by_name_does_not_hide_a_new_file_from_the_poll(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    cursor = (await changed(source, await source.start()))[1]
    file = office.state.attach(issue, "a.txt", b"About a.")
    await read(source, issue.id)
    entries, _ = await changed(source, cursor)
    assert f"{issue.id}/attachment/{file.id}" in entries


async def test_reading_one_document_by_name_does_not_hide_a_new_restriction_of_a_file_from_the_poll(
    office: Office,
) -> None:
    level = office.state.add_level(office.eng, "Board", Grant("group", "staff"))
    issue = office.state.add_issue(office.eng, "One", "Text.")
    file = office.state.attach(issue, "a.txt", b"About a.")
    source = office.jira()
    cursor = (await changed(source, await source.start()))[1]
    office.state.edit(issue, level=level.id)
    await read(source, issue.id)
    entries, _ = await changed(source, cursor)
    entry = entries[f"{issue.id}/attachment/{file.id}"]
    assert isinstance(entry, Document)
    assert entry.required_tags


async def test_an_issue_that_is_deleted_between_search_and_reading_is_gone_with_its_files(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    file = office.state.attach(issue, "a.txt", b"About a.")
    source = office.jira()
    await listing(source)
    cursor = await source.start()
    pages = source.changes(cursor)
    site = source._site

    async def changed_then_deleted(*_: object) -> dict[str, str]:
        office.state.issues.pop(issue.id, None)
        return {issue.id: "2026-01-01T00:00:00.000+0000"}

    site.changed = changed_then_deleted  # type: ignore[assignment,method-assign]
    page = await anext(pages)
    assert list(page.entries) == [Gone(issue.id), Gone(f"{issue.id}/attachment/{file.id}")]


async def test_a_sweep_finds_deleted_issues_and_comments_and_renames_that_update_nothing(office: Office) -> None:
    state = office.state
    issues = [state.add_issue(office.eng, f"Issue {number}", "Text.") for number in range(4)]
    comment = state.comment(issues[0], "To be deleted.")
    state.comment(issues[0], "To stay.")
    runner = MemoryRunner(office.jira(), SetAside())
    assert await runner.full()
    assert await runner.changes()
    state.delete_comment(issues[0], comment)
    state.delete(issues[1])
    issues[2].status = "Renamed status"
    assert await runner.changes()
    assert "To be deleted." in runner.published[issues[0].id].content
    assert await runner.sweep()
    assert runner.deleted == [issues[1].id]
    assert "To be deleted." not in runner.published[issues[0].id].content
    assert "To stay." in runner.published[issues[0].id].content
    assert runner.published[issues[2].id].metadata["status"] == "Renamed status"


async def test_the_last_restricted_comment_takes_its_document_with_it(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    comment = office.state.comment(issue, "A secret.", visibility=("group", "staff"))
    runner = MemoryRunner(office.jira(), SetAside())
    assert await runner.full()
    [own] = runner.published.keys() - {issue.id}
    office.state.delete_comment(issue, comment)
    assert await runner.sweep()
    assert runner.deleted == [own]


async def test_more_projects_than_a_search_can_name_are_searched_together(office: Office) -> None:
    for number in range(45):
        office.state.add_project(f"P{number}", Grant("group", "staff"))
    hidden = office.state.add_project("HIDDEN", Grant("group", "staff"))
    office.state.add_issue(hidden, "Not selected", "Text.")
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira(exclude_projects=("HIDDEN",))
    assert (await changed(source, await source.start()))[0].keys() == {issue.id}
