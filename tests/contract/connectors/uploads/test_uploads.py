"""Uploads from the request to what is found, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from connectors.extraction import ExtractionSettings, remote, sandbox, service
from connectors.uploads.store import Properties, Upload
from deploy.local.service import free_port
from tests.support.connectors.pdf_files import Sheet, encrypted_pdf, pdf_of, typeset
from tests.support.connectors.uploads_kit import KEYS, Office, an_office, is_newer, search, upserts, word_file
from tests.support.space import KEY_ENDS, Space
from tests.support.waiting import until
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

pytestmark = pytest.mark.stack


@pytest.fixture
async def office(space: Space, tmp_path: Path) -> AsyncIterator[Office]:
    async with an_office(space, tmp_path / "connectors") as office:
        yield office


# From the upload to what is found


@pytest.mark.slow
async def test_an_upload_becomes_searchable_can_be_replaced_and_is_deleted(office: Office, space: Space) -> None:
    space.start("detect", "vectors", "keywords")
    office.declare()
    await office.start()
    id_ = await office.upload(word_file("Trains before planes, always."), "policy.docx", external_id="hr/travel")
    shown = await office.ended(id_, as_="searchable")
    assert (shown["file_name"], shown["external_id"], shown["reason"]) == ("policy.docx", "hr/travel", None)
    results = await search(space, "trains or planes")
    assert [result["title"] for result in results] == ["Travel policy"]
    replaced = await office.client.put(f"/v1/uploads/{id_}", files={"file": ("policy.docx", word_file("Ships only."))})
    assert replaced.json()["id"] == id_
    await until(lambda: is_newer(office, id_, shown["version"]))
    await office.ended(id_, as_="searchable")
    assert "Ships only." in (await search(space, "ships"))[0]["text"]
    assert not [result for result in await search(space, "trains planes") if "Trains" in result["text"]]
    assert (await office.client.delete(f"/v1/uploads/{id_}")).status_code == 202

    async def named() -> bool:
        return (await office.status(id_))["token"] is not None

    await until(named)
    deleted = await office.status(id_)
    assert deleted["state"] == "deleted"
    code, response = await space.penstock(
        *("search", "ships", "--tenant", "acme", "--tag", "staff", "--json"),
        *("--at-least", deleted["token"], "--wait-seconds", "30"),
    )
    assert (code, response["at_least"]["applied"], response["results"]) == (0, True, [])
    assert [path for path in (office.home / "files" / "originals").rglob("*") if path.is_file()] == []


async def test_an_upload_without_text_ends_in_a_state_that_names_the_reason(office: Office) -> None:
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
    assert [upsert.title for upsert in upserts(await office.messages())] == ["fine.txt"]


async def test_an_upload_waits_while_the_extraction_service_is_unreachable(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is marked unreadable, and its owner sees that it has not failed."""
    async with service.serving(ExtractionSettings(port=0)) as url:
        port = int(url.rpartition(":")[2])
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "from_environment", lambda: ExtractionSettings(url=url))
    office.declare()
    await office.start()
    ids = [await office.upload(pdf_of([f"Properties of {n}"]), f"{n}.pdf") for n in range(2)]
    activity = office.instances["files"].activities["events"]
    await until(lambda: activity.status.state == "waiting" and "extraction service" in (activity.status.reason or ""))
    assert {(await office.status(id_))["state"] for id_ in ids} <= {"received", "extracting"}
    async with service.serving(ExtractionSettings(port=port)):
        for id_ in ids:
            await office.ended(id_)
    assert sorted(upsert.content for upsert in upserts(await office.messages())) == [
        "Properties of 0",
        "Properties of 1",
    ]
    assert await office.space.query("SELECT 1 FROM connector_items WHERE problem_code IS NOT NULL") == []


