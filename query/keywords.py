"""BM25 candidates from Elasticsearch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identity import EVERYONE
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated
from query.access import Caller, Readable
from query.model import Candidate
from query.scoring import clauses

TERMS_A_CLAUSE = 65_536
"""index.max_terms_count."""


async def bm25(
    es: AsyncElasticsearch,
    generation: Generation,
    caller: Caller,
    readable: Readable,
    query: str,
    *,
    limit: int,
    timeout_seconds: float,
) -> list[Candidate]:
    """The best passages by keyword among those whose entry says that this caller may read them, best first.

    Raises Retryable or Misconfigured.
    """
    with translated(f"search {generation.keyword_index}"):
        answer = await es.options(request_timeout=timeout_seconds).search(
            index=generation.keyword_index,
            query=build(caller.tenant, readable, query),
            size=limit,
            source_includes=["document_id", "text"],
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    return [
        Candidate(UUID(hit["_id"]), UUID(hit["_source"]["document_id"]), hit["_source"]["text"], hit["_score"])
        for hit in answer["hits"]["hits"]
    ]


def build(tenant: str, readable: Readable, query: str) -> dict[str, Any]:
    """Access first, then what ``query.scoring`` says of the words."""
    return {"bool": {"filter": _may_read(tenant, readable), **clauses(query)}}


def _may_read(tenant: str, readable: Readable) -> Sequence[Mapping[str, Any]]:
    acl = readable.acl_tags
    if not acl:
        return [{"match_none": {}}]  # a bool of no clauses would match everything, whatever its minimum_should_match
    clauses = [{"terms": {"acl_tags": acl[n : n + TERMS_A_CLAUSE]}} for n in range(0, len(acl), TERMS_A_CLAUSE)]
    return [
        {"term": {"tenant": tenant}},
        {"bool": {"should": clauses, "minimum_should_match": 1}},
        {
            "terms_set": {
                "required_tags": {
                    "terms": [EVERYONE, *readable.required_tags],
                    "minimum_should_match_field": "required_count",
                }
            }
        },
    ]
