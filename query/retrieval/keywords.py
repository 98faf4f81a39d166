"""BM25 candidates from Elasticsearch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identifiers import identifiers
from pipeline.core.identity import EVERYONE
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated
from query.access.callers import Caller, Readable
from query.access.filters import NONE, Filters
from query.access.filters import clauses as narrowing
from query.model import Candidate

TERMS_A_CLAUSE = 65_536
"""index.max_terms_count."""
MOST_REQUIRED = 500
"""Required tags that are asked for exactly. Each counts as a clause, of which a small server takes 1,024
(indices.query.bool.max_clause_count) for a whole query."""
IDENTIFIER_BOOST = 100.0
"""Above every sum of BM25: who names an identifier wants the passages that hold it."""
PART_BOOST = 0.1
"""Enough to be found by "config" where only config.yaml stands, and not to move the order of what the words find."""
MOST_IDENTIFIERS = 20
_WORD = re.compile(r"[^\W_]{2,}")


async def bm25(
    es: AsyncElasticsearch,
    generation: Generation,
    caller: Caller,
    readable: Readable,
    query: str,
    *,
    filters: Filters = NONE,
    excluded: Collection[UUID] = (),
    limit: int,
) -> list[Candidate]:
    """The best passages by keyword among those whose entry says that this caller may read them, best first.

    excluded: chunks that were offered before and turned out to be withheld; they shall not stand in the way again.
    es: with the timeout that a search has. Raises Retryable or Misconfigured.
    """
    with translated(f"search {generation.keyword_index}"):
        answer = await es.search(
            index=generation.keyword_index,
            query=build(caller.tenant, readable, query, filters, excluded),
            size=limit,
            source_includes=["document_id", "text"],
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    return [
        Candidate(UUID(hit["_id"]), UUID(hit["_source"]["document_id"]), hit["_source"]["text"], hit["_score"])
        for hit in answer["hits"]["hits"]
    ]


async def relevance(
    es: AsyncElasticsearch, generation: Generation, ids: Sequence[UUID], query: str, more: Mapping[str, float]
) -> dict[UUID, float]:
    """BM25 of those of these chunks that hold any of the words. The caller has seen that all of them may be read.

    more: words that are asked for besides the query's, and their worth. Raises Retryable or Misconfigured.
    """
    bool_query = {"filter": {"ids": {"values": [str(id_) for id_ in ids]}}, "must": _about(query, more)}
    with translated(f"search {generation.keyword_index}"):
        answer = await es.search(
            index=generation.keyword_index,
            query={"bool": bool_query},
            size=len(ids),
            source=False,
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    return {UUID(hit["_id"]): hit["_score"] for hit in answer["hits"]["hits"]}


def build(
    tenant: str,
    readable: Readable,
    query: str,
    filters: Filters = NONE,
    excluded: Collection[UUID] = (),
) -> dict[str, Any]:
    """Access and filters first, then what is asked for."""
    bool_query: dict[str, Any] = {"filter": [*_may_read(tenant, readable), *narrowing(filters)], "must": _about(query)}
    if excluded:
        bool_query["must_not"] = [{"ids": {"values": [str(id_) for id_ in excluded]}}]
    return {"bool": bool_query}


def _about(query: str, more: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What ``query.retrieval.keywords`` says of the words, or an identifier, or a part of one."""
    words = " ".join(query.split()[:MOST_WORDS]).lower()
    matches: list[Mapping[str, Any]] = [
        {"bool": clauses(query, more)},
        {"terms": {"identifiers": sorted({*_WORD.findall(words)}), "boost": PART_BOOST}},
        *(
            {"constant_score": {"filter": {"term": {"identifiers": identifier}}, "boost": IDENTIFIER_BOOST}}
            for identifier in identifiers(query)[:MOST_IDENTIFIERS]
        ),
    ]
    return {"bool": {"should": matches, "minimum_should_match": 1}}


def _portions(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[n : n + TERMS_A_CLAUSE] for n in range(0, len(values), TERMS_A_CLAUSE)]


def _may_read(tenant: str, readable: Readable) -> Sequence[Mapping[str, Any]]:
    acl = readable.acl_tags
    if not acl:
        return [{"match_none": {}}]  # a bool of no clauses would match everything, whatever its minimum_should_match
    return [{"term": {"tenant": tenant}}, _any_of("acl_tags", acl), _required(readable.required_tags)]


def _required(held: Sequence[str]) -> Mapping[str, Any]:
    """All of an entry's required tags are held. Of very many: at least one of them, besides EVERYONE; the ledger, which
    has the last word anyway, sorts out who lacks another one."""
    if len(held) <= MOST_REQUIRED:
        terms = [EVERYONE, *held]
        return {"terms_set": {"required_tags": {"terms": terms, "minimum_should_match_field": "required_count"}}}
    return _any_of("required_tags", held, {"term": {"required_count": 1}})


def _any_of(field: str, values: Sequence[str], *others: Mapping[str, Any]) -> Mapping[str, Any]:
    matches = [*others, *({"terms": {field: some}} for some in _portions(values))]
    return {"bool": {"should": matches, "minimum_should_match": 1}}


TITLE_BOOST, HEADINGS_BOOST, PHRASE_BOOST = 4.0, 1.5, 1.0
PHRASE_SLOP = 50
"""Words that may stand between the query's, or how far they may have changed places: near each other, in any order."""
MOST_WORDS = 150
"""Words of a query that are looked up; the rest of a pasted page adds clauses and no meaning …"""
MOST_CHARACTERS = 1_500
"""… and so many characters, where words are not set apart: of Chinese or Japanese each is a term, and 8,000 of them in
a phrase with slop took 1.8 s of 1,500 entries."""


def clauses(words: str, more: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A bool query's clauses, to stand beside its filters.

    Words count where they stand (text, title, headings, one field as far as BM25 is concerned: BM25F), and once more,
    unstemmed, where all of them stand near each other. more: words that are asked for besides, and their worth.
    """
    looked_up = " ".join(words.split()[:MOST_WORDS])[:MOST_CHARACTERS]
    own = {
        "must": {
            "combined_fields": {
                "query": looked_up,
                "fields": ["text", f"title^{TITLE_BOOST}", f"headings^{HEADINGS_BOOST}"],
            }
        },
        "should": {"match_phrase": {"text.exact": {"query": looked_up, "slop": PHRASE_SLOP, "boost": PHRASE_BOOST}}},
    }
    if not more:
        return own
    besides = [{"match": {"text": {"query": word, "boost": worth}}} for word, worth in more.items()]
    return {"should": [{"bool": own}, *besides], "minimum_should_match": 1}
