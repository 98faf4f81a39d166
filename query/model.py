"""What a search is asked and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pipeline.core.addresses import openable
from pipeline.core.errors import PenstockError
from pipeline.core.normalise import clean

Mode = Literal["hybrid", "vector", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "vector", "keyword")
AnswerMode = Literal["focused", "long_context", "semantic", "hybrid", "keyword", "vector"]
CallerClass = Literal["standard", "extended"]
Ranker = Literal["vector", "keyword"]
RANKERS: tuple[Ranker, Ranker] = ("vector", "keyword")

Facts = dict[str, int | str | bool]

MAX_QUERY_CHARACTERS = 8_000
"""Longer than any question; whoever sends more has sent a document by mistake."""
MAX_TOP = 100


class BadQuery(PenstockError):
    """The question itself cannot be answered (empty, too long, an impossible count): asking again changes nothing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A passage that a store offers. Nothing about it is believed before it is verified."""

    chunk_id: UUID
    document_id: UUID
    text: str
    """Equal in both stores: the id is a hash of it."""
    score: float
    """BM25 or cosine; larger is better."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Where a candidate stands by the ledger, now."""

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
        """Rows may be older than the check at intake."""
        object.__setattr__(self, "source_url", openable(self.source_url))


@dataclass(frozen=True, slots=True)
class Result:
    """A passage as it is shown: one chunk, or neighbouring ones as one text."""

    passage: Passage
    """Of its best chunk."""
    text: str
    score: float
    """Of the fusion: comparable within one answer only."""
    ranks: Mapping[Ranker, int]
    """From 1, in each ranking that holds it, of what the caller may read and either store offered; of several chunks,
    the best."""
    chunk_ids: tuple[UUID, ...] = ()
    """Of all its chunks, in reading order. Given none: the passage's own."""
    also: tuple[Passage, ...] = ()
    """Where the caller may read the same once more, in other documents."""
    rerank_score: float | None = None
    """By the reranker, where one was asked: larger is better, comparable within one answer only."""
    headings: tuple[str, ...] = ()
    """What its best chunk stands under, outermost first."""

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
    """One thing that was done. Counts are of what the caller may read, never of what was withheld."""

    name: str
    took_ms: float
    facts: Facts = field(default_factory=dict)

    @property
    def degraded(self) -> bool:
        return bool(self.facts.get("degraded"))


@dataclass(frozen=True, slots=True)
class Found:
    results: Sequence[Result]
    steps: Sequence[Step]
    took_ms: float
    relevant: bool = True
    """False: nothing that was found is about the question, and nothing is shown (query/retrieval/ranking.py)."""

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why this answer is less than it could be, one line for each part that failed."""
        return tuple(str(step.facts.get("reason", step.name)) for step in self.steps if step.degraded)


def shown_in(results: Iterable[Result]) -> list[UUID]:
    """The documents that these passages are of, with those that say the same, in order."""
    passages = (passage for result in results for passage in (result.passage, *result.also))
    return list(dict.fromkeys(passage.document_id for passage in passages))


def check(query: str, top: int, mode: str) -> str:
    """The query as it is asked. Raises BadQuery."""
    # What a terminal may hand over and no store takes: lone surrogates and NUL. The rest as documents are kept: a name
    # that a Mac wrote (NFD), or a word with an invisible hyphen, is the one that stands there.
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


def as_json(found: Found) -> dict[str, Any]:
    """What the command and the service answer; JSON's own types throughout."""
    return {
        "results": [result_as_json(result) for result in found.results],
        "steps": [{"step": s.name, "took_ms": s.took_ms, **s.facts} for s in found.steps],
        "took_ms": found.took_ms,
        "relevant": found.relevant,
        "degraded": list(found.degraded),
    }


def result_as_json(result: Result) -> dict[str, Any]:
    passage = result.passage
    return {
        **_place(passage),
        "chunk_index": passage.chunk_index,
        "text": result.text,
        "score": round(result.score, 6),
        "stores": list(result.stores),
        "ranks": dict(result.ranks),
        "rerank_score": None if result.rerank_score is None else round(result.rerank_score, 6),
        "chunk_ids": [str(id_) for id_ in result.chunk_ids],
        "also": [_place(other) for other in result.also],
        "author": passage.author,
        "media_type": passage.media_type,
        "source_modified_at": passage.source_modified_at.isoformat() if passage.source_modified_at else None,
        "headings": list(result.headings),
    }


def _place(passage: Passage) -> dict[str, Any]:
    return {
        "chunk_id": str(passage.chunk_id),
        "document_id": str(passage.document_id),
        "external_id": passage.external_id,
        "source": passage.source,
        "title": passage.title,
        "source_url": passage.source_url,
    }
