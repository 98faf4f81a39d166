"""Readers of Slack's channels: members of channels, members of the workspace, guests and strangers; and what ``check``
reports as missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.fakes.slack_workspace import BOT_USER, SCOPES
from connectors.slack.source import POLLED_CHANNELS
from connectors.source import Group
from pipeline.core.errors import Misconfigured
from tests.support.connectors.reading import everything, groups, listing
from tests.support.connectors.slack_kit import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


def readers(results: dict[str, Group], tag: str) -> set[str]:
    """Return the holders of a tag, with groups within groups resolved."""
    if tag not in results:
        return set()
    return set(results[tag].members).union(*(readers(results, inner) for inner in results[tag].of))


async def test_a_public_channel_is_readable_by_full_members_and_by_guests_in_it(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    w.user("Ben Roy")
    guest = w.user("Gus Guest", is_restricted=True)
    w.user("Other Guest", is_ultra_restricted=True)
    gone = w.user("Dee Gone", deleted=True)
    bot = w.user("Bot", is_bot=True)
    ops = w.channel("ops", ann, guest, gone, bot)
    memberships = await groups(desk.slack())
    assert readers(memberships, f"channel:{ops}") == {"ann@acme.example", "ben@acme.example", "gus@acme.example"}
    assert await groups(desk.slack(), [f"channel:{ops}"]) == {f"channel:{ops}": memberships[f"channel:{ops}"]}


async def test_a_private_or_newly_private_channel_is_readable_only_by_its_members(
    desk: Desk,
) -> None:
    w = desk.workspace
    ann, ben = w.user("Ann Lee"), w.user("Ben Roy")
    secret, ops = w.channel("secret", ann, is_private=True), w.channel("ops", ann)
    slack = desk.slack()
    memberships = await groups(slack)
    assert readers(memberships, f"channel:{secret}") == {"ann@acme.example"}
    assert readers(memberships, f"channel:{ops}") == {"ann@acme.example", "ben@acme.example"}
    w.convert_to_private(ops)
    assert readers(await groups(slack), f"channel:{ops}") == {"ann@acme.example"}
    w.join(secret, ben)
    w.leave(secret, ann)
    assert readers(await groups(slack, [f"channel:{secret}"]), f"channel:{secret}") == {"ben@acme.example"}


async def test_members_of_other_workspaces_hold_shared_channels_by_slack_id_not_by_address(
    desk: Desk,
) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    stranger = w.user("Eve Stranger", is_stranger=True, team_id="T9OTHER", email="ann@acme.example")
    shared = w.channel("shared", ann, stranger, is_ext_shared=True)
    ops = w.channel("ops", ann)
    memberships = await groups(desk.slack())
    assert readers(memberships, f"channel:{shared}") == {"ann@acme.example", f"slack:{stranger}"}
    assert readers(memberships, f"channel:{ops}") == {"ann@acme.example"}


async def test_without_the_email_scope_members_are_named_by_slack_id(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    desk.fake.context.scopes.discard("users:read.email")
    assert readers(await groups(desk.slack()), f"channel:{ops}") == {f"slack:{ann}"}


async def test_members_are_read_over_several_pages_of_results(desk: Desk) -> None:
    w = desk.workspace
    people = [w.user(f"P{n} X") for n in range(10)]
    ops = w.channel("ops", *people, is_private=True)
    assert len(readers(await groups(desk.slack()), f"channel:{ops}")) == 10


async def test_a_channel_without_the_app_has_no_group(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    outside = w.channel("outside", ann, bot=False)
    slack = desk.slack()
    assert f"channel:{outside}" not in await groups(slack)
    assert await groups(slack, [f"channel:{outside}", "channel:CNONE", "something:else"]) == {}


async def test_the_app_joins_public_channels_that_are_selected_only_if_the_settings_say_so(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("ann")
    ids = {name: w.channel(name, ann, bot=False) for name in ("alerts", "random", "old", "broken")}
    secret = w.channel("secret", ann, bot=False, is_private=True)
    for channel in (*ids.values(), secret):
        w.post(channel, ann, "Hello there.")
    w.channels[ids["old"]].is_archived = True
    assert await everything(desk.slack()) == {}
    desk.fake.context.scopes.add("channels:join")
    slack = desk.slack(join=True, exclude=("random",))
    assert await slack.check() == []
    assert all(BOT_USER not in w.channels[channel].members for channel in ids.values()), "a check changes nothing"
    desk.fake.faults.unjoinable.add(ids["broken"])
    read = await everything(slack)
    assert {id.partition(":")[0] for id in read} == {ids["alerts"]}
    later = w.channel("later", ann, bot=False)
    w.post(later, ann, "Hello later.")
    assert {id.partition(":")[0] for id in await listing(slack)} == {ids["alerts"], later}
    assert secret not in {id.partition(":")[0] for id in await listing(slack)}


async def test_joining_without_its_scope_names_the_scope(desk: Desk) -> None:
    desk.workspace.channel("alerts", bot=False)
    [problem] = await desk.slack(join=True).check()
    assert "the scope channels:join, " in problem.message
    with pytest.raises(Misconfigured, match="add the scope channels:join"):
        await listing(desk.slack(join=True))


# check


async def test_check_reports_no_problem_when_everything_is_permitted(desk: Desk) -> None:
    desk.workspace.channel("ops")
    assert await desk.slack(app_token=desk.fake.app_token).check() == []


@pytest.mark.parametrize("scope", sorted(SCOPES))
async def test_check_names_exactly_the_scope_that_is_missing(desk: Desk, scope: str) -> None:
    desk.workspace.channel("ops")
    desk.fake.context.scopes.discard(scope)
    problems = await desk.slack(files=True).check()
    assert [problem.code for problem in problems] == ["missing_scope"]
    assert f"the scope {scope}, " in problems[0].message


async def test_check_does_not_require_the_scopes_of_private_channels_that_are_not_read(desk: Desk) -> None:
    desk.workspace.channel("ops")
    desk.fake.context.scopes -= {"groups:read", "groups:history"}
    assert await desk.slack(private=False).check() == []
    assert len(await desk.slack().check()) == 2


async def test_a_read_without_its_scope_raises_misconfigured_naming_the_scope(desk: Desk) -> None:
    desk.fake.context.scopes.discard("users:read")
    with pytest.raises(Misconfigured, match="add the scope users:read to the app"):
        await groups(desk.slack())


async def test_check_names_the_channels_that_the_app_has_to_be_invited_to(desk: Desk) -> None:
    w = desk.workspace
    [problem] = await desk.slack().check()
    assert problem.code == "not_invited"
    w.channel("ops")
    w.channel("alerts", bot=False)
    w.channel("secret", bot=False, is_private=True)
    problems = await desk.slack(channels=("ops", "alerts", "secret")).check()
    assert [problem.code for problem in problems] == ["not_invited", "not_invited"]
    assert str(problems[0]) == "#alerts: the app is not in this channel: write /invite @penstock there"
    assert "no channel secret is visible" in problems[1].message


async def test_check_says_that_many_channels_need_events(desk: Desk) -> None:
    for n in range(POLLED_CHANNELS):
        desk.workspace.channel(f"channel{n}")
    assert await desk.slack(rows_per_request=500).check() == []
    desk.workspace.channel("one-more")
    [problem] = await desk.slack(rows_per_request=500).check()
    assert problem.code == "no_events"
    assert "126 channels are read without events" in problem.message
    assert await desk.slack(rows_per_request=500, app_token=desk.fake.app_token).check() == []


async def test_check_reports_a_refused_token_without_quoting_it(desk: Desk) -> None:
    [problem] = await desk.slack(token="xoxb-wrong-canary").check()
    assert problem.code == "token"
    assert "invalid_auth" in problem.message
    assert "canary" not in problem.message
    desk.workspace.channel("ops")
    [problem] = await desk.slack(app_token="xapp-wrong-canary").check()
    assert problem.code == "app_token"
    assert "connections:write" in problem.message
    assert "canary" not in problem.message
    assert "canary" not in repr(desk.slack(token="xoxb-canary")._options)


async def test_an_empty_or_non_ascii_token_is_misconfigured(desk: Desk) -> None:
    for token in ("", "xoxb-ü"):
        with pytest.raises(Misconfigured, match="copy it again"):
            desk.slack(token=token)
