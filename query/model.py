"""The request and the results of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pipeline.core.addresses import openable
from pipeline.core.errors import PenstockError
from pipeline.core.metadata_keys import KeyType
from pipeline.core.normalise import clean

Mode = Literal["hybrid", "vector", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "vector", "keyword")
AnswerMode = Literal["focused", "long_context", "semantic", "hybrid", "keyword", "vector"]
CallerClass = Literal["standard", "extended"]
Sort = Literal["relevance", "newest", "oldest"]
SORTS: tuple[Sort, ...] = ("relevance", "newest", "oldest")
Ranker = Literal["vector", "keyword"]
RANKERS: tuple[Ranker, Ranker] = ("vector", "keyword")

Facts = dict[str, int | str | bool]

MAX_QUERY_CHARACTERS = 8_000
"""Longer than any question: more is a document that was sent by mistake."""
MAX_TOP = 100


class BadQuery(PenstockError):
    """The query itself is invalid (empty, too long, an impossible count); a retry fails again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A passage that a store proposes. Nothing about it is trusted before it is verified against the ledger."""

    chunk_id: UUID
    document_id: UUID
    text: str
    """The text, equal in both stores because the chunk's id is a hash of it."""
    score: float
    """BM25 or cosine; larger is better."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A candidate's document and position, as the ledger has them at the time of the query."""

    chunk_id: UUID
    document_id: UUID
    external_id: str
    source: str
    title: str
    source_url: str | None
    chunk_index: int
    """From 0, in reading order."""
    author: str | None = None
    media_type: str | None = None
    source_modified_at: datetime | None = None

    def __post_init__(self) -> None:
        """Drop an address that cannot be opened: rows may be older than the check at ingestion."""
        object.__setattr__(self, "source_url", openable(self.source_url))


@dataclass(frozen=True, slots=True)
class Result:
    """A passage as it is returned: one chunk, or neighbouring chunks as one text."""

    passage: Passage
    """The document and position of its best chunk."""
    text: str
    score: float
    """The score of the fusion, comparable within one response only."""
    ranks: Mapping[Ranker, int]
    """Its rank, from 1, in each store's ranking of the passages that the caller may read; of several chunks, the best
    rank."""
    chunk_ids: tuple[UUID, ...] = ()
    """The ids of all its chunks, in reading order. Empty when constructed: the passage's own id."""
    also: tuple[Passage, ...] = ()
    """Passages of other documents that say the same and that the caller may read."""
    rerank_score: float | None = None
    """The reranker's score, if it was reranked: larger is better, comparable within one response only."""
    headings: tuple[str, ...] = ()
    """The headings above its best chunk, outermost first."""

    def __post_init__(self) -> None:
        if not self.chunk_ids:
            object.__setattr__(self, "chunk_ids", (self.passage.chunk_id,))

    @property
    def stores(self) -> tuple[Ranker, ...]:
        return tuple(ranker for ranker in RANKERS if ranker in self.ranks)

    @property
    def author(self) -> str | None:
        return self.passage.author

    @property
    def media_type(self) -> str | None:
        return self.passage.media_type

    @property
    def source_modified_at(self) -> datetime | None:
        return self.passage.source_modified_at


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a search. Its counts include only what the caller may read, never what was withheld."""

    name: str
    took_ms: float
    facts: Facts = field(default_factory=dict)

    @property
    def degraded(self) -> bool:
        return bool(self.facts.get("degraded"))


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a declared key, and the number of documents that have it."""

    value: str | int | float | bool
    count: int


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of a declared key, the most frequent first."""

    type: KeyType
    values: Sequence[FacetValue]
    complete: bool
    """False: so many documents match that the counts are of a part of them."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """How much of what was published the caller can see."""

    changes: int
    pending: int
    """The changes that the caller cannot see in both stores: not settled yet, or never for the caller to see."""
    waited_ms: float

    @property
    def applied(self) -> bool:
        return self.pending == 0

    @property
    def reason(self) -> str:
        """One line for people about what is pending."""
        return (
            f"{self.pending} of {self.changes} published changes cannot be seen after {self.waited_ms / 1000:.1f} s:"
            " they are not in both stores yet, or the caller may not read them"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "applied": self.applied,
            "changes": self.changes,
            "pending": self.pending,
            "waited_ms": round(self.waited_ms, 1),
        }


Lag = Literal["stores", "source", "unlisted"]
"""Why a source is not complete up to now: what was read last is not in both stores yet; the source was not read
completely for longer than it should be; or no connector has ever listed it, so that only its publishers know what it
holds."""


@dataclass(frozen=True, slots=True)
class SourceFreshness:
    """The freshness certificate of one source."""

    source: str
    complete_until: datetime | None
    """Every change that was made at the source before this time is in both stores; None: not known."""
    access_until: datetime | None
    """So is every change of its documents' access and of its groups; None: not known."""
    lags: tuple[Lag, ...]
    has_gaps: bool
    """Some documents could not be read, and are left out."""

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "complete_until": self.complete_until and self.complete_until.isoformat(),
            "access_until": self.access_until and self.access_until.isoformat(),
            "lags": list(self.lags),
            "has_gaps": self.has_gaps,
        }


