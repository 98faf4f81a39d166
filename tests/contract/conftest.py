"""What most contract tests of the query service begin with. A module whose library holds more, or has another model,
defines its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from tests.contract.http_kit import World, open_world
from tests.library import Library, WordEmbedder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    """Empty at first, and shared by the tests of a module."""
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(stack: Stack) -> AsyncIterator[World]:
    """The service over a library that is empty at first, shared by the tests of a module."""
    async with open_world(stack) as world:
        yield world


@pytest.fixture
def tenant() -> str:
    """Each test has a tenant of its own in the shared library."""
    return f"t{uuid4().hex[:8]}"
