"""The pretended Google Drive is held to what Google publishes: its discovery documents and its own client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.google_drive import FakeGoogleDrive
from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, SLIDES, Grant
from connectors.google_drive.playground import ACCOUNT, ADMIN, STAFF
from pipeline.runtime.http_server import served
from tests.support.connectors.google_drive_discovery import Recorder, google
from tests.support.connectors.google_drive_kit import Desk
from tests.support.connectors.reading import changed, everything, groups, listing


def furnish(desk: Desk) -> str:
    """Something of everything that is shown in its own way."""
    corpus = desk.corpus
    corpus.group(STAFF, "ines@example.com", "*", corpus.group("nested@example.com", "otto@example.com"))
    drive = desk.drive(Grant(type="group", who=STAFF, role="writer"), Grant(type="user", who=ADMIN, role="organizer"))
    folder = corpus.add("Plans", parent=drive, mime_type=FOLDER)
    desk.doc("Plan", folder.id)
    limited = corpus.add("Limited", parent=drive, mime_type=FOLDER)
    corpus.share(limited.id, Grant(type="user", who=ACCOUNT))
    corpus.limit(limited.id)
    text = corpus.add("notes.txt", parent=limited.id, mime_type="text/plain", content=b"Notes of the meeting.")
    corpus.add("Shortcut", parent=drive, mime_type=SHORTCUT, target=text.id)
    corpus.add("Deck", parent=drive, mime_type=SLIDES, exports={"text/plain": b"A slide."})
    mine = desk.mine(
        "Mine",
        Grant(type="domain", who="example.com", discoverable=True),
        Grant(type="anyone"),
        Grant(type="user", who="otto@example.com", expires=corpus.now().replace(year=2027)),
    )
    desk.corpus.items[mine].encrypted = True
    for number in range(5):
        desk.doc(f"Filler {number}", drive)
    return drive


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[tuple[Desk, Recorder]]:
    fake = FakeGoogleDrive()
    recorder = Recorder(fake)
    async with served(recorder) as url:
        desk = Desk(fake, url, tmp_path)
        try:
            yield desk, recorder
        finally:
            await desk.close()


async def test_requests_and_fake_responses_match_googles_discovery_documents(
    recorded: tuple[Desk, Recorder],
) -> None:
    desk, recorder = recorded
    drive = furnish(desk)
    source = desk.source(all_drives=True, my_drive=True, domains=["example.com"], page_size=3, sweep_page_size=3)
    cursor = await source.start()
    documents = await everything(source)
    assert set(await listing(source)) == set(documents)
    assert sorted(type(entry).__name__ for entry in documents.values()) == ["Document"] * 8 + ["Unreadable"]
    assert {STAFF, "nested@example.com"} & {tag.removeprefix("group:") for tag in await groups(source)}
    gone = desk.doc("Gone", drive)
    desk.corpus.delete(gone)
    desk.corpus.share(drive, Grant(type="user", who="otto@example.com"))
    desk.corpus.edit(next(iter(documents)), exports={"text/markdown": b"Other text."})
    await changed(source, cursor)
    await source.fetch([gone, *documents])
    assert await desk.source(drives=[drive], folders=[drive, "not-there"]).check() != []
    listening = asyncio.create_task(source.listen(_nothing))
    while len(desk.fake.channels.open) < 2:
        await asyncio.sleep(0.01)
    for channel in list(desk.fake.channels.open.values()):
        channel.expires_at = desk.corpus.now()
    desk.memory.stored["channels"] = [
        {**channel, "address": "https://old.example.com"} for channel in desk.memory.stored["channels"]
    ]
    listening.cancel()
    listening = asyncio.create_task(source.listen(_nothing))
    while ("POST", "/drive/v3/channels/stop") not in desk.fake.requests:
        await asyncio.sleep(0.01)
    listening.cancel()
    desk.fake.faults.throttled = 1
    await listing(source)
    assert recorder.wrong == []
    assert set(recorder.judged) == {
        "drive.v3 drive.changes.getStartPageToken",
        "drive.v3 drive.changes.list",
        "drive.v3 drive.changes.watch",
        "drive.v3 drive.channels.stop",
        "drive.v3 drive.drives.get",
        "drive.v3 drive.drives.list",
        "drive.v3 drive.files.export",
        "drive.v3 drive.files.get",
        "drive.v3 drive.files.list",
        "drive.v3 drive.permissions.list",
        "admin.directory_v1 directory.members.list",
        "admin.directory_v1 directory.users.list",
    }


async def _nothing(reaction: object) -> None:
    return None


@pytest.mark.parametrize("ask", ["changes.list", "files.list", "permissions.list", "files.get", "drives.list"])
async def test_every_field_of_the_fake_is_in_googles_discovery_documents(
    recorded: tuple[Desk, Recorder], ask: str
) -> None:
    """With ``fields=*`` it shows all that it has."""
    desk, recorder = recorded
    drive = furnish(desk)
    source = desk.source(drives=[drive])
    token = await source._api.drive_auth.token()
    client = google(desk, "drive", token=token)
    resource, method = ask.split(".")
    more: dict[str, Any] = {"fields": "*", "supportsAllDrives": True}
    if method == "list" and resource in ("files", "changes"):
        more |= {"includeItemsFromAllDrives": True, "driveId": drive}
    more |= {
        "changes.list": {"pageToken": (await source.start())["tokens"][drive]},
        "files.list": {"corpora": "drive"},
        "permissions.list": {"fileId": drive},
        "files.get": {"fileId": next(iter(await listing(source)))},
        "drives.list": {},
    }[ask]
    if ask == "drives.list":
        del more["supportsAllDrives"]
    if ask == "changes.list":
        desk.doc("New", drive)
    answer = await asyncio.to_thread(getattr(getattr(client, resource)(), method)(**more).execute)
    assert answer
    assert recorder.wrong == []
