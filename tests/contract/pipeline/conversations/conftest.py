"""Fixtures of the tests of conversations."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.pipeline.conversations_kit import Desk, open_desk
from tests.support.space import Space


@pytest.fixture
async def desk(space: Space) -> AsyncIterator[Desk]:
    async with open_desk(space) as desk:
        yield desk
