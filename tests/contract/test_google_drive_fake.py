"""The pretended Google Drive is held to what Google publishes: its discovery documents and its own client library."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import httplib2
import jsonschema
import pytest
from google.oauth2 import service_account
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient import discovery
from googleapiclient.errors import HttpError
from starlette.types import Message, Receive, Scope, Send

from connectors.fakes.google_drive import FakeGoogleDrive
from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, SLIDES, Grant
from connectors.google_drive.auth import DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE
from connectors.google_drive.playground import ACCOUNT, ADMIN, STAFF
from connectors.serving import served
from tests.contract.google_drive_kit import Desk, listing, members, since, whole

DOCUMENTS = {
    name: json.loads(files("googleapiclient.discovery_cache").joinpath(f"documents/{name}.json").read_text())
    for name in ("drive.v3", "admin.directory_v1")
}


def strict(schema: Any) -> Any:
    """A discovery schema as JSON Schema that takes no property beyond the published ones."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": f"#/definitions/{schema['$ref']}"}
    kept = {name: strict(schema[name]) for name in ("type", "items", "enum") if name in schema}
    if "properties" in schema:
        kept["properties"] = {name: strict(one) for name, one in schema["properties"].items()}
        kept["additionalProperties"] = strict(schema.get("additionalProperties", False))
    if schema.get("format") == "date-time":
        kept["pattern"] = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"
    if schema.get("format") in ("int64", "uint64"):
        kept["pattern"] = r"^-?\d+$"
    return kept


def methods(resources: Any) -> Any:
    for resource in resources.values():
        yield from resource.get("methods", {}).values()
        yield from methods(resource.get("resources", {}))


class Recorder:
    """Judges every exchange by the discovery documents."""

    def __init__(self, fake: FakeGoogleDrive) -> None:
        self._fake = fake
        self.judged: dict[str, int] = {}
        self.wrong: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/token":
            await self._fake(scope, receive, send)
            return
        status, body, asked = 0, b"", b""

        async def told(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")
            await send(message)

        async def heard() -> Message:
            nonlocal asked
            message = await receive()
            asked += message.get("body", b"")
            return message

        await self._fake(scope, heard, told)
        self._judge(scope["method"], scope["path"], parse_qs(scope["query_string"].decode()), asked, status, body)

    def _judge(self, method: str, path: str, query: dict[str, Any], asked: bytes, status: int, body: bytes) -> None:
        name, spec = self._method(method, unquote(path))
        if spec is None:
            self.wrong.append(f"{method} {path}: no such method")
            return
        self.judged[name] = self.judged.get(name, 0) + 1
        document = DOCUMENTS[name.partition(" ")[0]]
        known = spec.get("parameters", {}).keys() | document["parameters"].keys()
        if extra := query.keys() - known:
            self.wrong.append(f"{name}: parameters {sorted(extra)}")
        deprecated = {one for one in query if spec.get("parameters", {}).get(one, {}).get("deprecated")}
        if deprecated:
            self.wrong.append(f"{name}: deprecated {sorted(deprecated)}")
        if not {DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE} & set(spec["scopes"]):
            self.wrong.append(f"{name}: not allowed with our scopes")
        if asked and spec.get("request"):
            self._valid(name, document, spec["request"], json.loads(asked))
        if status == 200 and spec.get("response") and query.get("alt") != ["media"]:
            self._valid(name, document, spec["response"], json.loads(body))
        if status >= 400 and set(json.loads(body)) != {"error"}:
            self.wrong.append(f"{name}: an error of another shape")

    def _method(self, method: str, path: str) -> tuple[str, Any]:
        for document, content in DOCUMENTS.items():
            for spec in methods(content["resources"]):
                pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(f"/{content['servicePath']}{spec['path']}"))
                if spec["httpMethod"] == method and re.fullmatch(pattern, path):
                    return f"{document} {spec['id']}", spec
        return "", None

    def _valid(self, name: str, document: Any, ref: Any, value: Any) -> None:
        schema = {**strict(ref), "definitions": {id_: strict(one) for id_, one in document["schemas"].items()}}
        found = jsonschema.Draft7Validator(schema).iter_errors(value)
        self.wrong += [f"{name}: {'/'.join(map(str, error.path))}: {error.message}" for error in found]


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
        "Mine", Grant(type="domain", who="example.com", discoverable=True), Grant(type="anyone"),
        Grant(type="user", who="otto@example.com", expires=corpus.now().replace(year=2027)),
    )  # fmt: skip
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


