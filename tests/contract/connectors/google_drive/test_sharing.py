"""Access in a Google Drive: sharing as tags, and the principals that hold them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.google_drive.playground import ACCOUNT, ADMIN, STAFF
from connectors.source import Listed, Reaction, Unlisted
from pipeline.core.errors import Retryable
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import changed, groups, listing, read


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


async def test_members_of_a_shared_drive_hold_its_tag(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who=STAFF), Grant(type="user", who="Otto@Example.com"))
    desk.corpus.group(STAFF, "ines@example.com")
    id_ = desk.doc("Document", drive)
    source = desk.source(drives=[drive])
    assert set((await read(source, id_)).acl_tags) == {f"drive:{drive}"}
    tags = await groups(source)
    assert tags[f"drive:{drive}"].members == {ACCOUNT, "otto@example.com"}
    assert set(tags[f"drive:{drive}"].of) == {f"group:{STAFF}"}
    assert tags[f"group:{STAFF}"].members == {"ines@example.com"}


async def test_a_file_shared_outside_its_drive_also_has_the_tags_of_its_grants(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who=STAFF))
    id_ = desk.doc("Document", drive)
    desk.corpus.share(id_, Grant(type="user", who="guest@elsewhere.org"))
    assert set((await read(desk.source(drives=[drive]), id_)).acl_tags) == {
        f"drive:{drive}",
        "user:guest@elsewhere.org",
    }


async def test_a_folder_shared_outside_its_drive_gives_its_files_the_grants_tag(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who=STAFF))
    folder = desk.corpus.add("Folder", parent=drive, mime_type=FOLDER).id
    ids = [desk.doc(f"Document {n}", folder) for n in range(4)]
    desk.corpus.share(folder, Grant(type="user", who="guest@elsewhere.org"))
    source = desk.source(drives=[drive])
    for listed in (await listing(source)).values():
        assert set(listed.acl_tags) == {f"drive:{drive}", "user:guest@elsewhere.org"}
    requests = [path for _, path in desk.fake.requests if path.endswith("/permissions")]
    assert len(requests) == 2  # one of the four, and the drive: all four must have the same
    assert set(await listing(source)) == set(ids)


async def test_the_access_of_a_folder_is_read_once_for_a_listing_and_as_old_as_it(desk: Desk) -> None:
    """Its files are on many pages. What a poll publishes meanwhile has a later time, and wins."""
    drive = desk.drive(Grant(type="group", who=STAFF))
    folder = desk.corpus.add("Folder", parent=drive, mime_type=FOLDER).id
    files = [desk.doc(f"Document {n}", folder) for n in range(3)]
    guest = Grant(type="user", who="guest@elsewhere.org")
    desk.corpus.share(folder, guest)
    desk.corpus.shows_expired_grants = True
    began = changed = datetime.now(UTC)
    listed = list[Listed | Unlisted]()
    async with aclosing(desk.source(drives=[drive], sweep_page_size=1).slim()) as pages:
        async for page in pages:
            listed += page
            desk.corpus.share(folder, replace(guest, expires=desk.corpus.now() - timedelta(hours=1)))
            if len(listed) == 1:
                changed = datetime.now(UTC)
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == files
    for entry in listed:
        assert isinstance(entry, Listed)
        assert entry.read_at is not None
        assert began <= entry.read_at < changed
        assert "user:guest@elsewhere.org" in entry.acl_tags
    assert len([path for _, path in desk.fake.requests if path.endswith("/permissions")]) == 2  # a file, and the drive
    [later, *_] = (await listing(desk.source(drives=[drive]))).values()
    assert "user:guest@elsewhere.org" not in later.acl_tags


async def test_files_in_a_limited_access_folder_lack_the_drives_tag(desk: Desk) -> None:
    """The service account is organizer, and so sees what members no longer do."""
    drive = desk.drive(Grant(type="group", who=STAFF), role="organizer")
    folder = desk.corpus.add("Board", parent=drive, mime_type=FOLDER).id
    below = desk.corpus.add("Below", parent=folder, mime_type=FOLDER).id
    id_ = desk.doc("Minutes", below)
    source = desk.source(drives=[drive])
    assert set((await listing(source))[id_].acl_tags) == {f"drive:{drive}"}
    desk.corpus.limit(folder)
    assert set((await listing(source))[id_].acl_tags) == {f"user:{ACCOUNT}"}
    desk.corpus.share(folder, Grant(type="user", who="ines@example.com"))
    assert set((await read(source, id_)).acl_tags) == {f"user:{ACCOUNT}", "user:ines@example.com"}
    desk.corpus.limit(folder, limited=False)
    assert set((await read(source, id_)).acl_tags) == {f"drive:{drive}", "user:ines@example.com"}


async def test_limited_files_of_a_drive_with_organizers_only_lack_the_drives_tag(desk: Desk) -> None:
    drive = desk.drive(role="organizer")
    folder = desk.corpus.add("Board", parent=drive, mime_type=FOLDER).id
    id_ = desk.doc("Minutes", folder)
    desk.corpus.limit(folder)
    source = desk.source(drives=[drive])
    assert set((await read(source, id_)).acl_tags) == {f"user:{ACCOUNT}"}


async def test_group_domain_and_anyone_grants_become_their_tags(desk: Desk) -> None:
    discoverable = desk.mine("Found by the domain", Grant(type="domain", who="example.com", discoverable=True))
    linked = desk.mine("Link within the domain", Grant(type="domain", who="example.com"))
    public = desk.mine("Public", Grant(type="anyone", discoverable=True))
    link = desk.mine("Link", Grant(type="anyone"))
    group = desk.mine("Group", Grant(type="group", who=STAFF))
    left = desk.mine("Left the company", Grant(type="user", who="gone@example.com", deleted=True))
    everybody = {"user:ines@example.com", f"user:{ACCOUNT}"}

    async def tags(**options: object) -> dict[str, set[str]]:
        listed = await listing(desk.source(my_drive=True, **options))
        return {id_: set(entry.acl_tags) - everybody for id_, entry in listed.items()}

    strict = {
        discoverable: {"domain:example.com"},
        linked: set(),
        public: set(),
        link: set(),
        group: {f"group:{STAFF}"},
        left: set(),
    }
    assert await tags() == strict
    assert await tags(domain_links=True) == {**strict, linked: {"domain:example.com"}}
    open_to = {"domain:example.com"}
    assert await tags(anyone_tag="domain:example.com") == {**strict, public: open_to, link: open_to}


async def test_files_with_hidden_permissions_have_no_readers_and_check_reports_it(desk: Desk) -> None:
    id_ = desk.doc("Read only", None, owner="ines@example.com")
    desk.corpus.share(id_, Grant(type="user", who=ACCOUNT, role="reader"))
    source = desk.source(my_drive=True, directory=False)
    assert set((await read(source, id_)).acl_tags) == set()
    assert [problem.code for problem in await source.check()] == ["permissions_hidden"]


async def test_group_members_include_nested_groups_and_the_domain_but_no_suspended_users(desk: Desk) -> None:
    desk.corpus.user("sus@example.com", suspended=True)
    desk.corpus.group("inner@example.com", "otto@example.com")
    desk.corpus.group(STAFF, "ines@example.com", "inner@example.com", "sus@example.com", "Guest@Elsewhere.org")
    desk.corpus.group("all@example.com", "*")
    desk.mine("One", Grant(type="group", who=STAFF), Grant(type="group", who="all@example.com"))
    tags = await groups(desk.source(my_drive=True, domains=["example.com"]))
    assert tags[f"group:{STAFF}"].members == {"ines@example.com", "otto@example.com", "guest@elsewhere.org"}
    assert list(tags["group:all@example.com"].of) == ["domain:example.com"]
    assert tags["domain:example.com"].members == {ADMIN, "ines@example.com", "otto@example.com"}


async def test_a_group_that_the_directory_does_not_show_is_left_out(desk: Desk) -> None:
    desk.mine("One", Grant(type="group", who="partners@elsewhere.org"), Grant(type="group", who=STAFF))
    desk.corpus.group(STAFF, "ines@example.com")
    source = desk.source(my_drive=True)
    assert set(await groups(source)) == {f"group:{STAFF}"}
    desk.fake.directory.admins.clear()
    assert await groups(source) == {}
    desk.fake.tokens.delegated.clear()
    assert await groups(desk.source(my_drive=True)) == {}
    assert await groups(desk.source(my_drive=True, directory=False)) == {}


async def test_a_failing_directory_is_retryable_and_changes_no_members(desk: Desk) -> None:
    desk.mine("One", Grant(type="group", who=STAFF))
    desk.corpus.group(STAFF, "ines@example.com")
    source = desk.source(my_drive=True, patient=False)
    await listing(source)
    desk.fake.faults.failing = 1
    with pytest.raises(Retryable):
        await groups(source)


async def test_tags_are_remembered_until_two_listings_lack_them(desk: Desk) -> None:
    id_ = desk.mine("One", Grant(type="group", who=STAFF))
    desk.corpus.group(STAFF, "ines@example.com")
    await listing(desk.source(my_drive=True))
    later = desk.source(my_drive=True)
    request_count = len(desk.fake.requests)
    assert set(await groups(later)) == {f"group:{STAFF}"}
    assert not any(
        path == "/drive/v3/files" for _, path in desk.fake.requests[request_count:]
    )  # nothing was listed again
    desk.corpus.unshare(id_, Grant(type="group", who=STAFF))
    await read(later, id_)
    assert set(await groups(later)) == {f"group:{STAFF}"}
    await listing(later)
    assert set(await groups(later)) == {f"group:{STAFF}"}, "one listing may have been cut"
    await listing(later)
    assert await groups(later) == {}


async def test_groups_read_before_any_listing_are_complete(desk: Desk) -> None:
    drive = desk.drive(Grant(type="group", who=STAFF))
    desk.doc("Document", drive)
    desk.corpus.group(STAFF, "ines@example.com")
    source = desk.source(drives=[drive])
    assert set(await groups(source)) == {f"group:{STAFF}", f"drive:{drive}"}
    assert set(await groups(source, [f"group:{STAFF}"])) == {f"group:{STAFF}"}


# Grants that end


async def test_an_expired_grant_gives_no_access_although_google_still_shows_it(desk: Desk) -> None:
    soon = desk.corpus.now() + timedelta(minutes=10)
    id_ = desk.mine("One", Grant(type="user", who="otto@example.com", expires=soon))
    source = desk.source(my_drive=True)
    cursor = await source.start()
    assert "user:otto@example.com" in (await read(source, id_)).acl_tags
    desk.corpus.shows_expired_grants = True
    desk.corpus.clock_offset = timedelta(minutes=11)
    changes, _ = await changed(source, cursor)
    assert set(changes) == {id_}, "no event tells that a grant ends: the document is looked at by itself"
    assert "user:otto@example.com" not in changes[id_].acl_tags
    assert "user:otto@example.com" not in (await listing(source))[id_].acl_tags
    assert (await changed(source, cursor))[0] == {}


async def test_a_document_is_read_again_when_one_of_its_grants_expires(desk: Desk) -> None:
    soon = desk.corpus.now() + timedelta(minutes=10)
    drive = desk.drive(Grant(type="group", who=STAFF))
    id_ = desk.doc("One", drive)
    desk.corpus.share(id_, Grant(type="user", who="otto@example.com", expires=soon))
    source = desk.source(drives=[drive])
    assert set((await read(source, id_)).acl_tags) == {f"drive:{drive}", "user:otto@example.com"}
    desk.corpus.clock_offset = timedelta(minutes=11)
    reactions: asyncio.Queue[Reaction] = asyncio.Queue()
    listening = asyncio.create_task(source.listen(reactions.put))
    try:
        while not (reaction := await asyncio.wait_for(reactions.get(), 30)).ids:
            pass
    finally:
        listening.cancel()
    assert list(reaction.ids) == [id_]
    assert set((await read(source, id_)).acl_tags) == {f"drive:{drive}"}
