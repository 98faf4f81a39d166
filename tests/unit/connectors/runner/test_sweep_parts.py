"""A sweep of a source that cannot list one of its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.set_aside import SetAside
from connectors.source import Entry, Listed, Unlisted, Unreadable
from pipeline.kafka.producer import Delivery
from tests.support.connectors.runner_world import World, WorldSource
from topics.messages import AccessChanged, AnyMessage, DocumentUpserted
from topics.registry import Topic


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


class Refusing(WithParts):
    """Lists documents with their readers, and refuses to show some of them when they are requested."""

    refused: frozenset[str] = frozenset()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        requested = [id_ for id_ in external_ids if id_ not in self.refused]
        shown = await super().fetch(requested) if requested else []
        refused = [
            Unreadable(external_id=id_, code="denied", message="403", acl_tags=())
            for id_ in external_ids
            if id_ in self.refused
        ]
        return [*shown, *refused]


class Recording(MemoryRunner):
    """Records the tags that each message gives a document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given: list[list[str]] = []

    async def send(self, topic: Topic, message: AnyMessage) -> Delivery:
        if isinstance(message, AccessChanged | DocumentUpserted):
            self.given.append(message.acl_tags)
        return await super().send(topic, message)


async def test_sweeps_do_not_admit_anybody_to_a_listed_document_that_is_refused(world: World) -> None:
    """Before, each sweep published the readers of the listing, and withdrew them when it requested the document."""
    source = Refusing(world)
    runner = Recording(source, SetAside())
    assert await runner.full()
    runner.given.clear()
    source.refused = frozenset({"eng0"})
    world.write("eng0", acl_tags=["space:ENG"])
    for _ in range(3):
        assert await runner.sweep()
    assert runner.given == [[]]
    source.refused = frozenset()
    assert await runner.sweep()
    assert runner.given == [[], ["space:ENG"]]
    assert runner.published["eng0"].acl_tags == ["space:ENG"]
