"""The readers of an issue, its restricted comments and its files, compared with what the fake shows to each person."""

from __future__ import annotations

import asyncio
import random

import pytest

from connectors.fakes.jira_state import Grant, Issue, User
from connectors.jira import Jira
from connectors.source import Document, Reaction
from tests.support.connectors.jira_kit import Office, readers
from tests.support.connectors.reading import changed, everything, groups, listing, read


def people(office: Office) -> dict[str, User]:
    return {user.email.lower(): user for user in office.state.users.values()}


def admitted(office: Office, issue: Issue) -> set[str]:
    """Return the principals to whom Jira shows an issue, if they log in."""
    return {address for address, user in people(office).items() if office.state.may_see(user, issue)}


def all_grants(office: Office, role: str) -> list[Grant]:
    return [
        Grant("group", "staff"),
        Grant("user", office.otto.account_id),
        Grant("projectRole", role),
        Grant("applicationRole", "jira-software"),
        Grant("applicationRole"),
        Grant("projectLead"),
        Grant("reporter"),
        Grant("assignee"),
        Grant("userCustomField", "customfield_10010"),
        Grant("groupCustomField", "customfield_10011"),
        Grant("sd.customer.portal.only"),
    ]


async def test_jira_shows_an_issue_to_its_readers_whatever_the_scheme_and_level(office: Office) -> None:
    """The connector's account is named in every scheme and level, because what it does not see is not read."""
    state, project, chance = office.state, office.eng, random.Random(7)
    role = state.add_role("Developers")
    state.add_group("devs", office.sam)
    state.applications = {"jira-software": {"devs"}, "jira-core": {"staff"}}
    bot = Grant("user", office.bot.account_id)
    levels = [state.add_level(project, f"Level {number}") for number in range(3)]
    users = [office.ines, office.otto, office.sam]
    project.lead = office.sam.account_id
    project.grants = [bot]
    issues = [state.add_issue(project, f"Issue {number}", "Text.") for number in range(6)]
    source = office.jira(page_size=50, sweep_page_size=50)
    seen: set[int] = set()
    for _ in range(25):
        grants = all_grants(office, role)
        project.grants = [bot, *chance.sample(grants, chance.randint(0, 3))]
        project.roles = {role: {chance.choice(["%devs", office.ines.account_id])}}
        for level in levels:
            level.members = [bot, *chance.sample(grants[:-1], chance.randint(0, 3))]
        for issue in issues:
            issue.level = chance.choice([None, None, *(level.id for level in levels)])
            issue.reporter = chance.choice(users).account_id
            issue.assignee = chance.choice([None, *(user.account_id for user in users)])
            custom = {"customfield_10010": chance.choice(users).account_id, "customfield_10011": ["devs"]}
            issue.custom = {name: value for name, value in custom.items() if chance.random() < 0.7}
        source = office.jira(page_size=50, sweep_page_size=50)
        documents = await everything(source)
        for issue in issues:
            entry = documents[issue.id]
            assert isinstance(entry, Document)
            expected = admitted(office, issue)
            assert await readers(source, entry) == expected, (project.grants, levels, issue)
            seen.add(len(expected))
    assert seen == {1, 2, 3, 4}


async def test_without_a_holder_nobody_may_read(office: Office) -> None:
    issue = office.state.add_issue(office.eng, "One", "Text.")
    source = office.jira()
    before = await read(source, issue.id)
    office.eng.grants = [Grant("sd.customer.portal.only"), Grant("organisation", "9"), Grant("anyone")]
    assert await readers(source, before) == set()
    [tag] = before.acl_tags
    assert (await groups(source))[tag].members == []
    problem = f"holders of type organisation in project {office.eng.key}"
    assert "does not know that type" in office.set_aside.reasons()[problem]


async def test_what_anybody_may_read_is_readable_for_the_holders_of_a_tag_of_the_settings(office: Office) -> None:
    office.eng.grants = [Grant("anyone")]
    issue = office.state.add_issue(office.eng, "One", "Text.")
    closed = office.jira()
    assert await readers(closed, await read(closed, issue.id)) == set()
    staff = office.staff.id if office.fake.cloud else "staff"
    opened = office.jira(anonymous_tag=f"group:{staff}")
    assert await readers(opened, await read(opened, issue.id)) == {"ines@example.com", "penstock@example.com"}


