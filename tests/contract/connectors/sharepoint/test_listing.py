"""Listings of libraries, and the access that they show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from connectors.fakes.graph_tenant import Grant
from connectors.source import Listed, Unlisted
from tests.support.connectors.sharepoint_kit import Office, office_in


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with office_in(tmp_path) as office:
        yield office


async def test_the_access_of_a_folder_is_read_once_for_a_listing_and_as_old_as_it(office: Office) -> None:
    """Its files are on many pages. What a poll publishes meanwhile has a later time, and wins."""
    folder = office.folder_in(grants=[Grant(group=office.staff), Grant(user=office.otto)])
    files = [office.file(f"{n}.txt", parent=folder) for n in range(3)]
    began = changed = datetime.now(UTC)
    listed = list[Listed | Unlisted]()
    async with aclosing(office.source(permissions="hierarchy", sweep_page_size=1).slim()) as pages:
        async for page in pages:
            listed += page
            if len(listed) == 1 and began == changed:
                office.tenant.items[folder].grants = [Grant(group=office.staff)]
                changed = datetime.now(UTC)
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == files
    for entry in listed:
        assert isinstance(entry, Listed)
        assert entry.read_at is not None
        assert began <= entry.read_at < changed
        assert f"account:{office.otto}" in entry.acl_tags
    assert len([path for _, path in office.fake.requests if path.endswith("/permissions")]) == 1