@dataclass(frozen=True, slots=True)
class SearchResults:
    results: Sequence[Result]
    steps: Sequence[Step]
    took_ms: float
    relevant: bool = True
    """False: no candidate is relevant to the query, and no result is returned (query/retrieval/ranking.py)."""
    cursor: str | None = None
    """Where the next page begins; None: there is none."""
    before: str = ""
    """The cursor of this page, from which those who show a part of it derive the next."""
    facets: Mapping[str, Facet] = field(default_factory=dict)
    at_least: AtLeast | None = None
    """None: the request named no publication."""
    freshness: Sequence[SourceFreshness] = ()
    """For each source that was searched and of which the caller can read something, by name."""

    @property
    def degraded(self) -> tuple[str, ...]:
        """One line for each part of the search that failed, and one if the search waited for changes in vain."""
        failed = tuple(str(step.facts.get("reason", step.name)) for step in self.steps if step.degraded)
        waited = self.at_least is not None and not self.at_least.applied
        return (*failed, self.at_least.reason) if self.at_least is not None and waited else failed


def shown_documents(results: Iterable[Result]) -> list[UUID]:
    """The documents of these passages and of the passages that say the same, in order."""
    passages = (passage for result in results for passage in (result.passage, *result.also))
    return list(dict.fromkeys(passage.document_id for passage in passages))


def check_sort(sort: str, mode: str) -> None:
    """Raises BadQuery."""
    if sort not in SORTS:
        raise BadQuery(f"sort is {sort!r}, must be one of {', '.join(SORTS)}")
    if sort != "relevance" and mode == "vector":
        raise BadQuery("a sort by time needs keyword search, because every document resembles a vector: leave out mode")


def check(query: str, top: int, mode: str) -> str:
    """The normalised query. Raises BadQuery."""
    # A terminal may pass lone surrogates and NUL, which no store accepts. The rest is normalised as documents are, so
    # that a name in NFD (from a Mac) or a word with a soft hyphen matches.
    text = clean(query.encode("utf-8", "replace").decode().replace("\x00", " ")).strip()
    if not text:
        raise BadQuery("the query is empty")
    if len(text) > MAX_QUERY_CHARACTERS:
        raise BadQuery(f"the query has {len(text)} characters; the maximum is {MAX_QUERY_CHARACTERS}")
    if not 1 <= top <= MAX_TOP:
        raise BadQuery(f"top is {top}, must be 1 to {MAX_TOP}")
    if mode not in MODES:
        raise BadQuery(f"mode is {mode!r}, must be one of {', '.join(MODES)}")
    return text


def as_json(response: SearchResults) -> dict[str, Any]:
    """The response of the command and the service, in JSON's own types."""
    return {
        "results": [result_as_json(result) for result in response.results],
        "steps": [{"step": s.name, "took_ms": s.took_ms, **s.facts} for s in response.steps],
        "took_ms": response.took_ms,
        "relevant": response.relevant,
        "degraded": list(response.degraded),
        "cursor": response.cursor,
        "facets": facets_as_json(response.facets),
        "at_least": response.at_least and response.at_least.as_json(),
        "freshness": [source.as_json() for source in response.freshness],
    }


def facets_as_json(facets: Mapping[str, Facet]) -> dict[str, Any]:
    return {
        name: {
            "type": facet.type,
            "values": [{"value": counted.value, "count": counted.count} for counted in facet.values],
            "complete": facet.complete,
        }
        for name, facet in facets.items()
    }


def result_as_json(result: Result) -> dict[str, Any]:
    passage = result.passage
    return {
        **_passage_as_json(passage),
        "chunk_index": passage.chunk_index,
        "text": result.text,
        "score": round(result.score, 6),
        "stores": list(result.stores),
        "ranks": dict(result.ranks),
        "rerank_score": None if result.rerank_score is None else round(result.rerank_score, 6),
        "chunk_ids": [str(id_) for id_ in result.chunk_ids],
        "also": [_passage_as_json(other) for other in result.also],
        "author": passage.author,
        "media_type": passage.media_type,
        "source_modified_at": passage.source_modified_at.isoformat() if passage.source_modified_at else None,
        "headings": list(result.headings),
    }


def _passage_as_json(passage: Passage) -> dict[str, Any]:
    return {
        "chunk_id": str(passage.chunk_id),
        "document_id": str(passage.document_id),
        "external_id": passage.external_id,
        "source": passage.source,
        "title": passage.title,
        "source_url": passage.source_url,
    }
