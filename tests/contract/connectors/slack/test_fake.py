"""The fake held to Slack's own Python SDK: its web client, its socket client, its check of signatures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from slack_sdk.errors import SlackApiError
from slack_sdk.http_retry.builtin_async_handlers import AsyncRateLimitErrorRetryHandler
from slack_sdk.signature import SignatureVerifier
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse
from slack_sdk.web.async_client import AsyncWebClient

from connectors.fakes.slack import FakeSlack
from pipeline.runtime.http_server import served


@pytest.fixture
def fake() -> FakeSlack:
    return FakeSlack()


@pytest.fixture
async def base(fake: FakeSlack) -> AsyncIterator[str]:
    async with served(fake.app) as url:
        yield f"{url}/api/"


@pytest.fixture
def client(fake: FakeSlack, base: str) -> AsyncWebClient:
    return AsyncWebClient(fake.token, base_url=base)


async def test_slacks_web_client_reads_all_pages_of_every_method(fake: FakeSlack, client: AsyncWebClient) -> None:
    w = fake.workspace
    people = [w.user(f"P{n} X") for n in range(5)]
    ops = w.channel("ops", *people)
    for n in range(5):
        w.channel(f"c{n}")
    stamps = [w.post(ops, people[0], f"message {n}") for n in range(7)]
    answers = [w.post(ops, people[1], f"answer {n}", thread=stamps[2]) for n in range(5)]

    names = [row["name"] async for page in await client.conversations_list(limit=2) for row in page["channels"]]
    assert sorted(names) == ["c0", "c1", "c2", "c3", "c4", "ops"]
    rows = [row async for page in await client.conversations_history(channel=ops, limit=3) for row in page["messages"]]
    assert [row["ts"] for row in rows] == stamps[::-1]
    parent = rows[4]
    assert (parent["reply_count"], parent["latest_reply"], parent["thread_ts"]) == (5, answers[-1], stamps[2])
    assert all("thread_ts" not in row for row in rows if row["ts"] != stamps[2])
    met = [
        row["ts"]
        async for page in await client.conversations_replies(channel=ops, ts=stamps[2], limit=2)
        for row in page["messages"]
    ]
    assert list(dict.fromkeys(met)) == [stamps[2], *answers]
    members = [
        row async for page in await client.conversations_members(channel=ops, limit=2) for row in page["members"]
    ]
    assert members == [*people, "U0PENSTOCK"]
    users = [row["id"] async for page in await client.users_list(limit=2) for row in page["members"]]
    assert set(people) < set(users)


async def test_oldest_and_latest_are_inclusive_or_exclusive_as_documented(
    fake: FakeSlack, client: AsyncWebClient
) -> None:
    w = fake.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    a, b, c = (w.post(ops, ann, text) for text in "abc")

    async def stamps(**arguments: str | bool) -> list[str]:
        answer = await client.conversations_history(channel=ops, **arguments)  # type: ignore[arg-type]
        return [row["ts"] for row in answer["messages"]]

    assert await stamps(oldest=a, latest=c) == [b]
    assert await stamps(oldest=a, latest=c, inclusive=True) == [c, b, a]
    assert await stamps(oldest=b) == [c]
    assert await stamps(latest=b) == [a]


async def test_form_and_json_requests_have_the_same_response(fake: FakeSlack, client: AsyncWebClient) -> None:
    w = fake.workspace
    ops = w.channel("ops")
    form = await client.api_call("conversations.info", data={"channel": ops})
    body = await client.api_call("conversations.info", json={"channel": ops})
    assert form["channel"] == body["channel"]
    assert form.headers["x-oauth-scopes"].split(",") == sorted(fake.context.scopes)


async def test_the_fakes_errors_equal_slacks(fake: FakeSlack, client: AsyncWebClient, base: str) -> None:
    w = fake.workspace
    secret = w.channel("secret", bot=False, is_private=True)
    public = w.channel("public", bot=False)
    ops = w.channel("ops")
    client.base_url = base

    async def error(method: str, token: str | None = None, **arguments: str) -> str:
        asking = AsyncWebClient(token or fake.token, base_url=base)
        with pytest.raises(SlackApiError) as raised:
            await asking.api_call(method, params=arguments)
        return str(raised.value.response["error"])

    assert await error("conversations.history", channel=public) == "not_in_channel"
    assert await error("conversations.history", channel=secret) == "channel_not_found"
    assert await error("conversations.info", channel=secret) == "channel_not_found"
    assert await error("conversations.replies", channel=ops, ts="1.000000") == "thread_not_found"
    assert await error("conversations.history", channel=ops, cursor="made-up") == "invalid_cursor"
    assert await error("conversations.history", channel=ops, limit="1000") == "invalid_limit"
    assert await error("users.info", user="U9") == "user_not_found"
    assert await error("no.such", user="U9") == "unknown_method"
    assert await error("auth.test", token="xoxb-wrong") == "invalid_auth"
    assert await error("auth.test", token=fake.app_token) == "not_allowed_token_type"
    fake.context.scopes.discard("channels:history")
    with pytest.raises(SlackApiError) as raised:
        await client.conversations_history(channel=ops)
    answer = raised.value.response
    assert (answer["error"], answer["needed"]) == ("missing_scope", "channels:history")
    assert "channels:read" in answer["provided"].split(",")
    fake.revoked = True
    assert await error("auth.test") == "token_revoked"


async def test_slacks_client_retries_after_a_rate_limit(fake: FakeSlack, client: AsyncWebClient) -> None:
    fake.faults.throttled, fake.faults.retry_after = 1, 1
    client.retry_handlers = [AsyncRateLimitErrorRetryHandler(max_retry_count=1)]
    assert (await client.auth_test())["ok"]
    fake.faults.limits["users.list"] = 2
    plain = AsyncWebClient(fake.token, base_url=client.base_url)
    for _ in range(2):
        await plain.users_list()
    with pytest.raises(SlackApiError) as raised:
        await plain.users_list()
    assert raised.value.response.status_code == 429
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 61
    await plain.auth_test()  # limits count each method by itself


async def test_edited_and_deleted_messages_look_as_they_do_in_slack(fake: FakeSlack, client: AsyncWebClient) -> None:
    w = fake.workspace
    ann = w.user("Ann Lee")
    ops = w.channel("ops", ann)
    ts = w.post(ops, ann, "helo")
    w.post(ops, ann, "typo?", thread=ts)
    w.edit(ops, ts, "hello")
    [edited] = (await client.conversations_history(channel=ops))["messages"]
    assert edited["text"] == "hello"
    assert edited["edited"]["ts"].endswith(".000000")
    w.delete(ops, ts)
    [tombstone] = (await client.conversations_history(channel=ops))["messages"]
    assert (tombstone["subtype"], tombstone["reply_count"], tombstone["ts"]) == ("tombstone", 1, ts)


def test_events_are_signed_as_slack_signs_them(fake: FakeSlack) -> None:
    fake.workspace.user("Ann Lee")
    fake.workspace.user("Ben Roy")
    verifier = SignatureVerifier(fake.signing_secret)
    for request in [*fake.sent(), fake.challenge(), fake.rate_limited()]:
        assert verifier.is_valid_request(request.body, dict(request.headers))
        assert not verifier.is_valid_request(request.body + b" ", dict(request.headers))


async def test_slacks_socket_client_receives_acknowledges_and_reconnects(
    fake: FakeSlack, client: AsyncWebClient
) -> None:
    fake.drop_events()
    received: list[str] = []

    async def on_request(socket: SocketModeClient, request: SocketModeRequest) -> None:
        received.append(request.payload["event"]["type"])
        if len(received) > 1:  # the first one stays unanswered
            await socket.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))

    socket = SocketModeClient(fake.app_token, web_client=client, ping_interval=1)
    socket.proxy = None
    socket.socket_mode_request_listeners.append(on_request)
    await socket.connect()
    try:
        async with asyncio.timeout(30):
            fake.workspace.user("Ann Lee")
            await fake.deliver_to_socket()
            while received != ["team_join"]:
                await asyncio.sleep(0.02)
            await fake.socket.refresh()
            while fake.socket.acknowledged == []:
                await asyncio.sleep(0.02)
        assert received == ["team_join", "team_join"]
        assert fake.socket.unacknowledged == {}
    finally:
        running = [socket.message_processor, socket.current_session_monitor, socket.message_receiver]
        await socket.close()
        await asyncio.gather(*(task for task in running if task), return_exceptions=True)
