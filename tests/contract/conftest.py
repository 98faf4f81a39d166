"""Fixtures of most contract tests of the query service, of the connectors' runner and of folders. A module whose
library holds more, or has another model, defines its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from tests.support.connectors.folder_kit import Desk, desk_in, own_database
from tests.support.connectors.runner_kit import Bench, Ground, bench_on, ground_on
from tests.support.query.http_kit import World, open_world
from tests.support.query.library import Library, WordEmbedder


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


@pytest.fixture(scope="module")
def ground(stack: Stack) -> Iterator[Ground]:
    with ground_on(stack) as ground:
        yield ground


@pytest.fixture
async def bench(ground: Ground, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_on(ground, tmp_path) as bench:
        yield bench


@pytest.fixture(scope="module")
def dsn(stack: Stack) -> Iterator[str]:
    with own_database(stack) as dsn:
        yield dsn


@pytest.fixture
async def desk(dsn: str, tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path, dsn) as desk:
        yield desk
