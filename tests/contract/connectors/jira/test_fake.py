"""Every exchange of the connector and the fake is held to Atlassian's published description of Jira Data Center."""

from __future__ import annotations

from pathlib import Path

from connectors.fakes.jira import FakeJira
from connectors.fakes.jira_state import Grant
from connectors.source import Document
from tests.support.connectors.jira_kit import Office, office_in
from tests.support.connectors.jira_schema import DATA_CENTER, Recorder
from tests.support.connectors.reading import changed, everything, groups, listing


def furnish(office: Office) -> None:
    """Add something of everything that is shown in its own way."""
    state, project = office.state, office.eng
    role = state.add_role("Developers")
    project.roles = {role: {"%staff", office.sam.account_id}}
    state.applications = {"jira-software": {"staff"}}
    project.grants += [
        Grant("projectRole", role),
        Grant("user", office.otto.account_id),
        Grant("applicationRole", "jira-software"),
        Grant("projectLead"),
        Grant("reporter"),
        Grant("userCustomField", "customfield_10010"),
        Grant("groupCustomField", "customfield_10011"),
        Grant("anyone"),
        Grant("projectRole", role, "SERVICEDESK_AGENT"),
    ]
    level = state.add_level(project, "Board", Grant("projectRole", role), Grant("reporter"))
    first = state.add_issue(
        project,
        "First",
        "Text.",
        level=level.id,
        assignee=office.sam.account_id,
        custom={"customfield_10010": office.otto.account_id, "customfield_10011": "staff"},
    )
    for number in range(22):
        state.comment(first, f"Comment {number}.")
    state.comment(first, "For the staff.", visibility=("group", "staff"))
    state.attach(first, "file.txt", b"About a file.")
    for number in range(4):
        state.add_issue(project, f"Issue {number}", "Text.", restricted_to=(role,) if office.fake.cloud else ())


async def test_every_exchange_matches_atlassians_published_description(tmp_path: Path) -> None:
    recorders: list[Recorder] = []

    def around(fake: FakeJira) -> Recorder:
        recorders.append(Recorder(fake))
        return recorders[0]

    async with office_in(tmp_path, "data-center", around) as office:
        furnish(office)
        office.fake.most_comments = 20
        source = office.jira()
        assert await source.check() == []
        cursor = await source.start()
        read = await everything(source)
        assert set(await listing(source)) == set(read)
        assert {type(entry) for entry in read.values()} == {Document}
        await groups(source)
        await changed(source, cursor)
        await source.fetch([*read, "99999"])
        await listing(office.jira(projects=("ENG",)))
        [recorder] = recorders
        assert recorder.wrong == []
        assert set(recorder.judged) == set(DATA_CENTER)
