"""How many segments an index should have."""

from __future__ import annotations

from dataclasses import replace

from pipeline.stages.segments import FEW_SEGMENTS, MANY, SEGMENT_BYTES, Segments


def test_a_large_shard_has_more_segments() -> None:
    index = Segments(shards=2, count=2 * MANY * (FEW_SEGMENTS + 3), size=2 * 3 * SEGMENT_BYTES, writes=0, merging=False)
    assert index.few == FEW_SEGMENTS + 3
    assert not index.are_many
    assert replace(index, count=index.count + 1).are_many


def test_an_index_whose_shards_have_not_started_is_not_merged() -> None:
    assert not Segments(shards=0, count=0, size=0, writes=0, merging=False).are_many
