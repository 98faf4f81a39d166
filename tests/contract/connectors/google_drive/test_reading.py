"""Reading of a Google Drive: texts, their properties, and reasons why a text cannot be read."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import openpyxl
import pytest

from connectors.fakes.google_drive_corpus import DOCUMENT, FOLDER, SHEET, SHORTCUT, SLIDES, Grant
from connectors.google_drive.content import XLSX
from connectors.source import Document, Gone, Unreadable
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import everything, listing, read


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


def workbook(*sheets: str) -> bytes:
    book, to = openpyxl.Workbook(), io.BytesIO()
    book.active.title = sheets[0]
    for name in sheets[1:]:
        book.create_sheet(name)
    for sheet in book:
        sheet.append(["Item", "Price"])
        sheet.append([f"{sheet.title} item", 12])
    book.save(to)
    return to.getvalue()


# Documents


async def test_a_google_document_is_read_as_markdown_without_images(desk: Desk) -> None:
    drive = desk.drive()
    text = "\ufeff# Plan\n\nWe ship. ![the map][image1]\n\n[image1]: <data:image/png;base64,iVBORw0KGgo>\n"
    id_ = desk.doc("Plan", drive, text, by="ines@example.com")
    document = one_of(await everything(desk.source(drives=[drive])), id_)
    assert document.content == "# Plan\n\nWe ship. the map\n\n"
    assert document.media_type == "text/markdown"
    assert document.title == "Plan"
    assert document.author == "Ines"
    assert document.source_url == f"https://drive.google.com/file/d/{id_}/view?usp=drivesdk"
    assert document.source_modified_at == desk.corpus.items[id_].modified
    assert document.version == desk.corpus.items[id_].version
    assert document.metadata == {"mime_type": DOCUMENT, "drive_id": drive, "folder_id": drive}


def one_of(results: object, id_: str) -> Document:
    entry = results[id_]  # type: ignore[index]
    assert isinstance(entry, Document), entry
    return entry


async def test_a_document_that_google_does_not_export_as_markdown_is_read_as_html(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.corpus.add("Old", parent=drive, exports={"text/html": b"<h1>Old</h1>"}).id
    document = await read(desk.source(drives=[drive]), id_)
    assert (document.content, document.media_type) == ("<h1>Old</h1>", "text/html")


async def test_every_sheet_of_a_workbook_is_read(desk: Desk) -> None:
    drive = desk.drive()
    exports = {XLSX: workbook("First", "Second"), "text/csv": b"Item,Price\n"}
    id_ = desk.corpus.add("Prices", parent=drive, mime_type=SHEET, exports=exports).id
    document = await read(desk.source(drives=[drive]), id_)
    assert "First item" in document.content
    assert "Second item" in document.content
    assert list((desk.folder / "downloads").iterdir()) == []


async def test_slides_and_uploaded_files_are_read(desk: Desk) -> None:
    drive = desk.drive()
    slides = desk.corpus.add("Deck", parent=drive, mime_type=SLIDES, exports={"text/plain": b"A slide."}).id
    notes = desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Some notes.").id
    code = desk.corpus.add("run.py", parent=drive, mime_type="application/octet-stream", content=b"print(1)\n").id
    sheet = desk.corpus.add("up.xlsx", parent=drive, mime_type=XLSX, content=workbook("Only")).id
    documents = await everything(desk.source(drives=[drive]))
    assert one_of(documents, slides).content == "A slide."
    assert one_of(documents, notes).content == "Some notes."
    assert one_of(documents, code).media_type == "text/x-python"
    assert "Only item" in one_of(documents, sheet).content


@pytest.mark.parametrize(("name", "mime_type"), [("a.msg", "application/vnd.ms-outlook"), ("a.doc", "")])
async def test_a_file_of_an_old_format_says_that_it_needs_an_extractor(desk: Desk, name: str, mime_type: str) -> None:
    drive = desk.drive()
    ole = bytes.fromhex("d0cf11e0a1b11ae1") + bytes(1_000)
    id_ = desk.corpus.add(name, parent=drive, mime_type=mime_type or "application/octet-stream", content=ole).id
    [entry] = await desk.source(drives=[drive]).fetch([id_])
    assert isinstance(entry, Unreadable)
    assert entry.code == "unsupported"
    assert "install an extractor for its ending" in entry.message


async def test_folders_shortcuts_forms_and_images_are_skipped_by_every_kind_of_read(desk: Desk) -> None:
    drive = desk.drive()
    target = desk.doc("Target", drive)
    others = [
        desk.corpus.add("Folder", parent=drive, mime_type=FOLDER).id,
        desk.corpus.add("Shortcut", parent=drive, mime_type=SHORTCUT, target=target).id,
        desk.corpus.add("Form", parent=drive, mime_type="application/vnd.google-apps.form").id,
        desk.corpus.add("photo.png", parent=drive, mime_type="image/png", content=b"\x89PNG").id,
        desk.corpus.add("data.bin", parent=drive, mime_type="application/octet-stream", content=b"\x00").id,
    ]
    source = desk.source(drives=[drive])
    assert set(await everything(source)) == set(await listing(source)) == {target}
    assert set(await source.fetch(others)) == {Gone(id_) for id_ in others}


async def test_a_listing_has_the_same_revisions_and_access_as_a_full_read(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who="staff@example.com"))
    ids = [desk.doc(f"Document {n}", drive) for n in range(7)]
    ids.append(desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Notes").id)
    source = desk.source(drives=[drive], page_size=3, sweep_page_size=2)
    documents, listed = await everything(source), await listing(source)
    assert set(documents) == set(listed) == set(ids)
    for id_ in ids:
        document = one_of(documents, id_)
        assert (document.revision, document.acl_tags) == (listed[id_].revision, listed[id_].acl_tags)


async def test_views_and_sharing_change_googles_version_but_not_the_revision(desk: Desk) -> None:
    id_ = desk.mine("Document")
    source = desk.source(my_drive=True)
    before = await read(source, id_)
    desk.corpus.view(id_)
    desk.corpus.share(id_, Grant(type="user", who="otto@example.com"))
    after = await read(source, id_)
    assert after.version > before.version
    assert after.revision == before.revision
    desk.corpus.rename(id_, "Another name")
    assert (await read(source, id_)).revision != before.revision


async def test_an_edit_with_an_unchanged_modification_time_changes_the_revision(desk: Desk) -> None:
    drive = desk.drive()
    item = desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Old.")
    source, moment = desk.source(drives=[drive]), item.modified
    before = await read(source, item.id)
    desk.corpus.edit(item.id, content=b"New.")
    item.modified = moment
    assert (await read(source, item.id)).revision != before.revision


# Why a text cannot be had


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ({"download": False}, "no_download"),
        ({"abusive": True}, "abusive"),
        ({"encrypted": True}, "encrypted"),
        ({"content": b"   \n"}, "empty"),
        ({"content": b"x" * 2001}, "too_large"),
        ({"content": b"\x00\x01\x02"}, "binary"),
    ],
)
async def test_an_uploaded_file_without_text_is_unreadable_with_the_reason(
    desk: Desk, spoil: dict[str, object], code: str
) -> None:
    drive = desk.drive()
    item = desk.corpus.add("notes.txt", parent=drive, mime_type="text/plain", content=b"Notes")
    for name, value in spoil.items():
        setattr(item, name, value)
    [entry] = await desk.source(drives=[drive], max_bytes=2000).fetch([item.id])
    assert isinstance(entry, Unreadable)
    assert entry.code == code
    assert entry.acl_tags
    assert entry.revision == (await listing(desk.source(drives=[drive])))[item.id].revision


async def test_a_document_beyond_googles_export_limit_is_too_large(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Huge", drive, "x" * (10 * 1024 * 1024 + 1))
    [entry] = await desk.source(drives=[drive]).fetch([id_])
    assert isinstance(entry, Unreadable)
    assert entry.code == "too_large"


async def test_an_exported_document_beyond_the_pipelines_limit_is_too_large(desk: Desk) -> None:
    drive = desk.drive()
    [entry] = await desk.source(drives=[drive]).fetch([desk.doc("Large", drive, "x" * (4 * 1024 * 1024 + 1))])
    assert isinstance(entry, Unreadable)
    assert entry.code == "too_large"


async def test_a_document_that_becomes_downloadable_has_another_revision(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    source = desk.source(drives=[drive])
    desk.corpus.items[id_].download = False
    before = (await listing(source))[id_].revision
    desk.corpus.items[id_].download = True
    assert (await listing(source))[id_].revision != before
