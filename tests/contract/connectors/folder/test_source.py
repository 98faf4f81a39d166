"""The folder as a source under the runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.folder import source
from connectors.folder.source import Folder, FolderSettings
from connectors.source import Context
from pipeline.core.errors import Misconfigured
from tests.support.connectors.slack_kit import Notes

PAGE_LISTED = 2
"""Files in a page of a listing."""


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Folder]:
    monkeypatch.setattr(source, "PAGE_LISTED", PAGE_LISTED)
    (tmp_path / "own").mkdir()
    root = tmp_path / "docs" / "plans"
    root.mkdir(parents=True)
    for n in range(2 * PAGE_LISTED):
        (root / f"{n}.md").write_text(f"plan {n}")
    settings = FolderSettings(paths=[root.parent], acl_tags=("everyone",))
    context = Context(name="docs", tenant="default", memory=Notes(), folder=tmp_path / "own")
    made = Folder(settings, context)
    yield made
    await made.close()


async def test_access_rules_changed_during_a_listing_apply_from_the_next_page(folder: Folder, tmp_path: Path) -> None:
    results = []
    async for page in folder.slim():
        results.append({entry.acl_tags for entry in page})
        (tmp_path / "docs" / ".penstock.toml").write_text('acl = ["board"]\n')
    assert results == [{("everyone",)}, {("board",)}]


async def test_access_rules_that_become_invalid_during_a_listing_end_it_with_an_error(
    folder: Folder, tmp_path: Path
) -> None:
    pages = folder.slim()
    await anext(pages)
    (tmp_path / "docs" / ".penstock.toml").write_text("acl = everyone\n")
    with pytest.raises(Misconfigured, match="is invalid"):
        [page async for page in pages]
