"""BM25 of texts that are not in the keyword index, as the index would score them.

Elasticsearch analyses the query and the texts and returns the index's own statistics (``_mtermvectors`` of artificial
documents, which reads and stores nothing). The formulas are those of Lucene for the query that
``query.retrieval.keywords`` builds: BM25F over text, title and headings (``combined_fields``), a sloppy phrase, and
constants for identifiers. What is left out: terms that share a position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from math import log
from typing import Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identifiers import identifiers
from pipeline.core.languages import languages_of_question
from pipeline.core.model import Generation
from pipeline.stores.elasticsearch import SIMILARITY, translated
from query.retrieval import keywords
from query.retrieval.keywords import (
    IDENTIFIER_BOOST,
    MAX_IDENTIFIERS,
    PART_BOOST,
    PHRASE_BOOST,
    PHRASE_SLOP,
    WEIGHTS,
    weighted_fields,
)

K1, B = float(SIMILARITY["default"]["k1"]), float(SIMILARITY["default"]["b"])
EXACT = "text.exact"
TEXTS_A_REQUEST = 100

Positions = Mapping[str, Sequence[int]]
"""Term → its positions in a field, ascending."""


@dataclass(frozen=True, slots=True)
class FieldStatistics:
    """A field in the index: how many entries have it, and how many terms it has in all of them."""

    entries: int = 0
    terms: int = 0


@dataclass(frozen=True, slots=True)
class Analysed:
    """An analysed text, by field. Statistics are those of the index, without the text itself."""

    positions: Mapping[str, Positions]
    statistics: Mapping[str, FieldStatistics] = field(default_factory=dict)
    frequencies: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Field → term → how many entries have it there."""

    def count(self, name: str, term: str) -> int:
        return len(self.positions.get(name, {}).get(term, ()))

    def length(self, name: str) -> int:
        return sum(map(len, self.positions.get(name, {}).values()))


@dataclass(frozen=True, slots=True)
class AnalysedEntry:
    """An entry that the index lacks."""

    chunk_id: UUID
    text: Analysed
    identifiers: frozenset[str]


# Formulas


@cache
def stored_length(length: int) -> int:
    """A field's length as Lucene stores it, in one byte: exact up to 39, then with four significant bits."""
    exact = 24
    if length < exact:
        return length
    rest = length - exact
    shift = max(0, rest.bit_length() - 4)
    return exact + (rest >> shift << shift)


def inverse_frequency(entries: int, having: int) -> float:
    return log(1 + (entries - having + 0.5) / (having + 0.5))


def saturated(weight: float, frequency: float, length: float, average: float) -> float:
    """The score of one term. weight: its inverse document frequency and boost. Lengths are in terms."""
    if frequency <= 0:
        return 0.0
    inverse = 1 / (K1 * (1 - B + B * length / average))
    return (K1 + 1) * weight * (1 - 1 / (1 + frequency * inverse))


def sloppy_frequency(terms: Sequence[str], positions: Positions) -> float:
    """How often the phrase occurs: each place counts 1 / (1 + the positions that its words are moved by). A word that
    the phrase repeats needs as many places. positions: those of the terms in the text."""
    places = [positions.get(term, ()) for term in terms]
    repeats = [[m for m, other in enumerate(terms) if other == term and m != n] for n, term in enumerate(terms)]
    at = [terms[:n].count(term) for n, term in enumerate(terms)]
    if any(index >= len(of_term) for index, of_term in zip(at, places, strict=True)):
        return 0.0
    if len(terms) == 1:
        return float(len(places[0]))

    def shifted(n: int) -> int:
        """Where the phrase would begin, by its n-th word."""
        return places[n][at[n]] - n

    waiting = [(shifted(n), n) for n in range(len(terms))]
    """Where the phrase would begin, by each of its words. Words only move on: of the values of a word, the others than
    its present one are smaller, and are dropped when they come first."""
    heapify(waiting)
    last = max(waiting)[0]

    def earliest() -> tuple[int, int]:
        while waiting[0][0] != shifted(waiting[0][1]):
            heappop(waiting)
        return waiting[0]

    def move(n: int) -> bool:
        """Move the n-th word to its next place, and words of the same text on from a place that is taken. False: there
        is none."""
        nonlocal last
        moved = {n}
        at[n] += 1
        while at[n] < len(places[n]):
            taken = next((m for m in repeats[n] if at[m] == at[n]), None)
            if taken is None:
                for m in moved:
                    heappush(waiting, (shifted(m), m))
                    last = max(last, shifted(m))
                return True
            n = min(n, taken, key=lambda word: (shifted(word), word))
            moved.add(n)
            at[n] += 1
        return False

    total = 0.0
    while True:
        start, first = earliest()
        end = last
        heappop(waiting)
        following, _ = earliest()
        length = end - start
        # The first word moves on as long as it stays before the next one: a shorter match may follow.
        while has_next := move(first):
            if shifted(first) > following:
                break
            length = min(length, end - shifted(first))
        if length <= PHRASE_SLOP:
            total += 1 / (1 + length)
        if not has_next:
            return total


