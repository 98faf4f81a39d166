"""Push channels of Google Drive: opened, believed, renewed, lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.google_drive_responses import ApiError
from connectors.fakes.google_drive_services import Notification
from connectors.google_drive import GoogleDrive
from connectors.source import Reaction, Refused, Request
from tests.support.connectors.google_drive_kit import EVENTS, Desk, desk_in
from tests.support.connectors.reading import changed


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


@asynccontextmanager
async def listening(desk: Desk, source: GoogleDrive, channels: int = 1) -> AsyncIterator[None]:
    """Until as many channels are open as given, and no others."""

    async def ignored(reaction: Reaction) -> None:
        return None

    task = asyncio.create_task(source.listen(ignored))
    try:
        async with asyncio.timeout(30):
            while len(desk.fake.channels.open) != channels or len(desk.memory.stored.get("channels", ())) != channels:
                assert not task.done(), task.result()
                await asyncio.sleep(0.01)
        yield
    finally:
        task.cancel()


def as_request(notification: Notification, **headers: str) -> Request:
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request({**notification.headers, **changed}, {}, b"")


async def test_a_change_notification_causes_a_read_of_changes(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    cursor = await source.start()
    async with listening(desk, source):
        id_ = desk.doc("Document", drive)
        sync, change = desk.fake.channels.take()
        assert sync.address == change.address == EVENTS
        assert await source.on_event(as_request(sync)) == Reaction()
        assert await source.on_event(as_request(change)) == Reaction(changes=True)
    assert set((await changed(source, cursor))[0]) == {id_}


async def test_each_drive_and_my_drive_has_its_own_channel(desk: Desk) -> None:
    drives = [desk.drive(), desk.drive()]
    async with listening(desk, desk.source(drives=drives, my_drive=True), channels=3):
        assert {channel.drive for channel in desk.fake.channels.open.values()} == {*drives, None}
        for channel in desk.fake.channels.open.values():
            assert channel.expires_at - desk.corpus.now() > timedelta(days=6)


async def test_a_notification_without_the_channels_secret_is_refused(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    async with listening(desk, source):
        [sync] = desk.fake.channels.take()
        forged = [
            as_request(sync, x_goog_channel_token="guessed"),
            as_request(sync, x_goog_channel_token=""),
            as_request(sync, x_goog_channel_id="11111111-2222-3333-4444-555555555555"),
            as_request(sync, x_goog_channel_token="\udcff"),
            Request({}, {}, b""),
        ]
        for request in forged:
            with pytest.raises(Refused):
                await source.on_event(request)


async def test_the_channels_secret_is_not_stored(desk: Desk) -> None:
    async with listening(desk, desk.source(drives=[desk.drive()])):
        [channel] = desk.fake.channels.open.values()
        assert channel.token
        assert channel.token not in json.dumps(desk.memory.stored)


async def test_duplicated_notifications_cause_one_read_of_changes_each(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    async with listening(desk, source):
        desk.doc("One", drive)
        _, first = desk.fake.channels.take()
        desk.doc("Two", drive)
        [second] = desk.fake.channels.take()
        responses = [await source.on_event(as_request(item)) for item in (second, first, second, first)]
        assert [reaction.changes for reaction in responses] == [True, True, False, False]


async def test_a_channel_is_replaced_before_it_expires_and_the_old_one_stopped(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    async with listening(desk, source):
        [old] = desk.fake.channels.open.values()
    async with listening(desk, source):
        assert list(desk.fake.channels.open) == [old.id]  # there is time yet
    desk.corpus.clock_offset = timedelta(days=6, hours=13)
    later = desk.source(drives=[drive])
    # The clock ran on for the service account's tokens as well: a day's work, here in an instant.
    async with token_clock(desk), listening(desk, later):
        while old.id in desk.fake.channels.open:
            await asyncio.sleep(0.01)
        [new] = desk.fake.channels.open.values()
        assert new.expires_at - desk.corpus.now() > timedelta(days=6)
        desk.doc("Document", drive)
        messages = desk.fake.channels.take()
        assert {message.headers["x-goog-channel-id"] for message in messages} >= {new.id}
        assert (await later.on_event(as_request(messages[-1]))).changes


async def test_a_notification_of_an_expired_channel_is_refused(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    async with listening(desk, source):
        desk.doc("Document", drive)
        change = desk.fake.channels.take()[-1]
    desk.corpus.clock_offset = timedelta(days=8)
    with pytest.raises(Refused, match="has ended"):
        await source.on_event(as_request(change))


@asynccontextmanager
async def token_clock(desk: Desk) -> AsyncIterator[None]:
    """Tokens go by the real clock."""
    verified = desk.fake.tokens._verify
    ahead = desk.corpus.clock_offset

    def by_real_time(assertion: str, url: str) -> dict[str, object]:
        desk.corpus.clock_offset = timedelta()
        try:
            return verified(assertion, url)
        finally:
            desk.corpus.clock_offset = ahead

    desk.fake.tokens._verify = by_real_time  # type: ignore[method-assign]
    yield


async def test_a_restarted_instance_accepts_notifications_of_its_earlier_channels(desk: Desk) -> None:
    drive = desk.drive()
    async with listening(desk, desk.source(drives=[drive])):
        pass
    desk.doc("Document", drive)
    assert (await desk.source(drives=[drive]).on_event(as_request(desk.fake.channels.take()[-1]))).changes


async def test_a_change_without_a_notification_is_read_by_the_next_poll(desk: Desk) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    cursor = await source.start()
    async with listening(desk, source):
        desk.fake.channels.take()
        desk.fake.channels.open.clear()
        id_ = desk.doc("Document", drive)
        assert desk.fake.channels.take() == []
    assert set((await changed(source, cursor))[0]) == {id_}


async def test_a_drive_that_is_no_longer_read_has_its_channel_stopped(desk: Desk) -> None:
    first, second = desk.drive(), desk.drive()
    async with listening(desk, desk.source(drives=[first, second]), channels=2):
        pass
    async with listening(desk, desk.source(drives=[first])):
        assert [channel.drive for channel in desk.fake.channels.open.values()] == [first]


async def test_a_channel_that_cannot_be_replaced_stays_open_and_the_others_are_replaced(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted([desk.drive(), desk.drive()])
    source = desk.source(drives=[first, second])
    async with listening(desk, source, channels=2):
        old = {channel.drive: channel.id for channel in desk.fake.channels.open.values()}
    desk.corpus.clock_offset = timedelta(days=6, hours=13)
    watch = desk.fake.channels.watch

    def refuses(body: Any, *, drive: str | None, uri: str) -> dict[str, Any]:
        if drive == first:
            raise ApiError(403, "rateLimitExceededForWatch", "Not now.")
        return watch(body, drive=drive, uri=uri)

    monkeypatch.setattr(desk.fake.channels, "watch", refuses)
    async with token_clock(desk), listening(desk, desk.source(drives=[first, second]), channels=2):
        async with asyncio.timeout(30):
            while old[second] in desk.fake.channels.open:
                await asyncio.sleep(0.01)
    assert old[first] in desk.fake.channels.open


async def test_listening_continues_if_google_refuses_to_open_a_channel(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = desk.drive()
    monkeypatch.setattr("tests.support.connectors.google_drive_kit.EVENTS", "http://plain.example.com/events")
    plain = desk.source(drives=[drive])
    reactions: asyncio.Queue[Reaction] = asyncio.Queue()
    task = asyncio.create_task(plain.listen(reactions.put))
    try:
        async with asyncio.timeout(30):
            while ("POST", "/drive/v3/changes/watch") not in desk.fake.requests:
                await asyncio.sleep(0.01)
        plain._listener.sweep()
        assert (await asyncio.wait_for(reactions.get(), 30)).sweep
        assert not task.done()
    finally:
        task.cancel()
