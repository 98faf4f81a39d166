"""BM25 candidates from Elasticsearch."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identifiers import PART, identifiers
from pipeline.core.identity import EVERYONE
from pipeline.core.languages import CJK, languages_of_question
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import translated
from query.access.callers import Caller, Readable
from query.access.filters import NONE, Filters
from query.access.filters import clauses as narrowing
from query.model import Candidate, Sort

TERMS_A_CLAUSE = 65_536
"""The most terms of a ``terms`` clause (index.max_terms_count)."""
MAX_REQUIRED_TAGS = 500
"""The most required tags that a query compares exactly. Each counts as a clause, and a small server accepts 1,024
clauses in a whole query (indices.query.bool.max_clause_count)."""
IDENTIFIER_BOOST = 100.0
"""More than any BM25 score, so that passages with an identifier of the query come first."""
PART_BOOST = 0.1
"""Enough for "config" to match a passage that contains only config.yaml, too little to change the order of passages
that match by words."""
MAX_IDENTIFIERS = 20
MOST_WORDS = "2<75%"
"""All of one or two words have to match, of more three quarters: sorted by time, a passage with one word of many would
come first."""


def _by_modification(order: str) -> Sequence[Mapping[str, Any]]:
    return [{"source_modified_at": {"order": order, "missing": "_last"}}, {"_score": {"order": "desc"}}]


_ORDERS: Mapping[Sort, Sequence[Mapping[str, Any]] | None] = {
    "relevance": None,
    "newest": _by_modification("desc"),
    "oldest": _by_modification("asc"),
}


async def bm25(
    es: AsyncElasticsearch,
    generation: Generation,
    caller: Caller,
    readable: Readable,
    query: str,
    *,
    filters: Filters = NONE,
    sort: Sort = "relevance",
    excluded: Collection[UUID] = (),
    limit: int,
) -> list[Candidate]:
    """The best passages by keyword among those that this caller may read according to the index, best first.

    sort: by the time of the document, to the hour; then only passages with most of the query's words count.
    excluded: chunks that an earlier round returned and the ledger withheld. es: a client with the timeout of a search.
    Raises Retryable or Misconfigured.
    """
    with translated(f"search {generation.keyword_index}"):
        answer = await es.search(
            index=generation.keyword_index,
            query=build(caller.tenant, readable, query, filters, excluded, sort),
            size=limit,
            sort=_ORDERS[sort],
            track_scores=True,
            source_includes=["document_id", "text"],
            track_total_hits=False,
            allow_partial_search_results=False,
        )
    return [
        Candidate(UUID(hit["_id"]), UUID(hit["_source"]["document_id"]), hit["_source"]["text"], hit["_score"])
        for hit in answer["hits"]["hits"]
    ]


async def bm25_scores(
    es: AsyncElasticsearch, generation: Generation, ids: Sequence[UUID], query: str, more: Mapping[str, float]
) -> dict[UUID, float]:
    """BM25 of these chunks, without those that contain none of the words. All of them must be verified already.

    more: additional words and their weights. Raises Retryable or Misconfigured.
    """
    bool_query = {"filter": {"ids": {"values": [str(id_) for id_ in ids]}}, "must": _content(query, more)}
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
    sort: Sort = "relevance",
) -> dict[str, Any]:
    """The whole query: access, filters and content."""
    bool_query: dict[str, Any] = {
        "filter": [*may_read(tenant, readable), *narrowing(filters)],
        "must": _content(query),
    }
    if sort != "relevance":
        text = query[:MAX_MATCHED_CHARACTERS]
        bool_query["filter"].append(_words(text, languages_of_question(text), minimum_should_match=MOST_WORDS))
    if excluded:
        bool_query["must_not"] = [{"ids": {"values": [str(id_) for id_ in excluded]}}]
    return {"bool": bool_query}


def _content(query: str, more: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The query's content: passages match by words, by an identifier, or by a part of an identifier."""
    words = " ".join(query.split()[:MAX_QUERY_WORDS]).lower()
    matches: list[Mapping[str, Any]] = [
        {"bool": clauses(query, more)},
        {"terms": {"identifiers": sorted(parts_of(words)), "boost": PART_BOOST}},
        *(
            {"constant_score": {"filter": {"term": {"identifiers": identifier}}, "boost": IDENTIFIER_BOOST}}
            for identifier in identifiers(query)[:MAX_IDENTIFIERS]
        ),
    ]
    return {"bool": {"should": matches, "minimum_should_match": 1}}


def parts_of(words: str) -> set[str]:
    """The words of a query that match a part of an identifier."""
    return {*PART.findall(words)}


def _batches(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[n : n + TERMS_A_CLAUSE] for n in range(0, len(values), TERMS_A_CLAUSE)]


def may_read(tenant: str, readable: Readable) -> Sequence[Mapping[str, Any]]:
    """The filter clauses that leave the entries which this caller may read according to the index."""
    acl = readable.acl_tags
    if not acl:
        return [{"match_none": {}}]  # a bool query without clauses would match everything
    return [{"term": {"tenant": tenant}}, _any_of("acl_tags", acl), _required(readable.required_tags)]


def _required(held: Sequence[str]) -> Mapping[str, Any]:
    """The caller holds all of an entry's required tags. Of more than MAX_REQUIRED_TAGS it must hold at least one
    besides EVERYONE; the ledger, which verifies every candidate, then removes the others."""
    if len(held) <= MAX_REQUIRED_TAGS:
        terms = [EVERYONE, *held]
        return {"terms_set": {"required_tags": {"terms": terms, "minimum_should_match_field": "required_count"}}}
    return _any_of("required_tags", held, {"term": {"required_count": 1}})