@dataclass(frozen=True, slots=True)
class Gained:
    """The statistics that the entries of an edit add to those of the index. They are counted once: an edit may have a
    thousand entries, and each is scored for every question."""

    statistics: Mapping[str, FieldStatistics] = field(default_factory=dict)
    frequencies: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Field → term → how many of the entries have it there."""


def gained(entries: Iterable[AnalysedEntry]) -> Gained:
    """The statistics of these entries."""
    statistics: dict[str, FieldStatistics] = {}
    frequencies: dict[str, Counter[str]] = {}
    for entry in entries:
        for name, terms in entry.text.positions.items():
            if length := entry.text.length(name):
                known = statistics.get(name, FieldStatistics())
                statistics[name] = FieldStatistics(known.entries + 1, known.terms + length)
                frequencies.setdefault(name, Counter()).update(term for term, places in terms.items() if places)
    return Gained(statistics, frequencies)


@dataclass(frozen=True, slots=True)
class KeywordQuery:
    """A query as the index analysed it, with the statistics to score by."""

    words: Sequence[tuple[str, Analysed]]
    """For each prefix of field names, the words that are looked up in its fields."""
    phrase: Analysed
    added: Sequence[tuple[float, Sequence[str], Analysed]]
    """Further words: weight, the fields that they are looked up in (the best one counts), and the word."""
    parts: frozenset[str]
    """Words that match a part of an identifier."""
    identifiers: Sequence[str]

    def score(self, entry: AnalysedEntry, new: Gained) -> float | None:
        """The entry's score; None if it does not match. new: of all entries that the index would gain."""
        matches = False
        total = 0.0
        own = sum(_combined(entry, prefix, query, new) for prefix, query in self.words)
        if own > 0:
            matches = True
            total += own + PHRASE_BOOST * _phrase(entry, self.phrase, new)
        for weight, fields, query in self.added:
            best = max(_plain(entry, name, query, new) for name in fields)
            matches = matches or best > 0
            total += weight * best
        if self.parts & entry.identifiers:
            matches, total = True, total + PART_BOOST
        for identifier in self.identifiers:
            if identifier in entry.identifiers:
                matches, total = True, total + IDENTIFIER_BOOST
        return total if matches else None


def _combined(entry: AnalysedEntry, prefix: str, query: Analysed, new: Gained) -> float:
    """BM25F: the fields are one field, in which each occurrence counts with its field's weight."""
    weights = weighted_fields(prefix)
    terms = query.positions.get(f"{prefix}text", {})
    statistics = {name: _statistics(query, name, new) for name in weights}
    entries = max(field.entries for field in statistics.values())
    if not entries:
        return 0.0
    average = sum(int(weights[name] * field.terms) for name, field in statistics.items()) / entries
    length = sum(weight * stored_length(entry.text.length(name)) for name, weight in weights.items())
    length = stored_length(int(length + 0.5))  # rounded as Java rounds
    total = 0.0
    for term in terms:
        frequency = sum(weight * entry.text.count(name, term) for name, weight in weights.items())
        if frequency:
            having = max(_having(query, name, term, new) for name in weights)
            total += query.count(prefix + "text", term) * saturated(
                inverse_frequency(entries, having), frequency, length, average
            )
    return total


def _phrase(entry: AnalysedEntry, query: Analysed, new: Gained) -> float:
    places = sorted((at, term) for term, positions in query.positions.get(EXACT, {}).items() for at in positions)
    terms = [term for _, term in places]
    statistics = _statistics(query, EXACT, new)
    if not terms or not statistics.entries:
        return 0.0
    frequency = sloppy_frequency(terms, entry.text.positions.get(EXACT, {}))
    weight = sum(inverse_frequency(statistics.entries, _having(query, EXACT, term, new)) for term in terms)
    length = stored_length(entry.text.length(EXACT))
    return saturated(weight, frequency, length, statistics.terms / statistics.entries)


def _plain(entry: AnalysedEntry, name: str, query: Analysed, new: Gained) -> float:
    statistics = _statistics(query, name, new)
    if not statistics.entries:
        return 0.0
    length, average = stored_length(entry.text.length(name)), statistics.terms / statistics.entries
    return sum(
        saturated(
            inverse_frequency(statistics.entries, _having(query, name, term, new)),
            entry.text.count(name, term),
            length,
            average,
        )
        for term in query.positions.get(name, {})
    )


