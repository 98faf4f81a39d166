"""Jira in both flavours, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.connectors.jira_kit import Office, office_in


@pytest.fixture(params=["cloud", "data-center"])
async def office(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Office]:
    async with office_in(tmp_path, request.param) as office:
        yield office


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Office]:
    async with office_in(tmp_path) as office:
        yield office


@pytest.fixture
async def data_center(tmp_path: Path) -> AsyncIterator[Office]:
    async with office_in(tmp_path, "data-center") as office:
        yield office
