"""Requests and responses of /v1/uploads, and the rights of their clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.uploads import store
from connectors.uploads.intake import sanitise_name
from connectors.withdraw import Withdrawal
from pipeline.core.identity import document_id
from pipeline.core.publication import access, content, deletion, publications_of
from tests.support.connectors.pdf_files import Line, Sheet, encrypted_pdf, typeset
from tests.support.connectors.uploads_kit import Office, an_office, is_newer, upserts
from tests.support.space import Space
from tests.support.waiting import until
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IdentityChanged

pytestmark = pytest.mark.stack


@pytest.fixture
async def office(space: Space, tmp_path: Path) -> AsyncIterator[Office]:
    async with an_office(space, tmp_path / "connectors") as office:
        yield office


# What is said of a file


async def test_title_tags_metadata_and_names_of_an_upload_are_published(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(
        typeset([Sheet([Line(72, 700, "Some words here")])]),
        "../../etc/Ümläut\u202e report.pdf",
        title="The report",
        acl_tags=["staff", "user:ada@example.org"],
        required_tags='["nda"]',
        external_id="r/1",
        metadata='{"year": 2026, "tags": ["a", "b"]}',
    )
    await office.ended(id_)
    [message] = upserts(await office.messages())
    assert (message.tenant, message.source, message.external_id) == ("acme", "files", "r/1")
    assert (message.title, message.acl_tags, message.required_tags) == (
        "The report",
        ["staff", "user:ada@example.org"],
        ["nda"],
    )
    assert message.metadata["file_name"] == "Ümläut report.pdf"
    assert (message.metadata["year"], message.metadata["tags"], message.metadata["pages"]) == (2026, ["a", "b"], 1)


async def test_an_upload_may_be_a_raw_body_with_its_fields_in_the_query(office: Office) -> None:
    office.declare()
    await office.start()
    answer = await office.client.post(
        "/v1/uploads",
        params={"acl_tags": ["staff", "ops"], "file_name": "notes", "title": "Notes"},
        content=b"<h1>Notes</h1><p>Kept.",
        headers={"content-type": "text/html; charset=utf-8"},
    )
    await office.ended(answer.json()["id"])
    [message] = upserts(await office.messages())
    assert (message.title, message.acl_tags, message.media_type) == ("Notes", ["ops", "staff"], "text/html")


async def test_nul_in_any_property_is_dropped_before_the_file_is_stored(office: Office) -> None:
    """Postgres would refuse it, and every such request would leave a file that no quota counts."""
    office.declare()
    await office.start()
    id_ = await office.upload(b"some words", title="The\0 report", metadata='{"by": "A\\u0000da", "in": ["\\u0000x"]}')
    row = await office.ended(id_)
    assert (row["title"], row["metadata"]) == ("The report", {"by": "Ada", "in": ["x"]})
    part = b'--X\r\nContent-Disposition: form-data; name="%s"\r\n%b\r\n%b\r\n'
    form = part % (b"acl_tags", b"", b"staff")
    form += part % (b'f"; filename="a', b"Content-Type: text/\0plain\r\n", b"words")
    headers = {"Content-Type": "multipart/form-data; boundary=X"}
    answer = await office.client.post("/v1/uploads", content=form + b"--X--\r\n", headers=headers)
    assert answer.status_code == 202, answer.text


async def test_an_identical_upload_publishes_nothing_and_changed_access_only_access(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"some words", external_id="x")
    before = await office.ended(id_)
    assert await office.upload(b"some words", external_id="x") == id_
    assert (await office.status(id_))["version"] == before["version"]
    changed = await office.client.put(f"/v1/uploads/{id_}", data={"acl_tags": "board"})
    assert changed.status_code == 202, changed.text
    await until(lambda: is_newer(office, id_, before["version"]))
    await office.ended(id_)
    assert [type(message) for message in await office.messages()] == [DocumentUpserted, AccessChanged]
    await office.client.put(f"/v1/uploads/{id_}", files={"file": ("a.txt", b"other words")})

    async def republished() -> bool:
        return len(await office.messages()) == 3

    await until(republished)
    last = (await office.messages())[-1]
    assert isinstance(last, DocumentUpserted)
    assert (last.content, last.acl_tags) == ("other words", ["board"])  # what was not said anew stays


async def test_the_token_of_an_upload_names_exactly_what_was_published_of_it(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"some words", external_id="x")
    document = document_id("acme", "files", "x")
    before = await office.ended(id_)
    text = content(document, before["version"])
    assert publications_of(before["token"]) == (text,)

    await office.client.put(f"/v1/uploads/{id_}", data={"acl_tags": "board"})
    await until(lambda: is_newer(office, id_, before["version"]))
    shown = await office.ended(id_)
    [*_, changed] = await office.messages()
    assert isinstance(changed, AccessChanged)
    assert shown["version"] > before["version"], "a change of access alone has no version at the ledger"
    assert set(publications_of(shown["token"])) == {text, access(document, changed.observed_at)}

    await office.client.put(f"/v1/uploads/{id_}", files={"file": ("a.pdf", encrypted_pdf())})
    unreadable = await office.ended(id_, as_="encrypted")
    assert unreadable["token"] in (None, shown["token"]), "the text before it stays"

    await office.client.delete(f"/v1/uploads/{id_}")

    async def named() -> bool:
        return (await office.status(id_))["token"] is not None

    await until(named)
    [*_, deleted] = await office.messages()
    assert isinstance(deleted, DocumentDeleted)
    assert publications_of((await office.status(id_))["token"]) == (deletion(document, deleted.observed_at),)


async def test_an_upload_has_no_token_before_it_is_published_nor_if_it_never_was(office: Office) -> None:
    office.declare()
    await office.start()
    unreadable = await office.ended(await office.upload(encrypted_pdf(), "a.pdf"), as_="encrypted")
    assert unreadable["token"] is None
    id_ = await office.upload(b"some words")
    await office.ended(id_)
    await office.space.execute("UPDATE connector_items SET revision = '1.1' WHERE external_id = %s", id_)
    assert (await office.status(id_))["token"] is None, "what was published is an older version"


INVALID_FIELDS: Sequence[tuple[dict[str, Any], str]] = (
    ({"acl_tags": ""}, "acl_tags: name the readers"),
    ({"acl_tags": "[]"}, "acl_tags: name the readers"),
    ({"acl_tags": "[1]"}, "acl_tags: is not a JSON list"),
    ({"acl_tags": "t" * 501}, "acl_tags"),
    ({"metadata": "{"}, "metadata: is not JSON"),
    ({"metadata": '{"a": {"b": 1}}'}, "metadata"),
    ({"tenant": "rival"}, "'tenant': no such field"),
    ({"title": "t" * 4001}, "title"),
    ({"source": "theirs"}, "source"),
    ({"external_id": "x" * 2001}, "external_id"),
    ({"external_id": "".join(chr(0x20000 + 31 * n) for n in range(1_500))}, "external_id: is longer than 2000 bytes"),
    ({"external_id": "a\0b"}, "external_id: has U+0000"),
    ({"title": ["a", "b"]}, "title"),
)


async def test_invalid_fields_are_refused_with_a_one_line_reason_and_store_nothing(office: Office) -> None:
    office.declare()
    await office.start()
    for fields, says in INVALID_FIELDS:
        form = {"acl_tags": "staff", **fields}
        answer = await office.client.post("/v1/uploads", files={"file": ("a.txt", b"text")}, data=form)
        assert answer.status_code == 422, answer.text
        assert answer.json()["detail"].startswith(says)
        assert "\n" not in answer.json()["detail"]
    assert await office.space.query("SELECT * FROM uploads") == []
    assert [path for path in (office.home / "files").rglob("*") if path.is_file()] == []


async def test_malformed_and_too_large_bodies_are_refused_and_leave_no_file(office: Office) -> None:
    office.declare(max_bytes=1000)
    await office.start()
    form = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'

    async def answered(content: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
        answer = await office.client.post("/v1/uploads?acl_tags=a", content=content, headers=headers)
        return answer.status_code, answer.json()["detail"]

    async def dripping() -> AsyncIterator[bytes]:  # without a length
        for _ in range(50):
            yield b"x" * 100

    long = {"content-type": f"multipart/form-data; boundary={'b' * 300}"}
    assert await answered(b"--b", long) == (422, "body: is not a complete multipart/form-data form")
    assert await answered(b"") == (422, "file: missing or empty")
    assert (await answered(dripping()))[0] == 413
    assert (await answered(head + b"x" * 2000 + b"\r\n--b--\r\n", form))[0] == 413
    assert (await answered(head + b"text", form))[1] == "body: ends in the middle of the form"

    async def endless() -> AsyncIterator[bytes]:
        yield head + b"text\r\n--b--\r\n"
        for _ in range(100):
            yield b"x" * 65_536

    assert await answered(endless(), form) == (422, "body: is longer than its fields and its file")
    assert (await answered(b"nonsense", form))[0] == 422
    assert (await answered(b"x", {"content-type": "multipart/form-data"}))[0] == 422
    assert "more than one file" in (await answered(head + b"a\r\n" + head + b"b\r\n--b--\r\n", form))[1]
    huge = b'--b\r\nContent-Disposition: form-data; name="title"\r\n\r\n' + b"t" * 500_000 + b"\r\n--b--\r\n"
    assert "title: is longer" in (await answered(huge, form))[1]
    assert [path for path in (office.home / "files").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a.pdf", "a.pdf"),
        ("../../a.pdf", "a.pdf"),
        ("C:\\Users\\x\\a.pdf", "a.pdf"),
        ("", "upload"),
        ("..", "upload"),
        ("a\x00\n\u202eb.pdf", "ab.pdf"),
        ("x" * 300 + ".docx", "x" * 195 + ".docx"),
        ("e\u0301.txt", "é.txt"),
        # Putting a million marks into order takes a quarter of an hour.
        ("a" + "\u0345\u0334" * 500_000 + ".txt", "a" + "\u0334" * 195 + ".txt"),
    ],
)
def test_file_names_are_sanitised(given: str, kept: str) -> None:
    assert sanitise_name(given) == kept


# Whose it is


async def test_no_key_reaches_another_tenants_uploads(office: Office) -> None:
    office.declare()
    office.declare("theirs", "rival")
    await office.start()
    id_ = await office.upload(b"secret words", external_id="x")
    await office.ended(id_)
    client, path = office.client, f"/v1/uploads/{id_}"
    rival = {"authorization": "Bearer key-rival"}
    assert (await client.get(path, headers=rival)).status_code == 404
    assert (await client.delete(path, headers=rival)).status_code == 404
    assert (await client.put(path, headers=rival, files={"file": ("a", b"b")})).status_code == 404
    assert (await client.get("/v1/uploads", headers=rival)).json() == {"uploads": [], "next": None}
    assert (await client.get("/v1/uploads?source=files", headers=rival)).status_code == 404
    other = await client.post(
        "/v1/uploads", headers=rival, files={"file": ("a", b"b")}, data={"acl_tags": "a", "external_id": "x"}
    )
    assert other.json()["id"] != id_
    for method, at in (("POST", "/v1/uploads"), ("GET", path), ("DELETE", path), ("PUT", path), ("GET", "/v1/uploads")):
        assert (await client.request(method, at, headers={"authorization": ""})).status_code == 401
        assert (await client.request(method, at, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await client.request(method, at, headers={"authorization": "Bearer key-nothing"})).status_code == 403
        assert (await client.request(method, at, headers={"authorization": "Bearer key-nowhere"})).status_code == 404
    assert (await office.status(id_))["state"] == "published"


async def test_uploads_with_large_properties_are_listed_a_few_at_a_time(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have a megabyte of tags and metadata: lists of 500 filled the memory of all connectors."""
    monkeypatch.setattr(store, "PAGE_BYTES", 5_000)
    office.declare()
    await office.start()
    sizes = (2_000, 9_000, 2_000, 2_000, 2_000)
    ids = [
        await office.upload(b"text", f"{n}.txt", metadata=f'{{"label": "{"x" * size}"}}')
        for n, size in enumerate(sizes)
    ]
    pages: list[list[str]] = []
    before = None
    while not pages or before is not None:
        query = {"before": before} if before is not None else {}
        page = (await office.client.get("/v1/uploads", params=query)).json()
        pages.append([upload["id"] for upload in page["uploads"]])
        before = page["next"]
    assert [id_ for page in pages for id_ in page] == ids[::-1]
    assert [len(page) for page in pages] == [2, 1, 1, 1]


