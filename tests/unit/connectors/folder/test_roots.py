"""Several folders of one connector, of which one cannot be listed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from connectors.folder.source import Folder, FolderSettings
from connectors.source import Context, Document, Gone, Listed, Unlisted
from pipeline.core.errors import Retryable
from tests.support.connectors.slack_kit import Notes


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.md").write_text(name)
    (tmp_path / "state").mkdir()
    context = Context(name="docs", tenant="default", folder=tmp_path / "state", memory=Notes())
    made = Folder(FolderSettings(paths=[tmp_path / "away", tmp_path / "here"], acl_tags=("all",)), context)
    yield made
    await made.close()


async def contents(pages: Any) -> list[str]:
    """The texts of all documents."""
    texts: list[str] = []
    async with aclosing(pages) as open_pages:
        async for page in open_pages:
            texts.extend(entry.content for entry in page.entries if isinstance(entry, Document))
    return texts


async def test_a_folder_that_is_away_stops_no_other_folder_of_its_connector(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "away").rename(tmp_path / "unmounted")
    assert await contents(folder.full(None)) == ["here"]
    assert await contents(folder.changes({"since_ns": 0})) == ["here"]
    entries = [entry async for page in folder.slim() for entry in page]
    assert [entry.external_id for entry in entries if isinstance(entry, Listed)] == [str(tmp_path / "here/a.md")]
    [part] = [entry for entry in entries if isinstance(entry, Unlisted)]
    assert (part.id_prefix, part.is_document) == (str(tmp_path / "away"), False)


async def test_a_deletion_counts_while_another_folder_is_away(folder: Folder, tmp_path: Path) -> None:
    deleted = str(tmp_path / "here/a.md")
    assert [entry async for page in folder.slim() for entry in page]
    (tmp_path / "away").rename(tmp_path / "unmounted")
    (tmp_path / "here/a.md").unlink()
    (tmp_path / "here/b.md").write_text("other")
    assert await folder.read(deleted) == Gone(deleted)
    with pytest.raises(Retryable):
        await folder.read(str(tmp_path / "away/a.md"))


async def test_nothing_is_listed_while_all_folders_are_away_or_empty(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "away").rename(tmp_path / "unmounted")
    (tmp_path / "here/a.md").unlink()
    with pytest.raises(Retryable):
        assert [entry async for page in folder.slim() for entry in page]


async def test_nothing_is_deleted_while_the_links_of_a_folder_that_is_away_cannot_be_followed(
    folder: Folder, tmp_path: Path
) -> None:
    """A worker that was started while the mount was away took the link's path for the folder's, and its documents,
    whose ids have the path that the link leads to, for documents of no folder: they were deleted."""
    mount, context = tmp_path / "mount", folder.context
    (mount / "edition").mkdir(parents=True)
    (mount / "edition" / "c.md").write_text("linked")
    (mount / "current").symlink_to("edition")
    options = FolderSettings(paths=[mount / "current", tmp_path / "here"], acl_tags=("all",))
    before = Folder(options, context)
    assert sorted(await contents(before.full(None))) == ["here", "linked"]
    await before.close()
    mount.rename(tmp_path / "unmounted")
    started = Folder(options, context)
    try:
        entries = [entry async for page in started.slim() for entry in page]
        [part] = [entry for entry in entries if isinstance(entry, Unlisted)]
        assert (part.id_prefix, part.tag) == (None, None)  # any document may be of it
        with pytest.raises(Retryable):
            await started.read(str(mount / "edition" / "c.md"))
        (tmp_path / "unmounted").rename(mount)
        entries = [entry async for page in started.slim() for entry in page]
        assert str(mount / "edition" / "c.md") in {entry.external_id for entry in entries if isinstance(entry, Listed)}
    finally:
        await started.close()
