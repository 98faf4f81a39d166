"""Issues, projects and files that fail, limits, outages, and a credential that is no longer valid."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.fakes.jira_state import Grant
from connectors.source import Document, Gone, Unreadable
from connectors.web import Limits
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from tests.support.connectors.jira_kit import Office, unlisted
from tests.support.connectors.reading import changed, everything, groups, listing, read


async def test_an_issue_that_jira_cannot_render_is_unreadable_and_all_others_are_read(office: Office) -> None:
    issues = [office.state.add_issue(office.eng, f"Issue {number}", "Text.") for number in range(7)]
    gone = office.state.add_issue(office.eng, "Gone", "Text.")
    bad = issues[4]
    runner = MemoryRunner(office.jira(page_size=50, sweep_page_size=50), office.set_aside)
    assert await runner.full()
    assert await runner.changes()
    office.fake.faults.broken = {bad.id}
    fresh = MemoryRunner(office.jira(), office.set_aside)
    assert await fresh.full()
    assert fresh.published.keys() == {issue.id for issue in [*issues, gone]} - {bad.id}
    office.state.delete(gone)
    office.state.edit(issues[0], description="An edit.")
    for _ in range(3):
        await runner.changes()
        assert await runner.sweep()
    assert runner.deleted == [gone.id]
    assert runner.published[issues[0].id].content == "An edit."
    assert runner.published[bad.id].content == "Text."
    assert "unavailable" in runner.status
    assert f"issue {bad.id} in project ENG" in runner.status
    office.fake.faults.broken = set()
    for after in (runner, fresh):
        assert await after.sweep()
        assert after.published[bad.id].content == "Text."
    assert office.set_aside.reasons() == {}


async def test_an_issue_that_was_never_read_is_closed_until_jira_renders_it(office: Office) -> None:
    bad = office.state.add_issue(office.eng, "Bad", "Text.")
    office.fake.faults.broken = {bad.id}
    source = office.jira()
    for _ in range(2):
        with pytest.raises(Retryable):
            await source.fetch([bad.id])
    [entry] = await source.fetch([bad.id])
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags, entry.revision) == ("unavailable", (), None)


async def test_a_project_that_refuses_the_account_is_set_aside_and_nothing_of_it_is_gone(office: Office) -> None:
    other = office.state.add_project("OPS", Grant("group", "staff"))
    kept, deleted = (office.state.add_issue(other, name, "Text.") for name in ("Kept", "Deleted"))
    bad = office.state.add_issue(office.eng, "One", "Text.")
    runner = MemoryRunner(office.jira(), office.set_aside)
    assert await runner.full()
    office.fake.faults.denied = {"project+%3D+%22ENG%22"}
    office.state.delete(deleted)
    assert await runner.sweep(), runner.status
    assert runner.deleted == [deleted.id]
    assert runner.published.keys() == {kept.id, bad.id}
    assert "project ENG is set aside" in runner.status
    fresh = MemoryRunner(office.jira(), office.set_aside)
    assert await fresh.full()
    assert fresh.published.keys() == {kept.id}
    office.fake.faults.denied = {"search"}
    with pytest.raises(Misconfigured):
        await listing(office.jira())
    office.fake.faults.denied = set()
    assert await runner.sweep()
    assert office.set_aside.reasons() == {}


@pytest.mark.parametrize("by", ["permission", "archive"])
async def test_a_named_project_that_is_no_longer_visible_is_set_aside_and_stops_no_other_deletion(
    office: Office, by: str
) -> None:
    state = office.state
    other = state.add_project("OPS", Grant("group", "staff"))
    kept, deleted = state.add_issue(other, "Kept", "Text."), state.add_issue(other, "Deleted", "Text.")
    hidden = state.add_issue(office.eng, "One", "Text.")
    named = ("ENG", "OPS")
    runner = MemoryRunner(office.jira(projects=named), office.set_aside)
    assert await runner.full()
    if by == "permission":
        office.eng.grants.clear()
    else:
        office.eng.is_archived = True
    state.delete(deleted)
    again = office.jira(projects=named)  # as after a restart
    runner.source = again
    assert await runner.sweep()
    assert runner.deleted == [deleted.id]
    assert runner.published.keys() == {kept.id, hidden.id}
    [part] = await unlisted(again)
    assert (part.part, part.tag) == ("project ENG", f"browse:{office.eng.id}")
    assert "the account sees no project with the key ENG" in part.reason
    assert any("key ENG" in problem.message for problem in await again.check())
    other.grants.clear()
    with pytest.raises(Misconfigured, match="ENG, OPS"):
        await listing(again)


async def test_a_listing_that_ends_early_deletes_nothing_that_is_still_there(office: Office) -> None:
    issues = [office.state.add_issue(office.eng, f"Issue {number}", "Text.") for number in range(6)]
    office.fake.faults.truncated = True
    source = office.jira()
    assert len(await listing(source)) < 6
    assert isinstance(await read(source, issues[-1].id), Document)


async def test_a_token_that_is_refused_deletes_nothing(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira(token="revoked")
    for attempt in (listing(source), groups(source), read(source, issue.id), everything(source)):
        with pytest.raises(Misconfigured):
            await attempt
    [problem] = await source.check()
    assert problem.code == "token"


async def test_what_an_account_without_access_does_not_see_is_not_taken_for_deleted_without_asking(
    office: Office,
) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    await listing(source)
    office.fake.tokens.clear()
    with pytest.raises(Misconfigured):
        await source.fetch([issue.id])


@pytest.mark.parametrize("fault", ["throttled", "failing"])
async def test_limits_and_failures_that_pass_are_waited_for(office: Office, fault: str) -> None:
    office.state.add_issue(office.eng, "One", "Text.")
    office.fake.faults.retry_after = "0"
    setattr(office.fake.faults, fault, 3)
    patient = Limits(patience_seconds=20, backoff_base_seconds=0.01)
    assert len(await listing(office.jira(limits=patient))) == 1
    assert getattr(office.fake.faults, fault) == 0


async def test_a_limit_is_no_fault_of_the_project(office: Office) -> None:
    office.state.add_issue(office.eng, "One", "Text.")
    office.fake.faults.throttled, office.fake.faults.retry_after = 100, "60"
    with pytest.raises(Deferred):
        await listing(office.jira())
    assert office.set_aside.reasons() == {}


@pytest.mark.parametrize("paging", ["endless", "lost"])
async def test_a_search_that_never_ends_or_loses_its_place_is_no_complete_listing(cloud: Office, paging: Any) -> None:
    other = cloud.state.add_project("OPS", Grant("group", "staff"))
    issues = [cloud.state.add_issue(cloud.eng, f"Issue {number}", "Text.") for number in range(7)]
    cloud.state.add_issue(other, "Other", "Text.")
    cloud.fake.faults.paging = paging
    source = cloud.jira()
    [part] = [part for part in await unlisted(source) if part.tag == f"browse:{cloud.eng.id}"]
    assert "not in Jira's format" in part.reason
    assert len(await listing(source)) < len(issues)


async def test_holders_that_fail_once_keep_their_memberships_and_are_nobody_if_they_always_fail(
    office: Office,
) -> None:
    office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    tag = f"group:{office.staff.id if office.fake.cloud else 'staff'}"
    office.fake.faults.failing_paths = {"group/member"}
    for _ in range(2):
        with pytest.raises(Retryable):
            await groups(source)
    assert tag not in await groups(source)
    assert "until then it admits nobody" in office.set_aside.reasons()[f"holders of {tag}"]
    office.fake.faults.failing_paths = set()
    assert "ines@example.com" in (await groups(source))[tag].members
    assert office.set_aside.reasons() == {}


async def test_a_file_that_always_fails_is_unreadable_and_its_issue_is_read(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    bad, good = office.state.attach(issue, "bad.txt", b"Bad."), office.state.attach(issue, "good.txt", b"Good.")
    name = "attachment/content" if office.fake.cloud else "secure/attachment"
    office.fake.faults.denied = {f"{name}/{bad.id}"}
    documents = await everything(office.jira())
    ids = [f"{issue.id}/attachment/{file.id}" for file in (bad, good)]
    assert [type(documents[id]) for id in (issue.id, *ids)] == [Document, Unreadable, Document]
    entry = documents[ids[0]]
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("unavailable", (f"browse:{office.eng.id}",))


async def test_a_changed_issue_of_a_project_whose_permissions_fail_is_closed_and_others_are_read(
    office: Office,
) -> None:
    other = office.state.add_project("OPS", Grant("group", "staff"))
    source = office.jira()
    cursor = await source.start()
    bad, good = office.state.add_issue(office.eng, "Bad", "Text."), office.state.add_issue(other, "Good", "Text.")
    office.fake.faults.denied = {f"project/{office.eng.id}/"}
    entries, _ = await changed(source, cursor)
    assert all(isinstance(entries[issue.id], Document) for issue in (bad, good))
    assert (await groups(source))[f"browse:{office.eng.id}"].of == []


async def test_an_issue_that_does_not_exist_is_gone_only_while_the_account_is_known(office: Office) -> None:
    assert await office.jira().fetch(["99999"]) == [Gone("99999")]
    office.fake.faults.denied = {"myself"}
    with pytest.raises(Misconfigured):
        await office.jira().fetch(["99999"])


async def test_a_response_that_is_not_jiras_is_an_outage_and_not_an_empty_jira(office: Office) -> None:
    source = office.jira()
    office.fake.context, office.fake.root = "/elsewhere", "/elsewhere"
    office.opened.append(source)
    wrong = office.jira()
    with pytest.raises(Misconfigured):
        await listing(wrong)
    [problem] = await wrong.check()
    assert problem.code == "address"
