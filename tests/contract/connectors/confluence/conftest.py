"""Confluence in both flavours, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.connectors.confluence_kit import FLAVOURS, Wiki, wiki


@pytest.fixture(params=FLAVOURS)
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wiki]:
    async with wiki(request.param, tmp_path) as site:
        yield site