async def test_uploads_are_listed_in_pages_newest_first(office: Office) -> None:
    office.declare()
    await office.start()
    ids = [await office.upload(b"text", f"{n}.txt") for n in range(5)]
    await office.client.delete(f"/v1/uploads/{ids[2]}")
    seen: list[str] = []
    before = None
    while True:
        query = {"limit": 2} | ({"before": before} if before else {})
        page = (await office.client.get("/v1/uploads", params=query)).json()
        seen += [upload["id"] for upload in page["uploads"]]
        if (before := page["next"]) is None:
            break
    assert seen == [ids[4], ids[3], ids[1], ids[0]]


async def test_members_of_tags_come_from_the_settings_and_are_published(office: Office, tmp_path: Path) -> None:
    members = tmp_path / "members.toml"
    members.write_text('[members]\nstaff = ["Bob@example.org"]\n')
    office.declare(members={"staff": ["ada@example.org"], "ops": ["ada@example.org"]}, members_file=members)
    await office.start()

    async def held() -> dict[str, list[str]]:
        return {
            message.principal: message.groups
            for message in await office.messages()
            if isinstance(message, IdentityChanged)
        }

    async def is_complete() -> bool:
        return await held() == {"ada@example.org": ["ops", "staff"], "bob@example.org": ["staff"]}

    await until(is_complete)
    members.write_text("[members]\n")
    await office.run_action("groups")
    assert await held() == {"ada@example.org": ["ops", "staff"], "bob@example.org": []}


