"""What a search is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from pipeline.core.errors import PenstockError

Mode = Literal["hybrid", "vector", "keyword"]
MODES: tuple[Mode, ...] = ("hybrid", "vector", "keyword")
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


@dataclass(frozen=True, slots=True)
class Result:
    passage: Passage
    text: str
    score: float
    """Of the fusion: comparable within one answer only."""
    ranks: Mapping[Ranker, int]
    """From 1, among what the caller may read, in each ranking that holds it."""

    @property
    def stores(self) -> tuple[Ranker, ...]:
        return tuple(ranker for ranker in RANKERS if ranker in self.ranks)


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

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why this answer is less than it could be, one line for each part that failed."""
        return tuple(str(step.facts.get("reason", step.name)) for step in self.steps if step.degraded)


def check(query: str, top: int, mode: str) -> str:
    """The query as it is asked. Raises BadQuery."""
    # What a terminal may hand over and no store takes: lone surrogates and NUL.
    text = query.encode("utf-8", "replace").decode().replace("\x00", " ").strip()
    if not text:
        raise BadQuery("the query is empty: say what to search for")
    if len(text) > MAX_QUERY_CHARACTERS:
        raise BadQuery(f"the query has {len(text)} characters, at most {MAX_QUERY_CHARACTERS} are taken")
    if not 1 <= top <= MAX_TOP:
        raise BadQuery(f"top is {top}, must be 1 to {MAX_TOP}")
    if mode not in MODES:
        raise BadQuery(f"mode is {mode!r}, must be one of {', '.join(MODES)}")
    return text


def as_json(found: Found) -> dict[str, Any]:
    """The command contract's shape."""
    return {
        "results": [
            {
                "chunk_id": str(r.passage.chunk_id),
                "document_id": str(r.passage.document_id),
                "external_id": r.passage.external_id,
                "source": r.passage.source,
                "title": r.passage.title,
                "source_url": r.passage.source_url,
                "chunk_index": r.passage.chunk_index,
                "text": r.text,
                "score": round(r.score, 6),
                "stores": list(r.stores),
            }
            for r in found.results
        ],
        "steps": [{"step": s.name, "took_ms": s.took_ms, **s.facts} for s in found.steps],
        "took_ms": found.took_ms,
    }
