"""The My Drives of all active users, read on behalf of each (domain-wide delegation)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.google_drive import GoogleDrive
from connectors.google_drive.client import DRIVE_SCOPE
from connectors.google_drive.playground import ACCOUNT
from connectors.source import Document, Gone, Listed, Unlisted
from pipeline.core.errors import Misconfigured
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import changed, everything, listing, read

INES, OTTO = "ines@example.com", "otto@example.com"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        desk.fake.tokens.delegated[ACCOUNT].add(DRIVE_SCOPE)
        yield desk


def company(desk: Desk, **options: Any) -> GoogleDrive:
    return desk.source(all_my_drives=True, **options)


async def test_a_file_that_several_users_see_is_one_document_of_its_owner(desk: Desk) -> None:
    shared = desk.doc("Shared", None, "Plan.", owner=INES)
    desk.corpus.share(shared, Grant(type="user", who=OTTO))
    own = desk.doc("Own", None, owner=OTTO)
    source = company(desk)
    entries = [entry async for page in source.full(None) for entry in page.entries]
    assert sorted(entry.external_id for entry in entries) == sorted([shared, own])
    listed = [entry async for page in source.slim() for entry in page if isinstance(entry, Listed)]
    assert {entry.external_id: set(entry.acl_tags) for entry in listed} == {
        shared: {f"user:{INES}", f"user:{OTTO}"},
        own: {f"user:{OTTO}"},
    }
    assert (await read(source, shared)).content == "Plan."
    assert await source.check() == []


async def test_files_of_suspended_users_and_other_companies_are_left_out(desk: Desk) -> None:
    gone = desk.corpus.user("gone@example.com", suspended=True)
    files = [desk.doc("Old", None, owner=gone), desk.doc("Foreign", None, owner="eva@elsewhere.org")]
    for file in files:
        desk.corpus.share(file, Grant(type="user", who=INES))
    source = company(desk, domains=["example.com"])
    assert await everything(source) == await listing(source) == {}


async def test_a_change_is_reported_once_although_several_logs_name_it(desk: Desk) -> None:
    id_ = desk.doc("Shared", None, "Before.", owner=INES)
    source = company(desk)
    cursor = await source.start()
    desk.corpus.share(id_, Grant(type="user", who=OTTO))
    desk.corpus.edit(id_, exports={"text/markdown": b"After."})
    foreign = desk.doc("Foreign", None, owner="eva@elsewhere.org")
    desk.corpus.share(foreign, Grant(type="user", who=INES))
    pages = [page async for page in source.changes(cursor)]
    [entry] = [entry for page in pages for entry in page.entries]
    assert isinstance(entry, Document)
    assert (entry.external_id, entry.content) == (id_, "After.")


async def test_a_deleted_file_is_gone_also_after_a_restart(desk: Desk) -> None:
    kept, deleted, later = (desk.doc(name, None, owner=INES) for name in ("Kept", "Deleted", "Later"))
    source = company(desk)
    await listing(source)
    cursor = await source.start()
    desk.corpus.delete(deleted)
    entries, _ = await changed(source, cursor)
    assert entries == {deleted: Gone(deleted)}
    desk.corpus.delete(later)
    before = len(desk.fake.requests)
    assert await company(desk).fetch([later]) == [Gone(later)]
    files = [path for _, path in desk.fake.requests[before:] if path.endswith(later)]
    assert len(files) == 2  # its owner, and the account itself: no other user is tried
    assert (await listing(source)).keys() == {kept}


async def test_a_file_whose_owner_is_not_known_is_requested_for_each_user(desk: Desk) -> None:
    id_ = desk.doc("Document", None, owner=OTTO)
    assert (await read(company(desk), id_)).external_id == id_


async def test_a_file_keeps_its_id_when_its_owner_changes(desk: Desk) -> None:
    id_ = desk.doc("Document", None, owner=INES)
    source = company(desk)
    await listing(source)
    cursor = await source.start()
    own = Grant(type="user", who=INES, role="owner")
    desk.corpus.items[id_].owner = OTTO
    desk.corpus.unshare(id_, own)
    desk.corpus.share(id_, Grant(type="user", who=OTTO, role="owner"))
    entries, _ = await changed(source, cursor)
    assert isinstance(entries[id_], Document)
    assert (await listing(source)).keys() == {id_}


async def test_users_come_and_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.google_drive.reading.USERS_SECONDS", 0.0)
    id_ = desk.doc("Document", None, owner=INES)
    source = company(desk)
    assert (await listing(source)).keys() == {id_}
    cursor = await source.start()
    desk.corpus.user(INES, suspended=True)
    new = desk.doc("New", None, owner=desk.corpus.user("nina@example.com"))
    _, cursor = await changed(source, cursor)
    assert cursor["tokens"].keys() >= {"user:nina@example.com"}
    assert f"user:{INES}" not in cursor["tokens"]
    assert (await listing(source)).keys() == {new}
    assert await source.fetch([id_]) == [Gone(id_)]


async def test_a_user_who_cannot_be_read_stops_nobody_else(desk: Desk) -> None:
    id_ = desk.doc("Document", None, owner=INES)
    desk.doc("Hidden", None, owner=OTTO)
    desk.fake.faults.refused_users.add(OTTO)
    source = company(desk)
    cursor = await source.start()
    assert (await everything(source)).keys() == {id_}
    listed = [entry async for page in source.slim() for entry in page]
    [unlisted] = [entry for entry in listed if isinstance(entry, Unlisted)]
    assert (unlisted.part, unlisted.tag) == (f"My Drive of {OTTO}", f"user:{OTTO}")
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == [id_]
    desk.corpus.edit(id_, exports={"text/markdown": b"After."})
    assert (await changed(source, cursor))[0].keys() == {id_}


async def test_users_without_drive_have_no_documents_and_are_not_set_aside(desk: Desk) -> None:
    id_ = desk.doc("Document", None, owner=INES)
    desk.fake.faults.without_drive.add(OTTO)
    source = company(desk)
    assert [entry.external_id async for page in source.slim() for entry in page] == [id_]


async def test_a_delegation_that_is_missing_stops_the_instance_and_is_named(desk: Desk) -> None:
    desk.doc("Document", None, owner=INES)
    desk.fake.tokens.delegated[ACCOUNT].discard(DRIVE_SCOPE)
    source = company(desk)
    assert [problem.code for problem in await source.check()] == ["users"]
    with pytest.raises(Misconfigured, match="Domain-wide delegation"):
        async for _ in source.slim():
            pass


async def test_a_shared_folder_causes_a_sweep_for_its_owner_alone(desk: Desk) -> None:
    folder = desk.corpus.add("Folder", owner=INES, mime_type=FOLDER).id
    id_ = desk.doc("Document", folder)
    source = company(desk)
    cursor = await source.start()
    desk.corpus.share(folder, Grant(type="user", who=OTTO))
    assert (await changed(source, cursor))[0] == {}
    assert source._listener._sweep
    assert set((await listing(source))[id_].acl_tags) == {f"user:{INES}", f"user:{OTTO}"}
