"""How many segments an index should have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.core.errors import Retryable
from pipeline.stages.segments import FEW_SEGMENTS, MANY, SEGMENT_BYTES, Segments, read_segments


def test_a_large_shard_has_more_segments() -> None:
    index = Segments(shards=2, count=2 * MANY * (FEW_SEGMENTS + 3), size=2 * 3 * SEGMENT_BYTES, writes=0, merging=False)
    assert index.few == FEW_SEGMENTS + 3
    assert not index.are_many
    assert replace(index, count=index.count + 1).are_many


def test_an_index_whose_shards_have_not_started_is_not_merged() -> None:
    assert not Segments(shards=0, count=0, size=0, writes=0, merging=False).are_many


@pytest.mark.parametrize("index", [{}, {"shards": {"0": [{"routing": {"primary": False}}]}}, {"primaries": {}}])
async def test_an_index_whose_primary_shards_do_not_answer_ends_no_worker(index: Any) -> None:
    """The first look at an index of which only replicas had answered was a KeyError, which ends a worker."""

    async def stats(**_: object) -> Any:
        return {"indices": {"chunks": index}} if index else {}

    es = SimpleNamespace(indices=SimpleNamespace(stats=stats))
    with pytest.raises(Retryable):
        await read_segments(cast(Any, es), "chunks")
