"""The Slack source against the fake: what it reads, what it lists, what it says is gone."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from threading import get_ident

import pytest

from connectors.slack import Slack, content, reading
from connectors.slack.client import Absent, Object
from connectors.slack.content import is_document
from connectors.source import CursorExpired, Document, Gone, Unreadable
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from tests.support.connectors.reading import changed, everything, listing, one
from tests.support.connectors.slack_kit import Desk, desk_in, text

RS = "\x1e"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


@pytest.fixture
def ann(desk: Desk) -> str:
    return desk.workspace.user("Ann Lee")


@pytest.fixture
def ben(desk: Desk) -> str:
    return desk.workspace.user("Ben Roy")


@pytest.fixture
def ops(desk: Desk, ann: str, ben: str) -> str:
    return desk.workspace.channel("ops", ann, ben)


async def test_messages_are_looked_into_in_threads(
    desk: Desk, ann: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of 32 MB of mentions kept all connectors from their turns for ten seconds, at each listing and poll."""
    threads: set[int] = set()

    def noted(message: Object, **more: int) -> bool:
        threads.add(get_ident())
        return is_document(message, **more)

    monkeypatch.setattr(reading, "is_document", noted)
    monkeypatch.setattr(content, "is_document", noted)
    desk.workspace.post(ops, ann, "How do we rotate the keys?")
    source = desk.slack()
    cursor = await source.start()
    ts = desk.workspace.post(ops, ann, "Where are they?")
    assert len(await everything(source)) == 2
    assert len(await listing(source)) == 2
    changes, _ = await changed(source, cursor)
    assert f"{ops}:{ts}" in changes
    assert threads
    assert get_ident() not in threads