def _any_of(field: str, values: Sequence[str], *others: Mapping[str, Any]) -> Mapping[str, Any]:
    matches = [*others, *({"terms": {field: batch}} for batch in _batches(values))]
    return {"bool": {"should": matches, "minimum_should_match": 1}}


WEIGHTS: Mapping[str, float] = {"text": 1, "title": 4.0, "title_words": 4.0, "headings": 1.5}
"""The fields of an entry that are scored as one. ``title_words`` are those of the names in the title, such as
``Budget_2026.xlsx`` (docs/adr/0101-words-of-names.md)."""
PHRASE_BOOST = 1.0
PHRASE_SLOP = 50
"""How many positions the query's words may be moved: near each other, in any order."""
MAX_REPEATS = 8
"""How often a phrase has the same term at most. The time that Elasticsearch takes for a sloppy phrase grows with the
square of it, at each place of each passage, whatever the client's time limit: in 16 passages of 9,000 equal terms, 150
of them took 6 s, 600 took 47 s, and 1,500, as many as a query can have, more than two minutes."""
_DIVIDED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\uabff\ud7b0-\U0010ffff]")
"""Thai, Lao, Burmese and Khmer, and all that comes after U+2E80, except for Hangul."""
_BETWEEN_WORDS = re.compile(r"[\s!-/:-@\[-^`{-~\u200c\u200d\u2019]")
"""Characters that are never terms."""
MAX_QUERY_WORDS = 150
"""The most words of a query that are searched for; the rest of a pasted page adds clauses and no meaning."""
MAX_MATCHED_CHARACTERS = 1_500
"""The most characters of a query that are searched for. In Chinese or Japanese each character is a term, and a phrase
of 8,000 terms with slop took 1.8 s on 1,500 entries."""


MAX_ANALYSED_WORDS = 60
"""The most words of a query that are searched for in the fields of its languages, divided among them: each is a clause
in three fields, and a small server accepts 1,024 in all."""
MAX_ANALYSED_CHARACTERS = 120
"""The same for Chinese, Japanese and Korean, where nearly each character begins a term."""


def clauses(words: str, more: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The clauses of a bool query, without its filters.

    Words match in text, title and headings, which BM25F scores as one field (WEIGHTS), and once more, unstemmed, where
    all of them are near each other. In a passage in a language of the query, they count in the fields of that language,
    too. more: additional words and their weights.
    """
    text = matched(words)
    languages = languages_of_question(text)
    own = {
        "must": _words(text, languages),
        "should": {"match_phrase": {"text.exact": {"query": phrase(text), "slop": PHRASE_SLOP, "boost": PHRASE_BOOST}}},
    }
    if not more:
        return own
    added = [_word(word, weight, languages) for word, weight in more.items()]
    return {"should": [{"bool": own}, *added], "minimum_should_match": 1}


def matched(words: str) -> str:
    """The beginning of a query that is searched for."""
    return " ".join(words.split()[:MAX_QUERY_WORDS])[:MAX_MATCHED_CHARACTERS]


def phrase(text: str) -> str:
    """The phrase of a query: its text, up to the word with which a term would occur more than MAX_REPEATS times. What
    is left out in between would move the words after it, and a passage that is searched for by its own text would not
    have the phrase.

    Terms are divided at least where the index divides them: it takes some letters of its own Unicode tables for a
    boundary, so that only those are letters here which every version knows.
    """
    counts = Counter[str]()
    end = 0
    for joined, group in groupby(text, _in_words):
        for term in ("".join(group),) if joined else group:
            counts[term.lower()] += 1
            if counts[term.lower()] > MAX_REPEATS and not _BETWEEN_WORDS.match(term):
                whole_words = text.rfind(" ", 0, end) if joined else -1  # no half of "don't" or "1.2.3"
                return text[: whole_words if whole_words > 0 else end]
            end += len(term)
    return text


def _in_words(character: str) -> bool:
    """Whether a word may consist of several such characters. In the other scripts each of them may be a term."""
    if character.isascii():
        return character.isalnum() or character == "_"
    kind = unicodedata.ucd_3_2_0.category(character)
    return (kind[0] in "LM" or kind == "Nd") and not _DIVIDED.match(character)


def of_language(text: str, language: str, languages: int) -> str:
    """The beginning of a query that is searched for in the fields of one of its languages."""
    share = MAX_ANALYSED_WORDS // languages
    return text[:MAX_ANALYSED_CHARACTERS] if language == CJK else " ".join(text.split()[:share])


def _words(text: str, languages: Sequence[str], **options: object) -> dict[str, Any]:
    """The words of a query in the fields of English and of its languages, whose scores add up."""
    matches = [_combined("", text, options)]
    for language in languages:
        words = of_language(text, language, len(languages))
        matches.append(_combined(f"analysed.{language}.", words, options))
    return {"bool": {"should": matches, "minimum_should_match": 1}} if languages else matches[0]


def _combined(prefix: str, text: str, options: Mapping[str, object]) -> dict[str, Any]:
    fields = [name if weight == 1 else f"{name}^{weight}" for name, weight in weighted_fields(prefix).items()]
    return {"combined_fields": {"query": text, "fields": fields, **options}}


def weighted_fields(prefix: str) -> dict[str, float]:
    """The fields that are scored as one, by their names with this prefix, and their weights."""
    return {f"{prefix}{name}": weight for name, weight in WEIGHTS.items()}


def _word(word: str, weight: float, languages: Sequence[str]) -> dict[str, Any]:
    fields = ["text", *(f"analysed.{language}.text" for language in languages)]
    matches = [{"match": {field: {"query": word, "boost": weight}}} for field in fields]
    return {"dis_max": {"queries": matches}} if languages else matches[0]