@pytest.mark.parametrize("by", ["scheme", "role", "group", "level", "reporter", "application"])
async def test_a_withdrawn_permission_takes_effect_with_the_holders_of_tags_whatever_the_issue_says(
    office: Office, by: str
) -> None:
    """The issue is not read again: its ``updated`` stays the same."""
    state, project, otto = office.state, office.eng, office.otto
    bot = Grant("user", office.bot.account_id)
    role = state.add_role("Developers")
    readers_group = state.add_group("readers", otto)
    project.roles = {role: {otto.account_id}}
    state.applications = {"jira-software": {"readers"}}
    grant = {
        "scheme": Grant("user", otto.account_id),
        "role": Grant("projectRole", role),
        "group": Grant("group", "readers"),
        "level": Grant("user", otto.account_id),
        "reporter": Grant("reporter"),
        "application": Grant("applicationRole", "jira-software"),
    }[by]
    project.grants = [bot, grant]
    level = state.add_level(project, "Some", bot, grant)
    restricted = state.add_issue(project, "One", "Text.", reporter=otto.account_id, level=level.id)
    document = await read(office.jira(), restricted.id)
    assert await readers(office.jira(), document) == {"otto@example.com", "penstock@example.com"}
    before = restricted.updated
    match by:
        case "scheme" | "reporter":
            project.grants.remove(grant)
        case "level":
            level.members.remove(grant)
        case "role":
            project.roles[role] = set()
        case "group" | "application":
            readers_group.members.clear()
    assert restricted.updated == before
    assert await readers(office.jira(), document) == {"penstock@example.com"}


