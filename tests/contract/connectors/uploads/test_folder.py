"""The drop folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from connectors.uploads.options import UploadsOptions
from tests.support.connectors.pdf_files import Sheet, pdf_of, typeset
from tests.support.connectors.uploads_kit import Office, an_office, has_state, upserts, word_file
from tests.support.space import Space
from tests.support.waiting import until
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

pytestmark = pytest.mark.stack


@pytest.fixture
async def office(space: Space, tmp_path: Path) -> AsyncIterator[Office]:
    async with an_office(space, tmp_path / "connectors") as office:
        yield office


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


async def test_drop_folder_files_are_read_once_unchanged_and_moved_to_done_or_failed(office: Office, box: Box) -> None:
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
    messages = {upsert.external_id: upsert for upsert in upserts(await office.messages())}
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


async def test_files_left_in_the_drop_folder_are_read_once_and_stay_deleted(office: Office, box: Box) -> None:
    kept = box.put("a.txt", b"text")
    office.declare(folder=box.folder, acl_tags=["staff"], settle_seconds=0.1, scan_seconds=0.05)
    await office.start()

    async def types() -> list[type]:
        return [type(message) for message in await office.messages()]

    async def published() -> bool:
        uploads = (await office.client.get("/v1/uploads")).json()["uploads"]
        return [upload["state"] for upload in uploads] == ["published"]

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
    await until(lambda: has_state(office, one["id"], "published"))


def test_a_done_folder_inside_the_drop_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="done is inside folder"):
        UploadsOptions(folder=tmp_path, done=tmp_path / "done")


async def test_a_done_folder_that_lies_within_the_drop_folder_by_way_of_a_link_is_refused(
    office: Office, box: Box, tmp_path: Path
) -> None:
    """Its files would be uploaded again, below one more folder each time, without end."""
    (box.folder / "read").mkdir()
    (tmp_path / "elsewhere").symlink_to(box.folder / "read")
    waiting = box.put("memo.txt", b"A memo")
    office.declare(
        folder=box.folder, done=tmp_path / "elsewhere", acl_tags=["staff"], settle_seconds=0.1, scan_seconds=0.05
    )
    await office.start()
    await asyncio.sleep(2)
    source = office.instances["files"].source
    assert source is not None
    [problem] = await source.check()
    assert (problem.code, "done leads inside it" in problem.message) == ("folders", True)
    assert waiting.exists()
    assert upserts(await office.messages()) == []
