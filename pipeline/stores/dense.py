"""Vectors in a generation's keyword index: the mapping of the field, its values, and the search for the nearest
(docs/adr/0095-vectors-in-elasticsearch.md).

The chunk table keeps every vector, so that an index can be filled again without embedding anything. What the index adds
is the graph, which Elasticsearch holds in quantised form and divides into shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import OVERSAMPLE, VECTOR, translated

if TYPE_CHECKING:  # importing it takes 0.1 s, which keywords workers need not spend
    import numpy as np
    from numpy.typing import NDArray

DECIMALS = 6
"""Digits after the point with which a vector is sent. The rounding of a halfvec near 0.03 is ten times as large."""
CANDIDATES = 6_000
"""The number of candidates that all shards together collect in their graphs, by quantised vectors. How many of the
nearest are found follows from this sum, whatever the number of shards (docs/performance.md)."""
MAX_CANDIDATES = 10_000
"""The most that Elasticsearch allows for each shard."""
MAX_OVERSAMPLED = floor(MAX_CANDIDATES / OVERSAMPLE)
"""The largest number of results for which a shard can compare OVERSAMPLE times as many candidates by their whole
vectors."""
_shards: dict[str, int] = {}
"""Index → the number of its shards, according to its last response."""


@dataclass(frozen=True, slots=True)
class Near:
    """An entry whose vector is near. ``cosine`` is that of the vectors before quantisation."""

    chunk: UUID
    document: UUID
    cosine: float


def encoded(vector: NDArray[np.float32]) -> list[float]:
    """The value of an entry's vector field."""
    rounded: list[float] = vector.astype("float64").round(DECIMALS).tolist()
    return rounded


async def nearest(
    es: AsyncElasticsearch,
    generation: Generation,
    vector: NDArray[np.float32],
    conditions: Sequence[Mapping[str, Any]],
    *,
    excluded: Sequence[Mapping[str, Any]] = (),
    limit: int,
) -> list[Near]:
    """The ``limit`` entries that are nearest to a vector among those that pass all conditions and none of ``excluded``,
    nearest first. Fewer: there are no more. The graph is filtered while it is walked; where few entries pass,
    Elasticsearch compares all of them. The first search of an index treats it as one shard. Raises Retryable or
    Misconfigured."""
    with translated(f"search {generation.keyword_index}"):
        answer = await es.search(
            index=generation.keyword_index,
            knn={
                "field": VECTOR,
                "query_vector": encoded(vector),
                "k": limit,
                "num_candidates": candidates_a_shard(_shards.get(generation.keyword_index, 1), limit),
                "filter": {"bool": {"filter": list(conditions), "must_not": list(excluded)}},
            },
            size=limit,
            source_includes=["document_id"],
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    _shards[generation.keyword_index] = answer["_shards"]["total"]
    return [
        Near(UUID(hit["_id"]), UUID(hit["_source"]["document_id"]), 2 * hit["_score"] - 1)
        for hit in answer["hits"]["hits"]
    ]


def candidates_a_shard(shards: int, limit: int) -> int:
    """How many candidates each shard collects, so that all of them collect CANDIDATES where that finds more."""
    return min(MAX_CANDIDATES, max(min(ceil(CANDIDATES / shards), MAX_OVERSAMPLED), 2 * limit))