async def test_a_scheme_that_begins_to_admit_reporters_causes_a_sweep_which_finds_them(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.jira.access.RULES_SECONDS", 0.0)
    issue = office.state.add_issue(office.eng, "One", "Text.", reporter=office.otto.account_id)
    source = office.jira()
    await listing(source)
    office.eng.grants.append(Grant("reporter"))
    await groups(source)
    reactions: list[Reaction] = []

    async def react(reaction: Reaction) -> None:
        reactions.append(reaction)

    listening = asyncio.create_task(source.listen(react))
    async with asyncio.timeout(30):
        while not any(reaction.sweep for reaction in reactions):
            await asyncio.sleep(0.05)
    listening.cancel()
    assert "otto@example.com" in await readers(source, (await listing(source))[issue.id])


async def test_an_issue_of_a_team_managed_project_is_readable_for_the_roles_that_it_names(cloud: Office) -> None:
    state = cloud.state
    roles = [state.add_role(name) for name in ("Leads", "Guests", "Others")]
    people = {roles[0]: {cloud.ines.account_id}, roles[1]: {cloud.bot.account_id}, roles[2]: {cloud.otto.account_id}}
    cloud.eng.roles = people
    cloud.eng.grants.append(Grant("user", cloud.sam.account_id))
    issue = state.add_issue(cloud.eng, "One", "Text.", restricted_to=(roles[0], roles[1]))
    document = await read(cloud.jira(), issue.id)
    assert await readers(cloud.jira(), document) == {"ines@example.com", "penstock@example.com"}


# Comments


async def test_a_restricted_comment_is_a_document_of_its_own_for_whom_jira_shows_it(office: Office) -> None:
    state = office.state
    role = state.add_role("Developers")
    office.eng.roles = {role: {office.bot.account_id, office.sam.account_id}}
    office.eng.grants += [Grant("user", office.sam.account_id), Grant("user", office.otto.account_id)]
    issue = state.add_issue(office.eng, "One", "Described.")
    state.comment(issue, "Said to all.", office.ines)
    state.comment(issue, "Said to the role.", office.ines, visibility=("role", role))
    state.comment(issue, "Said to the group.", office.ines, visibility=("group", "staff"))
    state.comment(issue, "Said to the role again.", office.sam, visibility=("role", role))
    source = office.jira()
    documents = {id: entry for id, entry in (await everything(source)).items() if isinstance(entry, Document)}
    public = documents.pop(issue.id)
    assert "Said to all." in public.content
    assert "Said to the" not in public.content
    expected = {
        "Said to the role.": {"sam@example.com", "penstock@example.com"},
        "Said to the group.": {"ines@example.com", "penstock@example.com"},
    }
    assert len(documents) == len(expected)
    for document in documents.values():
        [text] = [text for text in expected if text in document.content]
        assert await readers(source, document) == expected[text]
        assert document.title == "Comments on ENG-1: One"
        assert document.source_url is not None
        assert "focusedCommentId=" in document.source_url
    [of_role] = [document.content for document in documents.values() if "Said to the role." in document.content]
    assert of_role == "**Ines**:\n\nSaid to the role.\n\n**Sam**:\n\nSaid to the role again."


async def test_a_comment_that_becomes_restricted_leaves_the_issue_at_once(office: Office) -> None:
    state = office.state
    issue = state.add_issue(office.eng, "One", "Described.")
    comment = state.comment(issue, "A secret.")
    source = office.jira()
    cursor = await source.start()
    _, cursor = await changed(source, cursor)
    state.edit_comment(issue, comment, visibility=("group", "staff"))
    entries, _ = await changed(source, cursor)
    own = [id for id in entries if id != issue.id]
    assert [isinstance(entries[id], Document) for id in own] == [True]
    public = entries[issue.id]
    assert isinstance(public, Document)
    assert "secret" not in public.content


async def test_internal_comments_of_a_service_project_are_for_its_agents(cloud: Office) -> None:
    state = cloud.state
    role = state.add_role("Service Desk Team")
    desk = state.add_project(
        "DESK",
        Grant("group", "staff"),
        Grant("projectRole", role),
        Grant("reporter"),
        Grant("sd.customer.portal.only"),
        Grant("projectRole", role, "SERVICEDESK_AGENT"),
        type="service_desk",
        roles={role: {cloud.bot.account_id, cloud.sam.account_id}},
    )
    issue = state.add_issue(desk, "Broken", "It is broken.", reporter=cloud.otto.account_id)
    state.comment(issue, "We will see.", cloud.sam)
    state.comment(issue, "The customer is wrong.", cloud.sam, is_internal=True)
    state.attach(issue, "trace.txt", b"A trace.")
    state.comment(issue, media("trace.txt"), cloud.sam, is_internal=True)
    source = cloud.jira()
    documents = {id: entry for id, entry in (await everything(source)).items() if isinstance(entry, Document)}
    public = documents[issue.id]
    internal = documents[f"{issue.id}/comments/agents"]
    [file] = [entry for id, entry in documents.items() if "/attachment/" in id]
    assert "We will see." in public.content
    assert "wrong" not in public.content
    assert "wrong" in internal.content
    assert file.content == "A trace."
    agents = {"sam@example.com", "penstock@example.com"}
    assert await readers(source, public) == agents | {"ines@example.com", "otto@example.com"}
    assert await readers(source, internal) == await readers(source, file) == agents


@pytest.mark.parametrize("most", [None, 0])
async def test_a_file_of_a_restricted_comment_is_restricted_although_comments_are_not_read(
    cloud: Office, most: int | None
) -> None:
    cloud.fake.most_comments = most
    cloud.eng.grants.append(Grant("user", cloud.otto.account_id))
    issue = cloud.state.add_issue(cloud.eng, "One", "Text.")
    file = cloud.state.attach(issue, "trace.txt", b"A trace.")
    cloud.state.comment(issue, media("trace.txt"), visibility=("group", "staff"))
    source = cloud.jira(comments=False)
    documents = await everything(source)
    assert documents.keys() == {issue.id, f"{issue.id}/attachment/{file.id}"}
    entry = documents[f"{issue.id}/attachment/{file.id}"]
    assert isinstance(entry, Document)
    assert await readers(source, entry) == {"ines@example.com", "penstock@example.com"}


def media(name: str) -> dict[str, object]:
    node = {"type": "media", "attrs": {"type": "file", "id": "8d1d", "alt": name, "collection": ""}}
    return {"type": "doc", "version": 1, "content": [{"type": "mediaGroup", "content": [node]}]}


async def test_data_center_does_not_say_which_comments_of_a_service_project_are_internal(data_center: Office) -> None:
    state = data_center.state
    desk = state.add_project("DESK", Grant("group", "staff"), type="service_desk")
    issue = state.add_issue(desk, "Broken", "It is broken.")
    state.comment(issue, "Perhaps internal.")
    source = data_center.jira(email_domain="example.com")
    documents = await everything(source)
    public, other = documents[issue.id], documents[f"{issue.id}/comments/agents"]
    assert isinstance(public, Document)
    assert isinstance(other, Document)
    assert "Perhaps" not in public.content
    assert await readers(source, other) == set()
    desk.grants.append(Grant("group", "staff", "SERVICEDESK_AGENT"))
    assert await readers(office_after(data_center), other) == {"ines@example.com", "penstock@example.com"}


def office_after(office: Office) -> Jira:
    """Return an instance without anything in memory."""
    return office.jira(email_domain="example.com")


# People


async def test_a_person_is_their_address_from_the_settings_or_from_jira_and_nobody_else_without_one(
    cloud: Office,
) -> None:
    for user in (cloud.ines, cloud.sam):
        user.shows_email = False
        cloud.staff.members.add(user.account_id)
    issue = cloud.state.add_issue(cloud.eng, "One", "Text.")
    source = cloud.jira(principals={cloud.sam.account_id: "Samuel@Example.com"})
    expected = {f"account:{cloud.ines.account_id}", "samuel@example.com", "penstock@example.com"}
    assert await readers(source, await read(source, issue.id)) == expected
    [problem] = await source.check()
    assert (problem.code, cloud.ines.account_id in problem.message) == ("addresses_hidden", True)


async def test_data_centers_user_names_are_addresses_in_the_companys_domain(data_center: Office) -> None:
    data_center.ines.shows_email = False
    issue = data_center.state.add_issue(data_center.eng, "One", "Text.")
    source = data_center.jira(email_domain="acme.example")
    assert await readers(source, await read(source, issue.id)) == {"ines@acme.example", "penstock@example.com"}


@pytest.mark.parametrize("state", ["inactive", "app", "customer"])
async def test_accounts_that_cannot_log_in_hold_nothing(cloud: Office, state: str) -> None:
    role = cloud.state.add_role("Developers")
    cloud.eng.roles = {role: {cloud.otto.account_id}}
    cloud.eng.grants += [
        Grant("user", cloud.otto.account_id),
        Grant("projectRole", role),
        Grant("reporter"),
        Grant("projectLead"),
    ]
    cloud.eng.lead = cloud.otto.account_id
    cloud.staff.members.add(cloud.otto.account_id)
    issue = cloud.state.add_issue(cloud.eng, "One", "Text.", reporter=cloud.otto.account_id)
    if state == "inactive":
        cloud.otto.is_active = False
    else:
        cloud.otto.account_type = "app" if state == "app" else "customer"
    source = cloud.jira()
    assert await readers(source, await read(source, issue.id)) == {"ines@example.com", "penstock@example.com"}


# What the account may not see


@pytest.mark.parametrize("path", ["permissionscheme", "group/member", "/role/"])
async def test_access_that_the_account_may_not_see_admits_nobody_and_is_named(office: Office, path: str) -> None:
    state = office.state
    role = state.add_role("Developers")
    by_role = Grant("projectRole", role)
    office.eng.roles = {role: {office.ines.account_id, office.bot.account_id}}
    office.eng.grants = [by_role if path == "/role/" else Grant("group", "staff")]
    other = state.add_project("OPEN", Grant("user", office.ines.account_id), Grant("user", office.bot.account_id))
    issue, seen = state.add_issue(office.eng, "One", "Text."), state.add_issue(other, "Two", "Text.")
    source = office.jira()
    documents = await everything(source)
    closed, open_document = documents[issue.id], documents[seen.id]
    assert isinstance(closed, Document)
    assert isinstance(open_document, Document)
    office.fake.faults.denied = {f"project/{office.eng.id}/{path}" if path == "permissionscheme" else path}
    assert await readers(source, closed) == set()
    assert await readers(source, open_document) == {"ines@example.com", "penstock@example.com"}
    await groups(source)
    assert any("until then it admits nobody" in reason for reason in office.set_aside.reasons().values())
    assert any("Administer" in problem.message for problem in await source.check())


async def test_the_members_of_a_level_that_the_account_may_not_see_are_nobody(cloud: Office) -> None:
    level = cloud.state.add_level(cloud.eng, "Board", Grant("group", "staff"))
    issue = cloud.state.add_issue(cloud.eng, "One", "Text.", level=level.id)
    cloud.fake.faults.denied = {"issuesecurityschemes"}
    source = cloud.jira()
    assert await readers(source, await read(source, issue.id)) == set()
    cloud.fake.faults.denied = set()
    again = cloud.jira()
    assert await readers(again, await read(again, issue.id)) == {"ines@example.com", "penstock@example.com"}
