"""Uploads over the real HTTP API and the drop folder, through a runner on real Kafka and Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docx
import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from connectors.declared import Key
from connectors.http import Parts, app
from connectors.runner.instance import Instance
from connectors.runner.plan import Plan, Services
from connectors.serving import served
from connectors.uploads.desk import Desk
from connectors.uploads.options import UploadsOptions
from connectors.uploads.source import Uploads
from connectors.uploads.table import Uploaded, Words
from connectors.uploads.words import sanitised
from pipeline.kafka import producer
from pipeline.stores.postgres import Pool, open_pool
from pipeline.telemetry import Metrics
from tests.pdf_files import Line, Sheet, encrypted_pdf, pdf_of, typeset
from tests.space import Space
from topics.codec import decode
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted, IdentityChanged
from topics.producer import Producer
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

pytestmark = pytest.mark.stack

KEYS = {
    name: Key(sha256=hashlib.sha256(f"key-{name}".encode()).hexdigest(), tenant=tenant, may=may)
    for name, tenant, may in (
        ("acme", "acme", frozenset({"uploads"})),
        ("rival", "rival", frozenset({"uploads"})),
        ("nothing", "acme", frozenset()),
        ("nowhere", "nowhere", frozenset({"uploads"})),
    )
}


@dataclass
class Office:
    """Two tenants' instances of uploads, and the HTTP side. ``start`` and ``stop`` are a worker's life."""

    space: Space
    pool: Pool
    kafka: Producer
    home: Path
    client: httpx.AsyncClient = field(init=False)
    instances: dict[str, Instance] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def declare(self, name: str = "files", tenant: str = "acme", **options: Any) -> None:
        given = UploadsOptions(**options)
        plan = Plan(
            name=name, tenant=tenant, kind="uploads", make=lambda context: Uploads(given, context),
            poll_seconds=3600, sweep_seconds=3600, groups_seconds=3600,
        )  # fmt: skip
        services = Services(
            postgres=self.space.settings.postgres,
            pool=self.pool,
            producer=self.kafka,
            metrics=Metrics(),
            folder=self.home,
        )
        self.instances[name] = Instance(plan, services)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(one.run()) for one in self.instances.values()]
        for one in self.instances.values():
            await until(lambda one=one: one.activities.get("full") and one.activities["full"].status.succeeded_at)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def desk(self, name: str = "files") -> Desk:
        source = self.instances[name].source
        assert isinstance(source, Uploads)
        return source.desk

    async def upload(self, data: bytes, name: str = "a.txt", **fields: Any) -> str:
        """Returns the id."""
        answer = await self.client.post(
            "/v1/uploads", files={"file": (name, data)}, data={"acl_tags": "staff", **fields}
        )
        assert answer.status_code == 202, answer.text
        assert answer.json()["status_url"] == f"/v1/uploads/{answer.json()['id']}" == answer.headers["location"]
        return str(answer.json()["id"])

    async def status(self, id_: str) -> dict[str, Any]:
        answer = await self.client.get(f"/v1/uploads/{id_}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ended(self, id_: str, *, as_: str = "published") -> dict[str, Any]:
        async def there() -> bool:
            return (await self.status(id_))["state"] == as_

        try:
            await until(there)
        except TimeoutError:
            pytest.fail(f"{await self.status(id_)}")
        return await self.status(id_)

    async def messages(self) -> list[AnyMessage]:
        """All that was ever published, each partition in order."""
        settings = self.space.settings.kafka
        consumer = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign(
                [
                    TopicPartition(f"{settings.topic_prefix}{topic.name}", n)
                    for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES)
                    for n in range(topic.partitions)
                ]
            )
            await consumer.seek_to_beginning()
            ends = await consumer.end_offsets(consumer.assignment())
            found: list[AnyMessage] = []
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    found += [decode(record.value, record.headers) for record in records]
            return sorted(found, key=lambda message: message.observed_at)
        finally:
            await consumer.stop()

    async def asked(self, action: str) -> None:
        """As ``penstock connector run`` does."""
        [(number,)] = await self.space.query(
            "INSERT INTO connector_asks (tenant, source, action) VALUES ('acme', 'files', %s) RETURNING id", action
        )

        async def answered() -> bool:
            rows = await self.space.query("SELECT done_at IS NOT NULL FROM connector_asks WHERE id = %s", number)
            return bool(rows[0][0])

        await until(answered)


async def until(condition: Callable[[], Any], within_seconds: float = 60) -> None:
    async with asyncio.timeout(within_seconds):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def an_office(space: Space, home: Path) -> AsyncIterator[Office]:
    async with open_pool(space.settings.postgres) as pool, producer(space.settings.kafka) as kafka:
        office = Office(space, pool, kafka, home)
        http = app(Parts(office.instances, KEYS, kafka, Metrics()))
        headers = {"authorization": "Bearer key-acme"}
        async with served(http) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            office.client = client
            try:
                yield office
            finally:
                await office.stop()


@pytest.fixture
async def office(space: Space, tmp_path: Path) -> AsyncIterator[Office]:
    async with an_office(space, tmp_path / "connectors") as office:
        yield office


def word_file(text: str) -> bytes:
    document = docx.Document()
    document.add_heading("Travel policy", 1)
    document.add_paragraph(text)
    made = io.BytesIO()
    document.save(made)
    return made.getvalue()


def upserts(messages: list[AnyMessage]) -> list[DocumentUpserted]:
    return [message for message in messages if isinstance(message, DocumentUpserted)]


# From the upload to what is found


async def test_an_upload_becomes_searchable_is_replaced_and_is_gone_when_it_is_deleted(
    office: Office, space: Space
) -> None:
    space.start("detect", "vectors", "keywords")
    office.declare()
    await office.start()
    id_ = await office.upload(word_file("Trains before planes, always."), "policy.docx", external_id="hr/travel")
    shown = await office.ended(id_, as_="searchable")
    assert (shown["file_name"], shown["external_id"], shown["reason"]) == ("policy.docx", "hr/travel", None)
    found = await search(space, "trains or planes")
    assert [one["title"] for one in found] == ["Travel policy"]
    replaced = await office.client.put(f"/v1/uploads/{id_}", files={"file": ("policy.docx", word_file("Ships only."))})
    assert replaced.json()["id"] == id_
    await until(lambda: _newer(office, id_, shown["version"]))
    await office.ended(id_, as_="searchable")
    assert "Ships only." in (await search(space, "ships"))[0]["text"]
    assert not [one for one in await search(space, "trains planes") if "Trains" in one["text"]]
    assert (await office.client.delete(f"/v1/uploads/{id_}")).status_code == 202

    async def gone() -> bool:
        return not await search(space, "ships")

    await until(gone)
    assert (await office.status(id_))["state"] == "deleted"
    assert [path for path in (office.home / "files" / "originals").rglob("*") if path.is_file()] == []


async def _newer(office: Office, id_: str, version: int) -> bool:
    return bool((await office.status(id_))["version"] > version)


async def search(space: Space, query: str) -> list[dict[str, Any]]:
    code, found = await space.penstock("search", query, "--tenant", "acme", "--tag", "staff", "--json")
    assert code == 0, found
    return list(found["results"])


async def test_each_file_that_gives_no_text_ends_as_what_it_is_with_a_word_for_its_owner(office: Office) -> None:
    office.declare(max_bytes=300_000)
    await office.start()
    scan = await office.upload(typeset([Sheet(picture=True)]), "scan.pdf")
    locked = await office.upload(encrypted_pdf(), "locked.pdf")
    cut = await office.upload(word_file("text")[:-3000], "cut.docx")
    long = await office.upload(b"word " * 10, "fine.txt")
    shown = await office.ended(scan, as_="needs_ocr")
    assert "recognise its text before uploading" in shown["reason"]
    assert "password" in (await office.ended(locked, as_="encrypted"))["reason"]
    shown = await office.ended(cut, as_="failed")
    assert (shown["code"], "upload it again" in shown["reason"]) == ("truncated", True)
    await office.ended(long)
    rows = await office.space.query(
        "SELECT problem_code, problem_message FROM connector_items WHERE problem_code IS NOT NULL"
    )
    assert sorted(code for code, _ in rows) == [
        "encrypted",
        "needs_ocr",
        "truncated",
    ]  # as `connector status` shows them
    assert any(message.startswith("scan.pdf is a PDF of 1 pages") for _, message in rows)
    too_long = await office.client.post("/v1/uploads?acl_tags=staff&file_name=a.txt", content=b"x" * 400_000)
    assert (too_long.status_code, "at most 300,000 bytes" in too_long.json()["detail"]) == (413, True)
    assert [one.title for one in upserts(await office.messages())] == ["fine.txt"]


async def test_a_new_version_that_cannot_be_read_leaves_the_one_before_and_says_so(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(pdf_of(["Words that stay"]), "a.pdf")
    await office.ended(id_)
    await office.client.put(
        f"/v1/uploads/{id_}", files={"file": ("a.pdf", encrypted_pdf())}, data={"acl_tags": "board"}
    )
    await office.ended(id_, as_="encrypted")
    messages = await office.messages()
    assert [type(one) for one in messages] == [DocumentUpserted, AccessChanged]
    assert messages[1].acl_tags == ["board"]  # type: ignore[union-attr]


# What is said of a file


async def test_title_tags_metadata_and_names_are_published_as_they_were_said(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(
        typeset([Sheet([Line(72, 700, "Some words here")])]), "../../etc/Ümläut\u202e report.pdf",
        title="The report",
        acl_tags=["staff", "user:ada@example.org"], required_tags='["nda"]', external_id="r/1",
        metadata='{"year": 2026, "tags": ["a", "b"]}',
    )  # fmt: skip
    await office.ended(id_)
    [message] = upserts(await office.messages())
    assert (message.tenant, message.source, message.external_id) == ("acme", "files", "r/1")
    assert (message.title, message.acl_tags, message.required_tags) == (
        "The report", ["staff", "user:ada@example.org"], ["nda"]
    )  # fmt: skip
    assert message.metadata["file_name"] == "Ümläut report.pdf"
    assert (message.metadata["year"], message.metadata["tags"], message.metadata["pages"]) == (2026, ["a", "b"], 1)


async def test_the_file_alone_with_its_words_in_the_query(office: Office) -> None:
    office.declare()
    await office.start()
    answer = await office.client.post(
        "/v1/uploads", params={"acl_tags": ["staff", "ops"], "file_name": "notes", "title": "Notes"},
        content=b"<h1>Notes</h1><p>Kept.", headers={"content-type": "text/html; charset=utf-8"},
    )  # fmt: skip
    await office.ended(answer.json()["id"])
    [message] = upserts(await office.messages())
    assert (message.title, message.acl_tags, message.media_type) == ("Notes", ["ops", "staff"], "text/html")


async def test_the_same_again_publishes_nothing_and_other_access_publishes_only_access(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"some words", external_id="x")
    before = await office.ended(id_)
    assert await office.upload(b"some words", external_id="x") == id_
    assert (await office.status(id_))["version"] == before["version"]
    changed = await office.client.put(f"/v1/uploads/{id_}", data={"acl_tags": "board"})
    assert changed.status_code == 202, changed.text
    await until(lambda: _newer(office, id_, before["version"]))
    await office.ended(id_)
    assert [type(one) for one in await office.messages()] == [DocumentUpserted, AccessChanged]
    await office.client.put(f"/v1/uploads/{id_}", files={"file": ("a.txt", b"other words")})

    async def republished() -> bool:
        return len(await office.messages()) == 3

    await until(republished)
    last = (await office.messages())[-1]
    assert isinstance(last, DocumentUpserted)
    assert (last.content, last.acl_tags) == ("other words", ["board"])  # what was not said anew stays


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"acl_tags": ""}, "acl_tags: name who may read it"), ({"acl_tags": "[]"}, "acl_tags: name who may read it"),
        ({"acl_tags": "[1]"}, "acl_tags: a list of tags"), ({"acl_tags": "t" * 501}, "acl_tags"),
        ({"metadata": "{"}, "metadata: is not JSON"), ({"metadata": '{"a": {"b": 1}}'}, "metadata"),
        ({"tenant": "rival"}, "'tenant': no such field"), ({"title": "t" * 4001}, "title"),
        ({"source": "theirs"}, "source"), ({"external_id": "x" * 2001}, "external_id"),
        ({"title": ["a", "b"]}, "title"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused_at_once_with_one_line(
    office: Office, fields: dict[str, Any], says: str
) -> None:
    office.declare()
    await office.start()
    form = {"acl_tags": "staff", **fields}
    answer = await office.client.post("/v1/uploads", files={"file": ("a.txt", b"text")}, data=form)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith(says)
    assert "\n" not in answer.json()["detail"]
    assert await office.space.query("SELECT * FROM uploads") == []
    assert [path for path in (office.home / "files").rglob("*") if path.is_file()] == []


async def test_bodies_that_are_no_form_or_too_much_of_one(office: Office) -> None:
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

    assert await answered(b"") == (422, "file: missing or empty")
    assert (await answered(dripping()))[0] == 413
    assert (await answered(head + b"x" * 2000 + b"\r\n--b--\r\n", form))[0] == 413
    assert (await answered(head + b"text", form))[1] == "body: ends in the middle of the form"
    assert (await answered(b"nonsense", form))[0] == 422
    assert (await answered(b"x", {"content-type": "multipart/form-data"}))[0] == 422
    assert "more than one file" in (await answered(head + b"a\r\n" + head + b"b\r\n--b--\r\n", form))[1]
    huge = b'--b\r\nContent-Disposition: form-data; name="title"\r\n\r\n' + b"t" * 500_000 + b"\r\n--b--\r\n"
    assert "title: is longer" in (await answered(huge, form))[1]
    assert [path for path in (office.home / "files").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a.pdf", "a.pdf"), ("../../a.pdf", "a.pdf"), ("C:\\Users\\x\\a.pdf", "a.pdf"), ("", "upload"), ("..", "upload"),
     ("a\x00\n\u202eb.pdf", "ab.pdf"), ("x" * 300 + ".docx", "x" * 195 + ".docx"), ("e\u0301.txt", "é.txt")],
)  # fmt: skip
def test_file_names(given: str, kept: str) -> None:
    assert sanitised(given) == kept


# Whose it is


async def test_no_key_reaches_another_tenants_files(office: Office) -> None:
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


async def test_the_list_goes_page_by_page_newest_first(office: Office) -> None:
    office.declare()
    await office.start()
    ids = [await office.upload(b"text", f"{n}.txt") for n in range(5)]
    await office.client.delete(f"/v1/uploads/{ids[2]}")
    seen: list[str] = []
    before = None
    while True:
        query = {"limit": 2} | ({"before": before} if before else {})
        page = (await office.client.get("/v1/uploads", params=query)).json()
        seen += [one["id"] for one in page["uploads"]]
        if (before := page["next"]) is None:
            break
    assert seen == [ids[4], ids[3], ids[1], ids[0]]


async def test_members_of_tags_come_from_the_settings_and_are_told(office: Office, tmp_path: Path) -> None:
    members = tmp_path / "members.toml"
    members.write_text('[members]\nstaff = ["Bob@example.org"]\n')
    office.declare(members={"staff": ["ada@example.org"], "ops": ["ada@example.org"]}, members_file=members)
    await office.start()

    async def held() -> dict[str, list[str]]:
        return {one.principal: one.groups for one in await office.messages() if isinstance(one, IdentityChanged)}

    async def told() -> bool:
        return await held() == {"ada@example.org": ["ops", "staff"], "bob@example.org": ["staff"]}

    await until(told)
    members.write_text("[members]\n")
    await office.asked("groups")
    assert await held() == {"ada@example.org": ["ops", "staff"], "bob@example.org": []}


# What goes wrong


async def test_while_the_connector_does_not_run_the_client_is_told_to_come_again(office: Office) -> None:
    office.declare()
    answer = await office.client.post("/v1/uploads", files={"file": ("a.txt", b"text")}, data={"acl_tags": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_what_was_accepted_survives_a_crash_and_nothing_is_published_twice(office: Office) -> None:
    office.declare(page_size=3)
    await office.start()
    for n in range(5):
        await office.ended(await office.upload(b"text", f"{n}.txt"))
    desk = office.desk()
    while not desk.arrived.empty():
        desk.arrived.get_nowait()
    await office.stop()
    with desk.writing() as file:  # accepted, and then the worker was killed before it told of it
        file.write(b"late")
        words = (await desk.table.newest(None, 1))[0]
        late = await desk.hand_in(file, _words_like(words), external_id="late")
    deleted = (await desk.table.named([words.external_id]))[0]
    await desk.delete(deleted.id)
    office.instances.clear()
    office.declare(page_size=3)
    await office.start()
    await office.asked("changes")
    await office.ended(str(late.id))
    messages = await office.messages()
    assert sum(isinstance(one, DocumentUpserted) for one in messages) == 6
    assert [one.external_id for one in messages if isinstance(one, DocumentDeleted)] == [deleted.external_id]
    await office.asked("full")
    await office.asked("sweep")
    assert len(await office.messages()) == len(messages)


def _words_like(one: Uploaded) -> Words:
    return Words(
        file_name="late.txt", media_type=None, title=None, acl_tags=one.acl_tags, required_tags=[], metadata={}
    )


async def test_an_original_that_is_lost_says_so_and_what_was_published_stays(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"text")
    await office.ended(id_)
    for path in (office.home / "files" / "originals").rglob("*"):
        if path.is_file():
            path.unlink()
    await office.asked("full")
    assert (await office.ended(id_, as_="failed"))["code"] == "original_lost"
    assert [type(one) for one in await office.messages()] == [DocumentUpserted]


async def test_equal_files_share_an_original_which_stays_until_the_last_is_deleted(office: Office) -> None:
    office.declare()
    await office.start()
    one, other = await office.upload(b"text", "a.txt"), await office.upload(b"text", "b.txt")
    originals = office.home / "files" / "originals"

    def kept() -> int:
        return sum(path.is_file() for path in originals.rglob("*"))

    assert kept() == 1
    assert oct(next(path for path in originals.rglob("*") if path.is_file()).stat().st_mode)[-3:] == "600"
    await office.client.delete(f"/v1/uploads/{one}")
    assert kept() == 1
    await office.ended(other)
    await office.client.delete(f"/v1/uploads/{other}")
    assert kept() == 0


# The drop folder


@dataclass
class Box:
    folder: Path
    done: Path
    failed: Path

    def put(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "in").mkdir()
    return Box((tmp_path / "in").resolve(), tmp_path / "done", tmp_path / "failed")


async def test_files_put_into_the_folder_are_taken_when_they_stand_still_and_moved_when_they_are_read(
    office: Office, box: Box
) -> None:
    box.put("legal/.penstock.toml", b'acl = ["legal"]\nrequired = ["nda"]\n')
    box.put("legal/contract.docx", word_file("The parties agree."))
    box.put("memo.pdf", pdf_of(["A memo"]))
    box.put("scan.pdf", typeset([Sheet(picture=True)]))
    box.put("private/.penstock.toml", b"acl = []\n")
    secret = box.put("private/secret.txt", b"nobody")
    growing = box.put("growing.txt", b"first ")
    office.declare(
        folder=box.folder, done=box.done, failed=box.failed, acl_tags=["staff"], settle_seconds=1.0, scan_seconds=0.05
    )
    await office.start()
    for _ in range(20):  # somebody is still writing
        with growing.open("ab") as file:
            file.write(b"more ")
        await asyncio.sleep(0.1)
    with growing.open("ab") as file:
        file.write(b"last")
    await until(
        lambda: (
            {path.name for path in box.done.rglob("*") if path.is_file()}
            == {"contract.docx", "memo.pdf", "growing.txt"}
        )
    )
    await until(lambda: (box.failed / "scan.pdf.reason.txt").exists())
    assert "scan.pdf is a PDF of 1 pages" in (box.failed / "scan.pdf.reason.txt").read_text()
    assert (box.done / "legal" / "contract.docx").exists()
    assert secret.exists()
    messages = {one.external_id: one for one in upserts(await office.messages())}
    assert set(messages) == {"legal/contract.docx", "memo.pdf", "growing.txt"}
    contract = messages["legal/contract.docx"]
    assert (contract.acl_tags, contract.required_tags, contract.metadata["path"]) == (
        ["legal"],
        ["nda"],
        "legal/contract.docx",
    )
    assert messages["growing.txt"].content == "first " + "more " * 20 + "last"
    assert messages["memo.pdf"].acl_tags == ["staff"]
    source = office.instances["files"].source
    assert source is not None
    assert [problem.code for problem in await source.check()] == ["nobody"]


async def test_files_that_stay_are_taken_once_follow_their_access_and_do_not_come_back_when_deleted(
    office: Office, box: Box
) -> None:
    kept = box.put("a.txt", b"text")
    office.declare(folder=box.folder, acl_tags=["staff"], settle_seconds=0.1, scan_seconds=0.05)
    await office.start()

    async def types() -> list[type]:
        return [type(one) for one in await office.messages()]

    async def published() -> bool:
        uploads = (await office.client.get("/v1/uploads")).json()["uploads"]
        return [one["state"] for one in uploads] == ["published"]

    await until(published)
    await office.stop()
    office.instances.clear()
    office.declare(folder=box.folder, acl_tags=["staff"], settle_seconds=0.1, scan_seconds=0.05)
    await office.start()
    box.put(".penstock.toml", b'acl = ["board"]\n')

    async def restricted() -> bool:
        return await types() == [DocumentUpserted, AccessChanged]

    await until(restricted)
    [one] = (await office.client.get("/v1/uploads")).json()["uploads"]
    assert one["acl_tags"] == ["board"]
    await office.client.delete(f"/v1/uploads/{one['id']}")
    await asyncio.sleep(1)
    assert kept.exists()
    assert (await office.status(one["id"]))["state"] == "deleted"
    assert await types() == [DocumentUpserted, AccessChanged, DocumentDeleted]
    os.utime(kept)
    kept.write_bytes(b"put here again")
    await until(lambda: _is(office, one["id"], "published"))


async def _is(office: Office, id_: str, state: str) -> bool:
    return bool((await office.status(id_))["state"] == state)


def test_a_folder_for_what_is_done_within_the_drop_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="done lies within folder"):
        UploadsOptions(folder=tmp_path, done=tmp_path / "done")
