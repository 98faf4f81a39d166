"""Merging the segments of a keyword index, on a real Elasticsearch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.model import Generation
from pipeline.stages.segments import FEW_SEGMENTS, SegmentMerger, read_segments
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.keywords import Keywords, Write
from tests.support.query.library import Library, WordEmbedder
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SEGMENTS = 2 * FEW_SEGMENTS + 3


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


class Site:
    """One index whose segments are merged by nothing else."""

    def __init__(self, library: Library, generation: Generation) -> None:
        self.es, self.generation, self.index = library.es, generation, generation.keyword_index
        self.keywords = Keywords(library.es)

    async def generations(self) -> Mapping[str, Generation]:
        return {self.generation.name: self.generation}

    async def write(self, segments: int) -> list[UUID]:
        """Write one entry a segment."""
        ids = [uuid4() for _ in range(segments)]
        for id_ in ids:
            await self.keywords.apply([Write(self.index, id_, 2, {"document_id": str(id_), "text": "probe"})])
            await self.es.indices.refresh(index=self.index)
        return ids

    async def segments(self) -> int:
        return (await read_segments(self.es, self.index)).count

    async def are_few(self) -> bool:
        return await self.segments() <= FEW_SEGMENTS

    def merger(self, **options: float) -> SegmentMerger:
        return SegmentMerger(self.es, self.generations, **options)


@pytest_asyncio.fixture(loop_scope="module")
async def site(library: Library) -> AsyncIterator[Site]:
    generation = replace(library.generation, keyword_index=f"chunks-segments-{uuid4().hex[:12]}")
    await create_index(library.es, generation.keyword_index)
    await library.es.indices.put_settings(
        index=generation.keyword_index, settings={"index.merge.policy.segments_per_tier": 50}
    )
    yield Site(library, generation)
    await library.es.indices.delete(index=generation.keyword_index)


async def test_many_segments_are_merged_and_no_entry_is_lost(site: Site) -> None:
    ids = await site.write(SEGMENTS)
    merger = site.merger()
    assert await merger.look() == [], "the first look does not know how much is written"
    assert await merger.look() == [site.index]
    assert await site.are_few(), "a merge is waited for: otherwise Elasticsearch keeps a document about it"
    assert (await site.es.count(index=site.index))["count"] == SEGMENTS
    outcomes = await site.keywords.apply([Write(site.index, ids[0], 1, None)])
    assert [outcome.result for outcome in outcomes] == ["stale"], "versions are kept"
    assert await merger.look() == [], "there are few"


async def test_an_index_is_left_alone_while_much_is_written_to_it(site: Site) -> None:
    merger = site.merger(max_writes_a_second=0)
    await merger.look()
    await site.write(SEGMENTS)
    assert await merger.look() == []
    assert await merger.look() == [site.index]


async def test_an_index_is_not_merged_twice_within_the_pause(site: Site) -> None:
    hasty, patient = site.merger(pause_seconds=0), site.merger()
    await site.write(SEGMENTS)
    for merger in (patient, hasty):
        await merger.look()
    assert await patient.look() == [site.index]
    await until(site.are_few)
    await site.write(SEGMENTS)
    assert await patient.look() == []
    assert [site.index] in [await hasty.look(), await hasty.look()], "the first may find that much has been written"


async def test_an_index_with_vectors_is_left_alone_and_a_missing_one_keeps_no_other_from_it(site: Site) -> None:
    await site.write(SEGMENTS)
    own = site.generation
    others = {
        "vectors": replace(own, name="vectors", vectors="elasticsearch"),
        "missing": replace(own, name="missing", keyword_index="chunks-missing"),
    }
    merger = SegmentMerger(site.es, lambda: generations_of(others))
    assert [await merger.look(), await merger.look()] == [[], []]
    merger = SegmentMerger(site.es, lambda: generations_of({**others, own.name: own}))
    assert [await merger.look(), await merger.look()] == [[], [site.index]]


async def generations_of(generations: Mapping[str, Generation]) -> Mapping[str, Generation]:
    return generations
