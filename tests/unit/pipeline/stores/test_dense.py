"""Tests how deep each shard of a keyword index searches its vectors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from elasticsearch import AsyncElasticsearch

from pipeline.core.model import Generation
from pipeline.stores.dense import CANDIDATES, MAX_CANDIDATES, MAX_OVERSAMPLED, candidates_a_shard, nearest


class Divided:
    """An index of several shards, without entries."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.candidates: list[int] = []

    async def search(self, *, knn: dict[str, Any], **_: object) -> dict[str, Any]:
        self.candidates.append(knn["num_candidates"])
        return {"_shards": {"total": self.shards}, "hits": {"hits": []}}


async def test_all_shards_together_collect_the_candidates_after_the_first_search() -> None:
    index, generation = Divided(3), cast(Generation, SimpleNamespace(keyword_index="of-this-test"))

    async def search() -> None:
        await nearest(cast(AsyncElasticsearch, index), generation, np.ones(4, dtype=np.float32), [], limit=74)

    await search()
    await search()
    index.shards = 6  # it was made anew
    await search()
    await search()
    assert index.candidates == [MAX_OVERSAMPLED, CANDIDATES // 3, CANDIDATES // 3, CANDIDATES // 6]


@pytest.mark.parametrize(
    ("shards", "limit", "candidates"),
    [
        (7, 10, 858),
        (1_000, 74, 148),
        (1, 1_000, MAX_OVERSAMPLED),
        (1, 2_000, 4_000),
        (6, 1_000, 2_000),
        (1, 9_000, MAX_CANDIDATES),
    ],
)
def test_a_shard_collects_its_share_but_never_fewer_than_twice_the_results(
    shards: int, limit: int, candidates: int
) -> None:
    assert candidates_a_shard(shards, limit) == candidates