async def test_what_we_ask_and_what_the_fake_answers_is_as_googles_discovery_documents_say(
    recorded: tuple[Desk, Recorder],
) -> None:
    desk, recorder = recorded
    drive = furnish(desk)
    source = desk.source(all_drives=True, my_drive=True, domains=["example.com"], page_size=3, sweep_page_size=3)
    cursor = await source.start()
    found = await whole(source)
    assert set(await listing(source)) == set(found)
    assert sorted(type(entry).__name__ for entry in found.values()) == ["Document"] * 8 + ["Unreadable"]
    assert {STAFF, "nested@example.com"} & {tag.removeprefix("group:") for tag in await members(source)}
    gone = desk.doc("Gone", drive)
    desk.corpus.delete(gone)
    desk.corpus.share(drive, Grant(type="user", who="otto@example.com"))
    desk.corpus.edit(next(iter(found)), exports={"text/markdown": b"Other text."})
    await since(source, cursor)
    await source.fetch([gone, *found])
    assert await desk.source(drives=[drive], folders=[drive, "not-there"]).check() != []
    listening = asyncio.create_task(source.listen(_nothing))
    while len(desk.fake.channels.open) < 2:
        await asyncio.sleep(0.01)
    for channel in list(desk.fake.channels.open.values()):
        channel.ends = desk.corpus.now()
    desk.memory.kept["channels"] = [
        {**one, "address": "https://old.example.com"} for one in desk.memory.kept["channels"]
    ]
    listening.cancel()
    listening = asyncio.create_task(source.listen(_nothing))
    while ("POST", "/drive/v3/channels/stop") not in desk.fake.asked:
        await asyncio.sleep(0.01)
    listening.cancel()
    desk.fake.faults.throttled = 1
    await listing(source)
    assert recorder.wrong == []
    assert set(recorder.judged) == {
        "drive.v3 drive.changes.getStartPageToken", "drive.v3 drive.changes.list", "drive.v3 drive.changes.watch",
        "drive.v3 drive.channels.stop", "drive.v3 drive.drives.get", "drive.v3 drive.drives.list",
        "drive.v3 drive.files.export", "drive.v3 drive.files.get", "drive.v3 drive.files.list",
        "drive.v3 drive.permissions.list", "admin.directory_v1 directory.members.list",
        "admin.directory_v1 directory.users.list",
    }  # fmt: skip


async def _nothing(reaction: object) -> None:
    return None


@pytest.mark.parametrize("ask", ["changes.list", "files.list", "permissions.list", "files.get", "drives.list"])
async def test_everything_that_the_fake_can_show_is_published_by_google(
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


def google(desk: Desk, name: str, *, token: str | None = None, subject: str | None = None) -> Any:
    """Google's own client, from Google's own document, at the fake's address."""
    document = {"drive": "drive.v3", "admin": "admin.directory_v1"}[name]
    content = {**DOCUMENTS[document], "rootUrl": f"{desk.url}/", "mtlsRootUrl": f"{desk.url}/"}
    content["baseUrl"] = f"{desk.url}/{content['servicePath']}"
    scopes = [DRIVE_SCOPE] if name == "drive" else [MEMBER_SCOPE]
    credentials = service_account.Credentials.from_service_account_info(
        json.loads(desk.key), scopes=scopes, subject=subject
    )
    http = AuthorizedHttp(credentials, http=httplib2.Http(timeout=10))
    if token:

        class Bearer(httplib2.Http):
            def request(self, uri: str, *args: Any, headers: Any = None, **more: Any) -> Any:
                return super().request(
                    uri, *args, headers={**(headers or {}), "authorization": f"Bearer {token}"}, **more
                )

        http = Bearer(timeout=10)
    client = discovery.build_from_document(content, http=http)
    desk.afterwards.append(client.close)
    return client


async def in_thread(do: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(do)


@pytest.fixture
async def desk(recorded: tuple[Desk, Recorder]) -> Desk:
    return recorded[0]


async def test_googles_client_lists_pages_and_reads_files(desk: Desk) -> None:
    drive = desk.drive()
    ids = [desk.doc(f"Document {n}", drive, f"Text {n}.") for n in range(5)]
    binary = desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Plain bytes.").id

    def read() -> tuple[list[str], bytes, bytes]:
        client = google(desk, "drive")
        found: list[str] = []
        request = client.files().list(
            corpora="drive", driveId=drive, includeItemsFromAllDrives=True, supportsAllDrives=True, pageSize=2,
            q="trashed = false", fields="nextPageToken,files(id,name)",
        )  # fmt: skip
        while request is not None:
            page = request.execute()
            assert all(set(file) == {"id", "name"} for file in page["files"])
            found += [file["id"] for file in page["files"]]
            request = client.files().list_next(request, page)
        exported = client.files().export(fileId=ids[0], mimeType="text/markdown").execute()
        media = client.files().get_media(fileId=binary, supportsAllDrives=True).execute()
        return found, exported, media

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
    token, found = start["startPageToken"], []
    while True:
        page = await in_thread(
            client.changes()
            .list(pageToken=token, driveId=drive, supportsAllDrives=True, includeItemsFromAllDrives=True, pageSize=1)
            .execute
        )
        found += [(change["fileId"], change["removed"]) for change in page["changes"]]
        if "newStartPageToken" in page:
            break
        token = page["nextPageToken"]
    assert found == [(id_, False), (other, True)]


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


async def test_googles_client_sees_googles_errors(desk: Desk) -> None:
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


async def test_googles_client_asks_the_directory_on_behalf_of_an_administrator(desk: Desk) -> None:
    desk.corpus.group("inner@example.com", "otto@example.com")
    desk.corpus.group(STAFF, "ines@example.com", "inner@example.com")
    client = await in_thread(lambda: google(desk, "admin", subject=ADMIN))
    found = await in_thread(client.members().list(groupKey=STAFF, includeDerivedMembership=True).execute)
    assert [member["email"] for member in found["members"]] == ["ines@example.com", "otto@example.com"]
    nobody = await in_thread(lambda: google(desk, "admin", subject="ines@example.com"))
    with pytest.raises(HttpError, match="Not Authorized"):
        await in_thread(nobody.members().list(groupKey=STAFF).execute)