def _statistics(query: Analysed, name: str, new: Gained) -> FieldStatistics:
    known = query.statistics.get(name, FieldStatistics())
    more = new.statistics.get(name, FieldStatistics())
    return FieldStatistics(known.entries + more.entries, known.terms + more.terms)


def _having(query: Analysed, name: str, term: str, new: Gained) -> int:
    return query.frequencies.get(name, {}).get(term, 0) + new.frequencies.get(name, {}).get(term, 0)


# Elasticsearch


async def analyse(
    es: AsyncElasticsearch, generation: Generation, entries: Mapping[UUID, Mapping[str, Any]]
) -> list[AnalysedEntry]:
    """Entries (``pipeline.ledger.entry.content_fields``) as the index would analyse them. Raises Retryable or
    Misconfigured."""
    ids = list(entries)
    analysed: list[Analysed] = []
    for at in range(0, len(ids), TEXTS_A_REQUEST):
        documents = [
            {name: value for name, value in entries[id_].items() if name != "identifiers"}
            for id_ in ids[at : at + TEXTS_A_REQUEST]
        ]
        analysed += await _term_vectors(es, generation, documents, statistics=False)
    return [
        AnalysedEntry(id_, text, frozenset(entries[id_]["identifiers"]))
        for id_, text in zip(ids, analysed, strict=True)
    ]


async def keyword_query(
    es: AsyncElasticsearch, generation: Generation, text: str, more: Mapping[str, float] | None = None
) -> KeywordQuery:
    """The query as ``query.retrieval.keywords`` would search for it. more: additional words and their weights. Raises
    Retryable or Misconfigured."""
    words = " ".join(text.split()[: keywords.MAX_QUERY_WORDS]).lower()
    matched = keywords.matched(text)
    prefixes = {"": matched}
    languages = languages_of_question(matched)
    for language in languages:
        prefixes[f"analysed.{language}."] = keywords.of_language(matched, language, len(languages))
    fields = ["text", *(f"analysed.{language}.text" for language in languages)]
    documents: list[Mapping[str, Any]] = [{"text": keywords.phrase(matched)}]
    documents += [_within(prefix, dict.fromkeys(WEIGHTS, part)) for prefix, part in prefixes.items()]
    for word in more or {}:
        merged: dict[str, Any] = {"text": word}
        for language in languages:
            merged |= {"analysed": merged.get("analysed", {}) | {language: {"text": word}}}
        documents.append(merged)
    phrase, *analysed = await _term_vectors(es, generation, documents, statistics=True)
    return KeywordQuery(
        list(zip(prefixes, analysed, strict=False)),
        phrase,
        [
            (weight, fields, vectors)
            for weight, vectors in zip((more or {}).values(), analysed[len(prefixes) :], strict=True)
        ],
        frozenset(keywords.parts_of(words)),
        identifiers(text)[:MAX_IDENTIFIERS],
    )


def _within(prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
    if not prefix:
        return fields
    _, language, _ = prefix.split(".")
    return {"analysed": {language: fields}}


async def _term_vectors(
    es: AsyncElasticsearch, generation: Generation, documents: Sequence[Mapping[str, Any]], *, statistics: bool
) -> list[Analysed]:
    if not documents:
        return []
    index = generation.keyword_index
    options = {"term_statistics": statistics, "field_statistics": statistics, "offsets": False, "payloads": False}
    with translated(f"analyse for {index}"):
        answer = await es.mtermvectors(
            docs=[
                {"_index": index, "doc": document, "fields": sorted(_fields_of(document)), **options}
                for document in documents
            ]
        )
    return [_analysed(vectors.get("term_vectors", {})) for vectors in answer["docs"]]


def _fields_of(document: Mapping[str, Any]) -> Iterable[str]:
    for name, value in document.items():
        if name == "analysed":
            for language, fields in value.items():
                yield from (f"analysed.{language}.{part}" for part in fields)
        else:
            yield name
            if name == "text":
                yield EXACT


def _analysed(fields: Mapping[str, Any]) -> Analysed:
    return Analysed(
        {
            name: {term: [token["position"] for token in entry["tokens"]] for term, entry in vector["terms"].items()}
            for name, vector in fields.items()
        },
        {
            name: FieldStatistics(max(0, counts["doc_count"]), max(0, counts["sum_ttf"]))
            for name, vector in fields.items()
            if (counts := vector.get("field_statistics"))
        },
        {
            name: {term: counts.get("doc_freq", 0) for term, counts in vector["terms"].items()}
            for name, vector in fields.items()
        },
    )