async def test_a_thread_that_takes_too_much_memory_is_not_read_to_its_end(
    desk: Desk, ann: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replies were read before their text was found to be too long: a hundred thousand of a bot are 4 GB."""
    ts = desk.workspace.post(ops, ann, "How do we rotate the keys?")
    for _ in range(40):
        desk.workspace.post(ops, ann, "Word " * 100, thread=ts)
    source = desk.slack()
    monkeypatch.setattr(source._api, "_rows", 5)
    entry = await one(source, f"{ops}:{ts}")
    assert isinstance(entry, Document)
    monkeypatch.setattr("connectors.slack.client.MAX_THREAD_BYTES", 20_000)
    again = await one(source, f"{ops}:{ts}")
    assert isinstance(again, Unreadable)
    assert (again.code, again.acl_tags, again.revision) == ("too_large", entry.acl_tags, entry.revision)


async def test_a_thread_is_one_document_with_each_message_as_a_part(desk: Desk, ann: str, ben: str, ops: str) -> None:
    w = desk.workspace
    ts = w.post(ops, ann, "How do we rotate the keys?\nThe staging ones.")
    w.post(ops, ben, "Ask <@" + ann + ">", thread=ts)
    documents = await everything(desk.slack())
    entry = documents[f"{ops}:{ts}"]
    assert isinstance(entry, Document)
    assert entry.content == f"Ann Lee: How do we rotate the keys?\nThe staging ones.{RS}Ben Roy: Ask @Ann Lee"
    assert entry.media_type == "text/x-penstock-messages"
    assert entry.title == "How do we rotate the keys? · #ops"
    assert entry.author == "Ann Lee"
    assert entry.acl_tags == (f"channel:{ops}",)
    assert entry.source_url == f"https://acme.slack.com/archives/{ops}/p{ts.replace('.', '')}"
    assert entry.source_modified_at is not None
    assert abs(entry.source_modified_at.timestamp() - time.time()) < 60
    assert entry.metadata["participants"] == ["Ann Lee", "Ben Roy"]
    assert entry.metadata["messages"] == 2


async def test_a_long_channel_and_a_long_thread_are_read_over_several_pages(desk: Desk, ann: str, ops: str) -> None:
    w = desk.workspace
    stamps = [w.post(ops, ann, f"message {n}") for n in range(10)]
    for n in range(10):
        w.post(ops, ann, f"answer {n}", thread=stamps[4])
    documents = await everything(desk.slack())
    assert list(documents) == [f"{ops}:{ts}" for ts in reversed(stamps)]
    assert documents[f"{ops}:{stamps[4]}"].content.count(RS) == 10


async def test_a_join_notice_is_a_document_only_if_it_has_replies(desk: Desk, ann: str, ops: str) -> None:
    w = desk.workspace
    quiet = w.post(ops, ann, "has joined the channel", subtype="channel_join")
    loud = w.post(ops, ann, "has joined the channel", subtype="channel_join")
    w.post(ops, ann, "Welcome!", thread=loud)
    slack = desk.slack()
    assert list(await everything(slack)) == [f"{ops}:{loud}"]
    assert isinstance(await one(slack, f"{ops}:{quiet}"), Gone)


async def test_bot_messages_name_the_bot_and_a_broadcast_reply_is_no_second_document(
    desk: Desk, ann: str, ops: str
) -> None:
    w = desk.workspace
    ts = w.post(
        ops,
        "",
        "",
        subtype="bot_message",
        bot_id="B1",
        username="Deploys",
        attachments=[{"title": "Build 7", "title_link": "https://ci.example/7", "text": "failed", "fallback": "x"}],
        files=[{"id": "F1", "name": "log.txt", "title": "log.txt"}],
    )
    w.post(ops, ann, "On it", thread=ts, subtype="thread_broadcast")
    documents = await everything(desk.slack())
    assert list(documents) == [f"{ops}:{ts}"]
    assert documents[f"{ops}:{ts}"].content == (
        f"Deploys: Build 7 (https://ci.example/7)\nfailed\nFile: log.txt{RS}Ann Lee: On it"
    )


async def test_direct_messages_are_never_read_and_never_listed(desk: Desk, ann: str) -> None:
    w = desk.workspace
    desk.fake.context.scopes |= {"im:read", "im:history", "mpim:read", "mpim:history"}
    direct = w.channel("dm", ann, kind="im", is_private=True)
    ts = w.post(direct, ann, "only for you")
    group = w.channel("mpdm-ann-ben-1", ann, kind="mpim", is_private=True)
    hidden = w.post(group, ann, "only for the three of us")
    slack = desk.slack()
    assert await everything(slack) == {}
    assert await listing(slack) == {}
    assert isinstance(await one(slack, f"{direct}:{ts}"), Gone)
    assert isinstance(await one(slack, f"{group}:{hidden}"), Gone)
    assert desk.memory.kept == {}
    groups = [group.tag async for group in slack.groups()]
    assert groups == [f"workspace:{w.team_id}"]


async def test_a_poll_reads_edits_deletes_and_replies(desk: Desk, ann: str, ben: str, ops: str) -> None:
    w = desk.workspace
    first, second, third = (w.post(ops, ann, f"message {n}") for n in range(3))
    slack = desk.slack()
    cursor = await slack.start()
    _, cursor = await changed(slack, cursor)
    w.edit(ops, first, "message zero")
    w.delete(ops, second)
    w.post(ops, ben, "indeed", thread=third)
    changes, cursor = await changed(slack, cursor)
    assert changes[f"{ops}:{first}"].content == "Ann Lee: message zero"
    assert isinstance(changes[f"{ops}:{second}"], Gone)
    assert changes[f"{ops}:{third}"].content == f"Ann Lee: message 2{RS}Ben Roy: indeed"
    changes, _ = await changed(slack, cursor)
    assert f"{ops}:{second}" not in changes


async def test_a_poll_reads_replies_to_recent_threads_and_a_listing_replies_to_older_threads(
    desk: Desk, ann: str, ops: str
) -> None:
    w = desk.workspace
    recent = w.post(ops, ann, "yesterday", at=f"{time.time() - 86_400:.6f}")
    old = w.post(ops, ann, "last year", at=f"{time.time() - 300 * 86_400:.6f}")
    slack = desk.slack(thread_days=2)
    cursor = await slack.start()
    before = await listing(slack)
    for ts in (recent, old):
        w.post(ops, ann, "and now?", thread=ts)
    changes, _ = await changed(slack, cursor)
    assert list(changes) == [f"{ops}:{recent}"]
    after = await listing(slack)
    assert before[f"{ops}:{old}"].revision != after[f"{ops}:{old}"].revision


async def test_a_broadcast_reply_makes_a_poll_read_its_old_thread(desk: Desk, ann: str, ops: str) -> None:
    old = desk.workspace.post(ops, ann, "last year", at=f"{time.time() - 300 * 86_400:.6f}")
    slack = desk.slack(thread_days=0)
    cursor = await slack.start()
    desk.workspace.post(ops, ann, "news!", thread=old, subtype="thread_broadcast")
    changes, _ = await changed(slack, cursor)
    assert list(changes) == [f"{ops}:{old}"]


async def test_a_listing_has_the_same_revisions_as_a_full_read_without_requests_per_thread(
    desk: Desk, ann: str, ops: str
) -> None:
    w = desk.workspace
    for n in range(7):
        ts = w.post(ops, ann, f"message {n}")
        w.post(ops, ann, "answer", thread=ts)
    w.post(ops, ann, "has left", subtype="channel_leave")
    slack = desk.slack()
    read = {id: entry.revision for id, entry in (await everything(slack)).items()}
    desk.fake.requests.clear()
    assert {id: entry.revision for id, entry in (await listing(slack)).items()} == read
    assert desk.fake.requests["conversations.replies"] == 0


@pytest.mark.parametrize("change", ["edit", "answer", "answer deleted", "renamed", "file"])
async def test_every_change_of_a_thread_changes_its_revision(desk: Desk, ann: str, ops: str, change: str) -> None:
    w = desk.workspace
    ts = w.post(ops, ann, "text")
    w.post(ops, ann, "one", thread=ts)
    last = w.post(ops, ann, "two", thread=ts)
    slack = desk.slack()
    before = await listing(slack)
    match change:
        case "edit":
            w.edit(ops, ts, "another text")
        case "answer":
            w.post(ops, ann, "three", thread=ts)
        case "answer deleted":
            w.delete(ops, last)
        case "renamed":
            w.rename(ops, "operations")
        case "file":
            w.edit(ops, ts, "text", files=[{"id": "F1", "name": "plan.pdf"}])
    after = await listing(slack)
    assert after[f"{ops}:{ts}"].revision != before[f"{ops}:{ts}"].revision
    fetched = await one(slack, f"{ops}:{ts}")
    assert isinstance(fetched, Document)
    assert fetched.revision == after[f"{ops}:{ts}"].revision


async def test_a_thread_with_a_deleted_parent_retains_its_replies(desk: Desk, ann: str, ben: str, ops: str) -> None:
    w = desk.workspace
    ts = w.post(ops, ann, "a secret")
    answer = w.post(ops, ben, "take that down", thread=ts)
    w.delete(ops, ts)
    slack = desk.slack()
    entry = await one(slack, f"{ops}:{ts}")
    assert isinstance(entry, Document)
    assert entry.content == f"(this message was deleted){RS}Ben Roy: take that down"
    assert entry.author is None
    w.delete(ops, answer)
    assert isinstance(await one(slack, f"{ops}:{ts}"), Gone)
    assert await listing(slack) == {}


async def test_a_crawl_resumes_from_the_cursor_of_any_page(desk: Desk, ann: str) -> None:
    w = desk.workspace
    channels = [w.channel(name, ann) for name in ("a", "b")]
    ids = [f"{channel}:{w.post(channel, ann, f'message {n}')}" for channel in channels for n in range(7)]
    pages = [page async for page in desk.slack().full(None)]
    assert all(len(page.entries) <= 3 for page in pages)
    for stop, page in enumerate(pages):
        rest = await everything(desk.slack(), page.cursor)
        before = [entry.external_id for earlier in pages[: stop + 1] for entry in earlier.entries]
        assert sorted([*before, *rest]) == sorted(ids)


async def test_an_interrupted_poll_resumes_without_losing_changes(desk: Desk, ann: str) -> None:
    w = desk.workspace
    channels = [w.channel(name, ann) for name in ("a", "b")]
    slack = desk.slack()
    cursor = await slack.start()
    ids = {f"{channel}:{w.post(channel, ann, f'message {n}')}" for channel in channels for n in range(4)}
    async for page in slack.changes(cursor):
        met = {entry.external_id for entry in page.entries}
        cursor = page.cursor
        break
    rest, cursor = await changed(slack, cursor)
    assert met | set(rest) == ids
    deleted = sorted(ids)[0]
    w.delete(*deleted.split(":"))
    changes, _ = await changed(slack, cursor)
    assert isinstance(changes[deleted], Gone)


async def test_a_list_whose_cursor_expires_is_read_again_from_its_start(desk: Desk, ann: str) -> None:
    w = desk.workspace
    channels = [w.channel(f"c{n}", ann) for n in range(10)]
    ids = {f"{channel}:{w.post(channel, ann, 'hello')}" for channel in channels}
    desk.fake.faults.expiring = 2
    assert set(await everything(desk.slack())) == ids
    desk.fake.faults.expiring = 99
    with pytest.raises(Retryable, match="cursors"):
        await everything(desk.slack())


async def test_a_malformed_cursor_counts_as_expired(desk: Desk) -> None:
    slack = desk.slack()
    with pytest.raises(CursorExpired):
        await everything(slack, {"page": 3})
    with pytest.raises(CursorExpired):
        await changed(slack, {"token": "x"})
    with pytest.raises(CursorExpired):
        await changed(slack, {"at": 1.0, "seen": [1]})


async def test_a_channel_that_the_app_was_removed_from_loses_access_now_and_is_gone_a_day_later(
    desk: Desk, ann: str
) -> None:
    w = desk.workspace
    secret = w.channel("secret", ann, is_private=True)
    id = f"{secret}:{w.post(secret, ann, 'the plan')}"
    slack = desk.slack()
    assert list(await listing(slack)) == [id]
    w.leave(secret, "U0PENSTOCK")
    assert [group.tag async for group in slack.groups()] == [f"workspace:{w.team_id}"]
    lost = (await listing(slack))[id]
    assert lost.acl_tags == ()
    entry = await one(slack, id)
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags, entry.revision) == ("access_lost", (), lost.revision)
    desk.memory.kept[f"lost:{secret}"] -= 25 * 3_600
    assert await listing(slack) == {}
    assert isinstance(await one(slack, id), Gone)
    w.join(secret, "U0PENSTOCK")
    back = (await listing(slack))[id]
    assert back.acl_tags == (f"channel:{secret}",)
    assert back.revision != lost.revision
    assert isinstance(await one(slack, id), Document)
    assert desk.memory.kept[f"lost:{secret}"] is None


async def test_a_public_channel_that_is_archived_stays_readable_for_the_workspace(
    desk: Desk, ann: str, ops: str
) -> None:
    w = desk.workspace
    id = f"{ops}:{w.post(ops, ann, 'for the record')}"
    slack = desk.slack()
    before = await listing(slack)
    w.archive(ops)
    assert await listing(slack) == before
    entry = await one(slack, id)
    assert isinstance(entry, Unreadable)
    assert (entry.code, entry.acl_tags) == ("archived", (f"channel:{ops}",))
    assert entry.revision == before[id].revision
    for tags in (None, [f"channel:{ops}"]):
        groups = {group.tag: group async for group in slack.groups(tags)}
        assert (list(groups[f"channel:{ops}"].members), list(groups[f"channel:{ops}"].of)) == (
            [],
            [f"workspace:{w.team_id}"],
        )
    dropping = desk.slack(archived="drop")
    assert await listing(dropping) == {}
    assert isinstance(await one(dropping, id), Gone)


async def test_an_archived_channel_made_private_during_a_listing_loses_access_from_the_next_page(
    desk: Desk, ann: str, ops: str
) -> None:
    w = desk.workspace
    for n in range(5):
        w.post(ops, ann, f"for the record {n}")
    slack = desk.slack()
    await listing(slack)
    w.archive(ops)
    pages = []
    async for page in slack.slim():
        pages.append(page)
        w.channels[ops].is_private = True  # what is asked for from now on is stamped later than this
    assert [{entry.acl_tags for entry in page} for page in pages] == [{(f"channel:{ops}",)}, {()}]


async def test_a_truncated_list_of_channels_is_retryable(desk: Desk, ann: str) -> None:
    w = desk.workspace
    for n in range(5):
        channel = w.channel(f"c{n}", ann)
        w.post(channel, ann, "hello")
    slack = desk.slack()
    assert len(await listing(slack)) == 5
    desk.fake.faults.truncated.add("conversations.list")
    with pytest.raises(Retryable, match="not complete"):
        await listing(slack)
    with pytest.raises(Retryable, match="not complete"):
        [group async for group in slack.groups()]


async def test_only_the_configured_channels_are_read(desk: Desk, ann: str, ops: str) -> None:
    w = desk.workspace
    alerts, other = w.channel("ops-alerts", ann), w.channel("random", ann)
    ids = {channel: f"{channel}:{w.post(channel, ann, 'hello')}" for channel in (ops, alerts, other)}
    slack = desk.slack(channels=("ops*",), exclude=("#ops-alerts",))
    assert list(await everything(slack)) == [ids[ops]]
    assert list(await listing(slack)) == [ids[ops]]
    assert isinstance(await one(slack, ids[other]), Gone)
    assert isinstance(await one(slack, ids[alerts]), Gone)
    no_private = desk.slack(private=False)
    hidden = w.channel("hidden", ann, is_private=True)
    w.post(hidden, ann, "hello")
    assert not any(id.startswith(hidden) for id in await listing(no_private))


async def test_users_of_other_workspaces_are_named_in_messages(desk: Desk, ann: str, ops: str) -> None:
    w = desk.workspace
    guest = w.user("Eve Stranger", is_stranger=True, team_id="T9OTHER")
    ts = w.post(ops, guest, f"hello <@{ann}>, I am <@{guest}>, not <@U9NOBODY>")
    assert await text(desk.slack(), f"{ops}:{ts}") == "Eve Stranger: hello @Ann Lee, I am @Eve Stranger, not @U9NOBODY"


async def test_user_groups_are_named_in_messages_whatever_was_read_before(desk: Desk, ann: str, ops: str) -> None:
    group = desk.workspace.usergroup("oncall")
    ts = desk.workspace.post(ops, ann, f"ask <!subteam^{group}>")
    slack = desk.slack()
    [_ async for _ in slack.groups()]
    assert await text(slack, f"{ops}:{ts}") == "Ann Lee: ask @oncall"
    desk.fake.context.scopes.discard("usergroups:read")
    assert await text(desk.slack(), f"{ops}:{ts}") == f"Ann Lee: ask @{group}"


async def test_429_responses_are_retried_and_long_waits_deferred(desk: Desk, ann: str, ops: str) -> None:
    id = f"{ops}:{desk.workspace.post(ops, ann, 'hello')}"
    desk.fake.faults.throttled = 4
    assert list(await everything(desk.slack())) == [id]
    desk.fake.faults.throttled, desk.fake.faults.retry_after = 1, 900
    with pytest.raises(Deferred) as raised:
        await everything(desk.slack())
    assert raised.value.retry_after is not None
    assert raised.value.retry_after >= 800


async def test_a_response_that_is_too_large_is_requested_in_smaller_pages(desk: Desk, ann: str, ops: str) -> None:
    threads = [f"{ops}:{desk.workspace.post(ops, ann, 'x' * 12 * 2**20)}" for _ in range(3)]
    assert sorted(await everything(desk.slack())) == threads


async def test_server_errors_are_retried(desk: Desk, ann: str, ops: str) -> None:
    id = f"{ops}:{desk.workspace.post(ops, ann, 'hello')}"
    desk.fake.faults.failing = 2
    assert list(await everything(desk.slack())) == [id]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("fatal_error", Retryable),
        ("ratelimited", Deferred),
        ("account_inactive", Misconfigured),
        ("user_not_found", Absent),
    ],
)
async def test_an_error_code_in_a_200_response_raises_its_exception(
    desk: Desk, error: str, kind: type[Exception]
) -> None:
    desk.fake.faults.broken["users.list"] = error
    with pytest.raises(kind, match=error):
        [group async for group in desk.slack().groups()]


async def test_a_revoked_token_is_misconfigured_and_not_quoted(desk: Desk) -> None:
    slack: Slack = desk.slack()
    desk.fake.revoked = True
    with pytest.raises(Misconfigured, match="token_revoked") as raised:
        await listing(slack)
    assert desk.fake.token not in str(raised.value)
