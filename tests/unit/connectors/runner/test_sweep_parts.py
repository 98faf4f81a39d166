"""A sweep of a source that cannot list one of its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.set_aside import SetAside
from connectors.source import Listed, Unlisted
from tests.support.connectors.runner_world import World, WorldSource


class WithParts(WorldSource):
    """A world whose documents are in the part that their tag names."""

    def __init__(self, world: World) -> None:
        super().__init__(world, cast(Any, None))
        self.unlisted: list[Unlisted] = []
        self.hidden: str | None = None
        """How the ids of documents begin that are not listed."""

    async def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:  # type: ignore[override]
        yield list(self.unlisted)
        tags = {part.tag for part in self.unlisted if not part.is_document}
        async for page in super().slim():
            shown = [entry for entry in page if not (self.hidden and entry.external_id.startswith(self.hidden))]
            yield [entry for entry in shown if not tags & set(entry.acl_tags)]


@pytest.fixture
def world() -> World:
    world = World()
    for n in range(3):
        world.write(f"eng{n}", acl_tags=["space:ENG"])
        world.write(f"ops{n}", acl_tags=["space:OPS"])
    return world


async def test_a_part_that_cannot_be_listed_loses_nothing_and_the_others_are_swept(world: World) -> None:
    source = WithParts(world)
    runner = MemoryRunner(source, SetAside())
    assert await runner.full()
    world.remove("eng0")
    world.remove("ops0")
    source.unlisted = [Unlisted(part="space OPS", reason="it answered 500", tag="space:OPS")]
    assert await runner.sweep()
    assert runner.deleted == ["eng0"]
    assert "space OPS is set aside" in runner.status
    source.unlisted = []
    assert await runner.sweep()
    assert sorted(runner.deleted) == ["eng0", "ops0"]
    assert runner.status == ""


async def test_a_part_of_unknown_extent_and_a_document_of_unknown_access_lose_nothing(world: World) -> None:
    source = WithParts(world)
    world.write("unknown", acl_tags=[])
    runner = MemoryRunner(source, SetAside())
    assert await runner.full()
    world.remove("unknown")
    source.unlisted = [Unlisted(part="space OPS", reason="it answered 500", tag="space:OPS")]
    assert await runner.sweep()
    assert runner.deleted == []
    world.remove("eng0")
    source.unlisted = [Unlisted(part="a drive", reason="it answered 500")]
    assert await runner.sweep()
    assert runner.deleted == []


async def test_a_single_document_that_cannot_be_listed_is_fetched(world: World) -> None:
    source = WithParts(world)
    runner = MemoryRunner(source, SetAside())
    assert await runner.full()
    world.remove("eng0")
    source.unlisted = [Unlisted(part="page 7", reason="it answered 500", is_document=True)]
    assert await runner.sweep()
    assert runner.deleted == ["eng0"]


async def test_a_part_that_ids_name_loses_nothing_and_its_readers_only_if_it_is_closed(world: World) -> None:
    source = WithParts(world)
    runner = MemoryRunner(source, SetAside())
    assert await runner.full()
    world.remove("eng0")
    world.remove("ops0")
    part = Unlisted(part="a drive", reason="it answered 423", id_prefix="ops")
    source.unlisted = [part]
    assert await runner.sweep()
    assert runner.deleted == ["eng0"]
    assert runner.published["ops0"].acl_tags == ["space:OPS"]
    source.unlisted = [replace(part, is_closed=True)]
    source.hidden = "ops"
    assert await runner.sweep()
    assert {id_ for id_, document in runner.published.items() if not document.acl_tags} == {"ops0", "ops1", "ops2"}
    source.unlisted, source.hidden = [], None
    assert await runner.sweep()
    assert runner.deleted == ["eng0", "ops0"]
    assert {tuple(document.acl_tags) for document in runner.published.values()} == {("space:ENG",), ("space:OPS",)}
