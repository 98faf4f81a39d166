"""Shortcuts: the target's text, once, for those who may read the target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, Grant
from connectors.google_drive.playground import ACCOUNT
from connectors.source import Document, Gone
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import changed, everything, listing, read


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


def link(desk: Desk, parent: str, target: str) -> str:
    return desk.corpus.add("Shortcut", parent=parent, mime_type=SHORTCUT, target=target).id


async def test_only_its_own_readers_may_read_the_target_of_a_shortcut(desk: Desk) -> None:
    drive = desk.drive(Grant(type="user", who="otto@example.com"))
    target = desk.mine("Target", text="Plan.")
    first, second = link(desk, drive, target), link(desk, drive, target)
    source = desk.source(drives=[drive])
    assert (await everything(source)).keys() == (await listing(source)).keys() == {target}
    document = await read(source, target)
    assert document.content == "Plan."
    assert set(document.acl_tags) == {"user:ines@example.com", f"user:{ACCOUNT}"}  # not the drive's members
    desk.corpus.delete(first)
    assert (await listing(source)).keys() == {target}
    desk.corpus.delete(second)
    assert await listing(source) == {}
    assert await source.fetch([target]) == [Gone(target)]


async def test_a_target_that_is_read_anyway_is_read_where_it_is(desk: Desk) -> None:
    drive = desk.drive()
    target = desk.doc("Target", drive)
    link(desk, drive, target)
    source = desk.source(drives=[drive])
    assert (await listing(source)).keys() == {target}
    desk.corpus.delete(target)
    assert await source.fetch([target]) == [Gone(target)]


async def test_a_shortcut_leads_out_of_the_folder_that_is_read(desk: Desk) -> None:
    drive = desk.drive()
    folder = desk.corpus.add("Folder", parent=drive, mime_type=FOLDER).id
    target = desk.doc("Target", drive)
    source = desk.source(folders=[folder])
    assert await listing(source) == {}
    cursor = await source.start()
    link(desk, folder, target)
    entries, _ = await changed(source, cursor)
    assert isinstance(entries[target], Document)
    assert (await listing(source)).keys() == {target}


async def test_a_restart_does_not_forget_a_target(desk: Desk) -> None:
    drive = desk.drive()
    target = desk.mine("Target")
    link(desk, drive, target)
    await listing(desk.source(drives=[drive]))
    assert isinstance((await desk.source(drives=[drive]).fetch([target]))[0], Document)


async def test_a_target_whose_readers_are_hidden_is_not_read(desk: Desk) -> None:
    drive = desk.drive()
    target = desk.doc("Target", None, owner="ines@example.com")
    desk.corpus.share(target, Grant(type="user", who=ACCOUNT, role="reader"))
    link(desk, drive, target)
    source = desk.source(drives=[drive])
    assert await listing(source) == {}
    assert all(isinstance(entry, Gone) for entry in (await everything(source)).values())


async def test_shortcuts_to_nothing_and_to_folders_are_skipped(desk: Desk) -> None:
    drive = desk.drive()
    folder = desk.corpus.add("Folder", owner="ines@example.com", mime_type=FOLDER).id
    desk.corpus.share(folder, Grant(type="user", who=ACCOUNT, role="writer"))
    desk.doc("Below", folder)
    link(desk, drive, folder)
    link(desk, drive, "1FNotThere")
    assert await listing(desk.source(drives=[drive])) == {}
