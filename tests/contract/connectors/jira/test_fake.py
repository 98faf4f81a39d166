"""Every exchange of the connector and the fake is held to Atlassian's published descriptions of Jira."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.jira import FakeJira, Flavour
from connectors.fakes.jira_state import Grant
from connectors.source import Document
from tests.support.connectors.jira_kit import Office, changed, everything, groups, listing, office_in
from tests.support.connectors.jira_schema import CLOUD, DATA_CENTER, Recorder, violations


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


@pytest.mark.parametrize("flavour", ["cloud", "data-center"])
async def test_every_exchange_matches_atlassians_published_description(flavour: Flavour, tmp_path: Path) -> None:
    recorders: list[Recorder] = []

    def around(fake: FakeJira) -> Recorder:
        recorders.append(Recorder(fake))
        return recorders[0]

    async with office_in(tmp_path, flavour, around) as office:
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
        assert set(recorder.judged) == set(CLOUD if flavour == "cloud" else DATA_CENTER)


def test_the_description_finds_what_does_not_belong() -> None:
    comment: dict[str, Any] = {"id": "1", "body": {}, "created": "2026-01-01", "jsdPublic": True}
    schema = {"$ref": "#/schemas/Comment"}
    assert list(violations(comment, schema)) == []
    for name, value in [("text", "a"), ("id", 1), ("jsdPublic", "yes"), ("visibility", {"type": "everybody"})]:
        assert list(violations({**comment, name: value}, schema)), name
