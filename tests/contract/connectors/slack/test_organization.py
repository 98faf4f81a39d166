"""An app that is installed in a whole organisation: one instance reads one of its workspaces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.fakes.slack_workspace import Workspace
from connectors.source import Document, Gone
from pipeline.core.errors import Misconfigured
from tests.support.connectors.reading import everything, listing, one
from tests.support.connectors.slack_kit import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


@pytest.fixture
def lab(desk: Desk) -> Workspace:
    """A second workspace of the organisation."""
    lab = Workspace(team_id="T0LAB", domain="lab", first_number=1_000)
    desk.fake.install_in_organization(lab)
    return lab


async def test_each_workspace_is_read_by_an_instance_of_its_own(desk: Desk, lab: Workspace) -> None:
    ann, leo = desk.workspace.user("Ann Lee"), lab.user("Leo Lab")
    ops, bench = desk.workspace.channel("ops", ann), lab.channel("bench", leo)
    ours, theirs = desk.workspace.post(ops, ann, "The plan."), lab.post(bench, leo, "The result.")
    for team, id, author, others in (
        ("T0ACME", f"{ops}:{ours}", "Ann Lee", f"{bench}:{theirs}"),
        ("T0LAB", f"{bench}:{theirs}", "Leo Lab", f"{ops}:{ours}"),
    ):
        source = desk.slack(team=team)
        assert await source.check() == []
        entries = await everything(source)
        assert entries.keys() == (await listing(source)).keys() == {id}
        entry = entries[id]
        assert isinstance(entry, Document)
        assert entry.author == author
        assert await one(source, others) == Gone(others), "an event of the other workspace names it"


async def test_readers_of_a_public_channel_are_the_members_of_its_workspace_alone(desk: Desk, lab: Workspace) -> None:
    desk.workspace.user("Ann Lee")
    lab.channel("bench", lab.user("Leo Lab"))
    source = desk.slack(team="T0LAB")
    groups = {group.tag: (list(group.members), list(group.of)) async for group in source.groups()}
    [channel] = [tag for tag in groups if tag.startswith("channel:")]
    assert groups == {"workspace:T0LAB": (["leo@lab.example"], []), channel: (["leo@lab.example"], ["workspace:T0LAB"])}


async def test_events_of_other_workspaces_are_ignored_unless_both_have_the_channel(desk: Desk, lab: Workspace) -> None:
    ann, leo = desk.workspace.user("Ann Lee"), lab.user("Leo Lab")
    ops, bench = desk.workspace.channel("ops", ann), lab.channel("bench", leo)
    source = desk.slack(team="T0ACME")
    await everything(source)
    desk.fake.sent()
    lab.post(bench, leo, "The result.")
    ts = desk.workspace.post(ops, ann, "The plan.")
    reactions = [await source.on_event(request) for request in desk.fake.sent()]
    assert [list(reaction.ids) for reaction in reactions] == [[], [f"{ops}:{ts}"]]
    lab.channels[ops] = desk.workspace.channels[ops]
    shared = lab.post(ops, leo, "I agree.")
    [request] = desk.fake.sent()
    assert list((await source.on_event(request)).ids) == [f"{ops}:{shared}"]


async def test_a_token_and_a_workspace_that_do_not_fit_are_named(desk: Desk, lab: Workspace) -> None:
    desk.workspace.channel("ops", desk.workspace.user("Ann Lee"))
    [problem] = await desk.slack().check()
    assert problem.message == (
        "the app is installed in a whole organisation: set team to the workspace to read;"
        " it is installed in T0ACME (Acme), T0LAB (Lab)"
    )
    with pytest.raises(Misconfigured, match="chat: the app is installed in a whole organisation"):
        await everything(desk.slack())
    [problem] = await desk.slack(team="T0NEW").check()
    assert problem.message.startswith("the organisation's app is not installed in the workspace T0NEW; it is")
    desk.fake.context.organization = None
    [problem] = await desk.slack(team="T0LAB").check()
    assert (
        problem.message
        == "the token is one of a single workspace, which is not T0LAB: remove team, or correct the token"
    )
    assert await desk.slack(team="T0ACME").check() == []
