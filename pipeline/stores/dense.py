"""Vectors in a generation's keyword index: the mapping of the field, its values, and the search for the nearest
(docs/adr/0095-vectors-in-elasticsearch.md).

The chunk table keeps every vector, so that an index can be filled again without embedding anything. What the index adds
is the graph, which Elasticsearch holds in quantised form and divides into shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import VECTOR, translated

if TYPE_CHECKING:  # importing it takes 0.1 s, which keywords workers need not spend
    import numpy as np
    from numpy.typing import NDArray

DECIMALS = 6
"""Digits after the point with which a vector is sent. The rounding of a halfvec near 0.03 is ten times as large."""
CANDIDATES = 2_000
"""The least number of candidates that each shard collects in its graph, by quantised vectors. On 5,000 synthetic
passages of 384 dimensions, 300 candidates had .90 of the ten nearest, 1,000 had .99, and 2,000 had all of them."""
MAX_CANDIDATES = 10_000
"""The most that Elasticsearch allows."""


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
    Elasticsearch compares all of them. Raises Retryable or Misconfigured."""
    with translated(f"search {generation.keyword_index}"):
        answer = await es.search(
            index=generation.keyword_index,
            knn={
                "field": VECTOR,
                "query_vector": encoded(vector),
                "k": limit,
                "num_candidates": min(MAX_CANDIDATES, max(CANDIDATES, 2 * limit)),
                "filter": {"bool": {"filter": list(conditions), "must_not": list(excluded)}},
            },
            size=limit,
            source_includes=["document_id"],
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    return [
        Near(UUID(hit["_id"]), UUID(hit["_source"]["document_id"]), 2 * hit["_score"] - 1)
        for hit in answer["hits"]["hits"]
    ]
