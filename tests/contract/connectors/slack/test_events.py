"""Events as Slack sends them: signed over HTTP, and through a socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.slack import Slack
from connectors.source import Reaction, Refused, Request
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.reading import listing
from tests.support.connectors.slack_kit import Desk, desk_in
from tests.support.waiting import until


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


async def reactions(slack: Slack, requests: list[Request]) -> list[Reaction]:
    return [response for request in requests if (response := await slack.on_event(request)) != Reaction()]


async def test_a_signed_challenge_is_answered(desk: Desk) -> None:
    response = await desk.slack().on_event(desk.fake.challenge())
    assert (response.status, response.answer) == (200, b"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmd")
    with pytest.raises(Refused):
        await desk.slack(signing_secret=None).on_event(desk.fake.challenge())


async def test_message_reply_edit_and_delete_events_fetch_their_thread(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    slack = desk.slack()
    desk.fake.drop_events()
    ts = w.post(ops, ann, "hello")
    answer = w.post(ops, ann, "hi", thread=ts)
    w.edit(ops, answer, "hi!")
    w.delete(ops, answer)
    assert await reactions(slack, desk.fake.sent()) == [Reaction(ids=(f"{ops}:{ts}",))] * 4
    w.delete(ops, ts)
    assert await reactions(slack, desk.fake.sent()) == [Reaction(ids=(f"{ops}:{ts}",))]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda request: replace(request, body=request.body + b" "),
        lambda request: replace(request, headers={}),
        lambda request: replace(request, headers={**request.headers, "x-slack-signature": "v0=00"}),
        lambda request: replace(request, headers={**request.headers, "x-slack-signature": "v0=ü"}),
        lambda request: replace(request, headers={**request.headers, "x-slack-request-timestamp": "soon"}),
        lambda request: replace(request, body=b"\xff\xfe"),
    ],
)
async def test_an_event_without_slacks_signature_is_refused(desk: Desk, spoil: Callable[[Request], Request]) -> None:
    with pytest.raises(Refused):
        await desk.slack().on_event(spoil(desk.fake.challenge()))


@pytest.mark.parametrize("age", [-302, 302])
async def test_an_event_more_than_five_minutes_old_or_ahead_is_refused(desk: Desk, age: int) -> None:
    request = desk.fake.signed({"type": "url_verification", "challenge": "x"}, at=time.time() - age)
    with pytest.raises(Refused):
        await desk.slack().on_event(request)


async def test_a_signed_body_that_is_no_event_is_refused(desk: Desk) -> None:
    slack = desk.slack()
    with pytest.raises(Refused):
        await slack.on_event(desk.fake.signed([1, 2]))  # type: ignore[arg-type]
    assert await slack.on_event(desk.fake.signed({"type": "event_callback", "event_id": "Ev1"})) == Reaction()


async def test_a_repeated_event_is_ignored(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    slack = desk.slack()
    desk.fake.drop_events()
    stamps = [w.post(ops, ann, f"message {n}") for n in range(5)]
    outcomes = await reactions(slack, desk.fake.sent_twice_shuffled(seed=7))
    assert sorted(id for reaction in outcomes for id in reaction.ids) == [f"{ops}:{ts}" for ts in stamps]


async def test_membership_events_read_the_channels_group_and_the_apps_own_cause_a_sweep(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann, bot=False)
    slack = desk.slack()
    desk.fake.drop_events()
    w.join(ops, "U0PENSTOCK")
    w.leave(ops, ann)
    w.rename(ops, "operations")
    tags = (f"channel:{ops}",)
    assert await reactions(slack, desk.fake.sent()) == [
        Reaction(groups=tags, changes=True, sweep=True),
        Reaction(groups=tags),
        Reaction(groups=tags, sweep=True),
    ]


async def test_only_a_users_change_of_address_or_status_reads_memberships_again(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    slack = desk.slack()
    [group async for group in slack.groups()]
    desk.fake.drop_events()
    w.change_user(ann, profile={"status_text": "lunch"})
    assert await reactions(slack, desk.fake.sent()) == []
    w.change_user(ann, profile={"email": "ann.lee@acme.example"})
    w.change_user(ann, deleted=True)
    w.user("New Hire")
    everywhere = Reaction(groups=[f"workspace:{w.team_id}", f"channel:{ops}"])
    assert await reactions(slack, desk.fake.sent()) == [
        everywhere,
        everywhere,
        Reaction(groups=[f"workspace:{w.team_id}"]),
    ]


async def test_an_event_whose_handling_failed_is_handled_when_slack_sends_it_again(desk: Desk) -> None:
    w = desk.workspace
    w.channel("ops", w.user("Ann Lee"))
    slack = desk.slack()
    desk.fake.drop_events()
    w.user("New Hire")
    [request] = desk.fake.sent()
    desk.fake.faults.broken["auth.test"] = "fatal_error"
    with pytest.raises(Retryable):
        await slack.on_event(request)
    desk.fake.faults.broken.clear()
    assert len(await reactions(slack, [request])) == 1


async def test_a_renamed_channel_has_its_new_name_in_documents_read_after_it(desk: Desk) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    ts = w.post(ops, ann, f"see <#{ops}>")
    slack = desk.slack()
    desk.fake.drop_events()
    [before] = await slack.fetch([f"{ops}:{ts}"])
    w.rename(ops, "operations")
    await reactions(slack, desk.fake.sent())
    [after] = await slack.fetch([f"{ops}:{ts}"])
    assert (before.content, after.content) == ("Ann Lee: see #ops", "Ann Lee: see #operations")
    assert (before.title, after.title) == ("see #ops · #ops", "see #operations · #operations")
    assert (await listing(slack))[f"{ops}:{ts}"].revision == after.revision


async def test_a_rate_limit_event_causes_a_read_of_changes_and_a_sweep(desk: Desk) -> None:
    assert await desk.slack().on_event(desk.fake.rate_limited()) == Reaction(changes=True, sweep=True)


# Socket Mode


@asynccontextmanager
async def listening(desk: Desk) -> AsyncIterator[tuple[str, str, list[Reaction], list[Reaction]]]:
    """Ann and the channel she is in; while it is listened to, what it tells of, and each time that it connected."""
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    desk.fake.drop_events()
    slack = desk.slack(app_token=desk.fake.app_token)
    results: list[Reaction] = []
    connected: list[Reaction] = []

    async def react(reaction: Reaction) -> None:
        (connected if reaction == Reaction(changes=True) else results).append(reaction)

    task = asyncio.create_task(slack.listen(react))
    await until(lambda: len(desk.fake.socket.connections) == 1)
    yield ann, ops, results, connected
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_events_received_through_a_socket_are_acknowledged(desk: Desk) -> None:
    w = desk.workspace
    async with listening(desk) as (ann, ops, results, connected):
        ts = w.post(ops, ann, "hello")
        await desk.fake.deliver_to_socket()
        await until(lambda: len(results) == 1)
        assert results == [Reaction(ids=(f"{ops}:{ts}",))]
        await until(lambda: len(desk.fake.socket.acknowledged) == 1)

        await desk.fake.socket.refresh()  # Slack asks for a new connection every few hours
        again = w.post(ops, ann, "hello again")
        await desk.fake.deliver_to_socket()
        await until(lambda: len(results) == 2)
        assert results[1] == Reaction(ids=(f"{ops}:{again}",))
        await until(lambda: desk.fake.socket.unacknowledged == {})
        # The library may connect twice: it is told to, and it sees the old connection end.
        assert len(connected) >= 2, "what happened while there was no connection is looked for"


async def test_a_broken_socket_connection_is_renewed_without_losing_events(desk: Desk) -> None:
    async with listening(desk) as (ann, ops, results, _):
        await desk.fake.socket.drop()
        await until(lambda: desk.fake.socket.connections == [])
        ts = desk.workspace.post(ops, ann, "hello")
        await desk.fake.deliver_to_socket()
        await until(lambda: results != [])
        assert results == [Reaction(ids=(f"{ops}:{ts}",))]


async def test_a_socket_event_is_acknowledged_first_and_a_failed_reaction_ends_listening(
    desk: Desk,
) -> None:
    w = desk.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    desk.fake.drop_events()
    slack = desk.slack(app_token=desk.fake.app_token)

    async def react(reaction: Reaction) -> None:
        if reaction.changes:
            return
        await until(lambda: len(desk.fake.socket.acknowledged) == 1)
        raise Retryable("Kafka is away")

    listening = asyncio.create_task(slack.listen(react))
    await until(lambda: len(desk.fake.socket.connections) == 1)
    w.post(ops, ann, "hello")
    await desk.fake.deliver_to_socket()
    with pytest.raises(Retryable, match="Kafka is away"):
        await listening
    await until(lambda: desk.fake.socket.connections == [])


async def test_listening_without_an_app_token_returns_and_with_a_refused_one_is_misconfigured(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    async def react(_: Reaction) -> None:
        raise AssertionError

    await desk.slack().listen(react)
    with pytest.raises(Misconfigured, match=r"apps\.connections\.open"):
        await desk.slack(app_token="xapp-canary").listen(react)
    assert "canary" not in caplog.text


def test_the_fake_sends_each_event_once() -> None:
    from connectors.fakes.slack import FakeSlack

    fake = FakeSlack()
    fake.workspace.user("Ann Lee")
    bodies = [json.loads(request.body) for request in fake.sent()]
    assert [body["event"]["type"] for body in bodies] == ["team_join"]
    assert fake.sent() == []
