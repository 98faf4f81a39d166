"""Changes in a Google Drive, as its log of changes reports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.google_drive.playground import ACCOUNT, STAFF
from connectors.source import CursorExpired, Document, Gone, Reaction
from pipeline.core.errors import Retryable
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import changed, everything


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


# Changes


async def test_changes_without_a_change_are_empty(desk: Desk) -> None:
    drive = desk.drive()
    desk.doc("Document", drive)
    source = desk.source(drives=[drive], my_drive=True)
    cursor = await source.start()
    assert [page async for page in source.changes(cursor)] == []


async def test_every_change_after_the_start_is_read_once(desk: Desk) -> None:
    drive = desk.drive()
    edited, trashed, deleted = (desk.doc(name, drive) for name in ("Edited", "Trashed", "Deleted"))
    moved = desk.doc("Moved", desk.corpus.add("Folder", parent=drive, mime_type=FOLDER).id)
    source = desk.source(drives=[drive], page_size=2)
    cursor = await source.start()
    desk.corpus.edit(edited, exports={"text/markdown": b"New text."})
    desk.corpus.trash(trashed)
    desk.corpus.delete(deleted)
    desk.corpus.move(moved, drive)
    made = desk.doc("Made", drive)
    changes, cursor = await changed(source, cursor)
    assert {id_: type(entry) for id_, entry in changes.items()} == {
        edited: Document,
        trashed: Gone,
        deleted: Gone,
        moved: Document,
        made: Document,
    }
    assert changes[edited].content == "New text."
    assert changes[moved].metadata["folder_id"] == drive
    assert (await changed(source, cursor))[0] == {}
    desk.corpus.trash(trashed, trashed=False)
    changes, _ = await changed(source, cursor)
    assert isinstance(changes[trashed], Document)


async def test_a_file_moved_to_another_read_drive_is_not_gone(desk: Desk) -> None:
    first, second = desk.drive(), desk.drive()
    id_ = desk.doc("Document", first)
    source = desk.source(drives=[first, second])
    cursor = await source.start()
    desk.corpus.move(id_, second)
    async for page in source.changes(cursor):
        assert all(isinstance(entry, Document) for entry in page.entries)
        cursor = page.cursor
    only_first = desk.source(drives=[first])
    assert await only_first.fetch([id_]) == [Gone(id_)]


async def test_a_file_no_longer_shared_with_the_account_is_gone(desk: Desk) -> None:
    id_ = desk.mine("Document")
    source = desk.source(my_drive=True)
    cursor = await source.start()
    desk.corpus.unshare(id_, Grant(type="user", who=ACCOUNT))
    assert (await changed(source, cursor))[0] == {id_: Gone(id_)}


@pytest.mark.parametrize("status", [400, 410])
async def test_an_unknown_change_token_counts_as_an_expired_cursor(desk: Desk, status: int) -> None:
    drive = desk.drive()
    source = desk.source(drives=[drive])
    cursor = await source.start()
    desk.fake.pages.epoch += 1
    desk.fake.pages.gone_status = status
    with pytest.raises(CursorExpired):
        await changed(source, cursor)


async def test_a_failing_google_reports_no_file_gone(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    source = desk.source(drives=[drive], patient=False)
    await source.start()
    desk.fake.faults.failing = 1
    with pytest.raises(Retryable):
        await source.fetch([id_])


# What a change calls for besides


async def test_a_changed_folder_causes_a_sweep_and_a_new_tag_a_read_of_its_members(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who=STAFF))
    full, empty = (desk.corpus.add(name, parent=drive, mime_type=FOLDER).id for name in ("Full", "Empty"))
    desk.doc("Document", full)
    source = desk.source(drives=[drive])
    await everything(source)
    cursor = await source.start()
    reactions: asyncio.Queue[Reaction] = asyncio.Queue()
    listening = asyncio.create_task(source.listen(reactions.put))
    try:
        first = await asyncio.wait_for(reactions.get(), 30)
        assert (set(first.groups), first.sweep) == ({f"drive:{drive}"}, False)
        desk.corpus.rename(empty, "Still empty")
        _, cursor = await changed(source, cursor)
        assert reactions.empty()
        desk.corpus.share(full, Grant(type="user", who="guest@elsewhere.org"))
        _, cursor = await changed(source, cursor)
        assert await asyncio.wait_for(reactions.get(), 30) == Reaction(ids=[], groups=set(), sweep=True)
        desk.corpus.share(drive, Grant(type="user", who="otto@example.com"))
        await changed(source, cursor)
        assert await asyncio.wait_for(reactions.get(), 30) == Reaction(ids=[], groups={f"drive:{drive}"}, sweep=True)
    finally:
        listening.cancel()