async def test_an_unreadable_replacement_leaves_the_published_text_and_reports_its_state(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(pdf_of(["Properties that stay"]), "a.pdf")
    await office.ended(id_)
    await office.client.put(
        f"/v1/uploads/{id_}", files={"file": ("a.pdf", encrypted_pdf())}, data={"acl_tags": "board"}
    )
    await office.ended(id_, as_="encrypted")
    async with asyncio.timeout(30):  # the status is written before the access is published
        while len(messages := await office.messages()) < 2:
            await asyncio.sleep(0.1)
    assert [type(message) for message in messages] == [DocumentUpserted, AccessChanged]
    assert messages[1].acl_tags == ["board"]  # type: ignore[union-attr]


# What goes wrong


async def test_an_upload_while_the_connector_does_not_run_is_answered_503_with_retry_after(office: Office) -> None:
    office.declare()
    answer = await office.client.post("/v1/uploads", files={"file": ("a.txt", b"text")}, data={"acl_tags": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_accepted_uploads_survive_a_crash_and_are_published_once(office: Office) -> None:
    office.declare(page_size=3)
    await office.start()
    for n in range(5):
        await office.ended(await office.upload(b"text", f"{n}.txt"))
    intake = office.intake()
    while not intake.changed.empty():
        intake.changed.get_nowait()
    await office.stop()
    with intake.writing() as file:  # accepted, and then the worker was killed before it told of it
        file.write(b"late")
        words = (await intake.table.newest(None, 1))[0]
        late = await intake.add(file, _words_like(words), external_id="late")
    deleted = (await intake.table.by_external_ids([words.external_id]))[0]
    await intake.delete(deleted.id)
    office.instances.clear()
    office.declare(page_size=3)
    await office.start()
    await office.run_action("changes")
    await office.ended(str(late.id))
    messages = await office.messages()
    assert sum(isinstance(message, DocumentUpserted) for message in messages) == 6
    assert [message.external_id for message in messages if isinstance(message, DocumentDeleted)] == [
        deleted.external_id
    ]
    await office.run_action("full")
    await office.run_action("sweep")
    assert len(await office.messages()) == len(messages)


def _words_like(one: Upload) -> Properties:
    return Properties(
        file_name="late.txt", media_type=None, title=None, acl_tags=one.acl_tags, required_tags=[], metadata={}
    )


async def test_an_upload_whose_original_file_is_lost_fails_but_its_document_stays(office: Office) -> None:
    office.declare()
    await office.start()
    id_ = await office.upload(b"text")
    await office.ended(id_)
    for path in (office.home / "files" / "originals").rglob("*"):
        if path.is_file():
            path.unlink()
    await office.run_action("full")
    assert (await office.ended(id_, as_="failed"))["code"] == "original_lost"
    assert [type(message) for message in await office.messages()] == [DocumentUpserted]


async def test_identical_uploads_share_one_original_file_until_the_last_is_deleted(office: Office) -> None:
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


async def test_the_connectors_worker_accepts_uploads_and_shows_unreadable_ones_in_its_status(
    space: Space, tmp_path: Path
) -> None:
    declared = tmp_path / "connectors.toml"
    declared.write_text(
        '[connector.files]\nkind = "uploads"\ntenant = "acme"\n'
        f'[key.intranet]\nexpires = {KEY_ENDS}\nsha256 = "{KEYS["acme"].sha256}"\ntenant = "acme"\nmay = ["uploads"]\n'
    )
    port = free_port()
    space.environment |= {"PENSTOCK_CONNECTORS_FILE": str(declared), "PENSTOCK_CONNECTORS_HTTP_PORT": str(port)}
    space.start("connectors")
    headers = {"authorization": "Bearer key-acme"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        files, form = {"file": ("canary-name.pdf", typeset([Sheet(picture=True)]))}, {"acl_tags": "staff"}

        async def accepted() -> bool:
            return (await client.post("/v1/uploads", files=files, data=form | {"external_id": "x"})).status_code == 202

        await until(accepted)

        async def read() -> bool:
            [one] = (await client.get("/v1/uploads")).json()["uploads"]
            return bool(one["state"] == "needs_ocr")

        await until(read)
        await client.post("/v1/uploads", files={"file": ("b.txt", b"canary-content")}, data=form)

    async def shown() -> bool:
        code, status = await space.penstock("connector", "status", "files", "--json")
        assert code == 0, status
        return "needs_ocr" in json.dumps(status)

    await until(shown)
    space.stop("connectors")
    assert "canary" not in space.log("connectors")
    assert "key-acme" not in space.log("connectors")