# What changes while a file arrives


@asynccontextmanager
async def arriving(office: Office, method: str, path: str) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request whose file ends with the context, after what the caller does in it."""
    go_on = asyncio.Event()

    async def file() -> AsyncIterator[bytes]:
        yield b"what is new, "
        await go_on.wait()
        yield b"and its end"

    headers = {"content-type": "text/plain"}
    request = asyncio.create_task(office.client.request(method, path, content=file(), headers=headers))
    await until(lambda: office.intake()._incoming_files == 1)
    await asyncio.sleep(0.2)  # its beginning was read
    yield request
    go_on.set()
    await request


async def test_a_file_that_took_long_to_arrive_does_not_undo_a_revocation(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"what was", external_id="rules")
    await office.ended(id_)
    for method, path in (("PUT", f"/v1/uploads/{id_}"), ("POST", "/v1/uploads?external_id=rules")):
        await office.client.put(f"/v1/uploads/{id_}", data={"acl_tags": "staff"})
        async with arriving(office, method, path) as request:
            revoked = await office.client.put(f"/v1/uploads/{id_}", data={"acl_tags": "board"})
            assert revoked.status_code == 202
        assert request.result().status_code == 202
        assert (await office.status(id_))["acl_tags"] == ["board"]


async def test_a_file_that_took_long_to_arrive_does_not_bring_a_deleted_upload_back(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"what was")
    await office.ended(id_)
    async with arriving(office, "PUT", f"/v1/uploads/{id_}") as request:
        assert (await office.client.delete(f"/v1/uploads/{id_}")).status_code == 202
    assert (request.result().status_code, request.result().json()["title"]) == (404, "No such upload")
    assert (await office.status(id_))["state"] == "deleted"
    assert not [path for path in (office.home / "files" / "originals").rglob("*") if path.is_file()]


async def test_a_file_that_arrives_while_its_connector_is_removed_is_not_stored(office: Office) -> None:
    """After `penstock forget source` it was there, and nothing would ever erase it."""
    office.declare()
    await office.start()
    await office.upload(b"what stays")
    async with arriving(office, "POST", "/v1/uploads?acl_tags=staff") as request:
        await Withdrawal(office.pool, None, "acme", "files").remove()
        await until(lambda: office.instances["files"].source is None)
    assert (request.result().status_code, request.result().json()["title"]) == (503, "Not running")
    assert await office.space.query("SELECT count(*) FROM uploads") == [(1,)]
    assert len([path for path in (office.home / "files" / "originals").rglob("*") if path.is_file()]) == 1


async def test_a_file_that_waits_for_the_quota_while_its_connector_is_removed_is_not_stored(office: Office) -> None:
    office.declare()
    await office.start()
    async with office.pool.connection() as connection:
        await connection.execute("SELECT lock_uploads_quota()")
        request = asyncio.create_task(office.client.post("/v1/uploads?acl_tags=staff", content=b"what is new"))
        waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not await office.space.query(waits):
            await asyncio.sleep(0.05)
        await Withdrawal(office.pool, None, "acme", "files").remove()
    assert (await request).status_code == 503
    assert await office.space.query("SELECT count(*) FROM uploads") == [(0,)]
