"""Google's own client library against the pretended Google Drive."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from googleapiclient.errors import HttpError

from connectors.google_drive.playground import ADMIN, STAFF
from tests.support.connectors.google_drive_discovery import google
from tests.support.connectors.google_drive_kit import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


async def in_thread(do: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(do)


async def test_googles_client_lists_files_in_pages_and_reads_them(desk: Desk) -> None:
    drive = desk.drive()
    ids = [desk.doc(f"Document {n}", drive, f"Text {n}.") for n in range(5)]
    binary = desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Plain bytes.").id

    def read() -> tuple[list[str], bytes, bytes]:
        client = google(desk, "drive")
        results: list[str] = []
        request = client.files().list(
            corpora="drive",
            driveId=drive,
            includeItemsFromAllDrives=True,
            supportsAllDrives=True,
            pageSize=2,
            q="trashed = false",
            fields="nextPageToken,files(id,name)",
        )
        while request is not None:
            page = request.execute()
            assert all(set(file) == {"id", "name"} for file in page["files"])
            results += [file["id"] for file in page["files"]]
            request = client.files().list_next(request, page)
        exported = client.files().export(fileId=ids[0], mimeType="text/markdown").execute()
        media = client.files().get_media(fileId=binary, supportsAllDrives=True).execute()
        return results, exported, media

    assert await in_thread(read) == ([*ids, binary], b"Text 0.", b"Plain bytes.")


async def test_googles_client_follows_changes(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    client = await in_thread(lambda: google(desk, "drive"))
    start = await in_thread(client.changes().getStartPageToken(driveId=drive, supportsAllDrives=True).execute)
    desk.corpus.edit(id_, exports={"text/markdown": b"Edited."})
    desk.corpus.rename(id_, "Renamed")
    other = desk.doc("Other", drive)
    desk.corpus.delete(other)
    token, results = start["startPageToken"], []
    while True:
        page = await in_thread(
            client.changes()
            .list(pageToken=token, driveId=drive, supportsAllDrives=True, includeItemsFromAllDrives=True, pageSize=1)
            .execute
        )
        results += [(change["fileId"], change["removed"]) for change in page["changes"]]
        if "newStartPageToken" in page:
            break
        token = page["nextPageToken"]
    assert results == [(id_, False), (other, True)]


async def test_googles_client_opens_and_stops_a_channel(desk: Desk) -> None:
    drive = desk.drive()
    client = await in_thread(lambda: google(desk, "drive"))
    about = {"driveId": drive, "supportsAllDrives": True, "includeItemsFromAllDrives": True}
    start = await in_thread(client.changes().getStartPageToken(driveId=drive, supportsAllDrives=True).execute)
    body = {"id": str(uuid.uuid4()), "type": "web_hook", "address": "https://hooks.example.com/drive", "token": "hush"}
    made = await in_thread(client.changes().watch(pageToken=start["startPageToken"], body=body, **about).execute)
    assert made["kind"] == "api#channel"
    desk.doc("Document", drive)
    sync, change = desk.fake.channels.take()
    assert (sync.headers["x-goog-resource-state"], change.headers["x-goog-resource-state"]) == ("sync", "change")
    assert change.headers["x-goog-channel-token"] == "hush"
    with pytest.raises(HttpError, match="not unique"):
        await in_thread(client.changes().watch(pageToken=start["startPageToken"], body=body, **about).execute)
    plain = {**body, "id": "other", "address": "http://hooks.example.com/drive"}
    with pytest.raises(HttpError, match="HTTPS"):
        await in_thread(client.changes().watch(pageToken=start["startPageToken"], body=plain, **about).execute)
    stopping = {"id": made["id"], "resourceId": made["resourceId"]}
    await in_thread(client.channels().stop(body=stopping).execute)
    desk.corpus.add("Another", parent=drive)
    assert desk.fake.channels.take() == []


async def test_googles_client_receives_googles_error_codes(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    client = await in_thread(lambda: google(desk, "drive"))

    async def refused(request: Any) -> tuple[int, str]:
        with pytest.raises(HttpError) as caught:
            await in_thread(request.execute)
        return caught.value.status_code, caught.value.error_details[0]["reason"]

    files = client.files()
    assert await refused(files.get(fileId="not-there", supportsAllDrives=True)) == (404, "notFound")
    assert await refused(files.get(fileId=id_)) == (404, "notFound")  # without supportsAllDrives it is not to be seen
    assert await refused(files.get(fileId=id_, supportsAllDrives=True, fields="nonsense")) == (400, "invalidParameter")
    assert await refused(files.list(q="colour = 'red'")) == (400, "invalid")
    assert await refused(files.list(pageToken="bogus")) == (400, "invalid")
    assert await refused(client.changes().list(pageToken="bogus")) == (400, "invalid")
    assert await refused(files.export(fileId=id_, mimeType="image/png")) == (400, "badRequest")
    assert await refused(files.get_media(fileId=id_, supportsAllDrives=True)) == (403, "fileNotDownloadable")
    desk.fake.faults.throttled = 1
    assert (await refused(files.list()))[0] == 429


async def test_googles_client_reads_group_members_only_as_an_administrator(desk: Desk) -> None:
    desk.corpus.group("inner@example.com", "otto@example.com")
    desk.corpus.group(STAFF, "ines@example.com", "inner@example.com")
    client = await in_thread(lambda: google(desk, "admin", subject=ADMIN))
    members = await in_thread(client.members().list(groupKey=STAFF, includeDerivedMembership=True).execute)
    assert [member["email"] for member in members["members"]] == ["ines@example.com", "otto@example.com"]
    nobody = await in_thread(lambda: google(desk, "admin", subject="ines@example.com"))
    with pytest.raises(HttpError, match="Not Authorized"):
        await in_thread(nobody.members().list(groupKey=STAFF).execute)
