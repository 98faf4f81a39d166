"""What is answered: shapes for the description of the interface, and for whoever reads it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from query.material import AnswerMode, CallerClass
from query.model import Ranker


class Told(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TroubleAt(Told):
    pointer: str = Field(description="Where in the request (RFC 6901).", examples=["/filters/since"])
    detail: str


class ProblemTold(Told):
    """RFC 9457. `type` is `urn:penstock:problem:KIND`; the kinds are listed in docs/http.md."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[TroubleAt] = []


class Step(BaseModel):
    """One thing that was done, with its time and facts about it."""

    model_config = ConfigDict(extra="allow")

    step: str
    took_ms: float


class Place(Told):
    chunk_id: str
    document_id: str
    external_id: str = Field(description="As the source names the document.")
    source: str
    title: str
    source_url: str | None


class Result(Place):
    chunk_index: int = Field(description="Of its best chunk, from 0, in reading order.")
    text: str
    score: float = Field(description="Comparable within one answer only.")
    stores: list[Ranker]
    ranks: dict[Ranker, int] = Field(description="From 1, in each ranking that holds it, of what either store offered.")
    rerank_score: float | None
    chunk_ids: list[str] = Field(description="Neighbouring chunks that are shown as one passage.")
    also: list[Place] = Field(description="Other documents that say the same.")
    author: str | None
    media_type: str | None
    source_modified_at: str | None
    headings: list[str] = Field(description="What it stands under, outermost first.")


class SearchTold(Told):
    results: list[Result]
    steps: list[Step]
    took_ms: float
    relevant: bool = Field(description="False: nothing that was found is about the question.")
    degraded: list[str] = Field(description="Why this answer is less than it could be.")


class Citation(Place):
    n: int = Field(description="What `[n]` in the answer points to.")
    chunk_index: int
    text: str


class AnswerTold(BaseModel):
    model_config = ConfigDict(extra="allow")

    answer: str
    citations: list[Citation]
    steps: list[Step]
    grounded: bool = Field(description="Every claim is supported by the passages that it cites.")
    mode: AnswerMode
    notes: list[str] = Field(description="What is missing: trimmed, degraded, not embedded yet.")
    relevant: bool
    model: str | None = Field(description="None: no model is set, and the answer is made of quotations.")
    unsupported: list[str] = Field(description="Sentences that the passages they cite do not say.")
    review: bool
    answer_id: str


class DocumentTold(Told):
    document_id: str
    external_id: str
    source: str
    title: str
    source_url: str | None
    author: str | None
    media_type: str | None
    source_modified_at: str | None
    text: str = Field(description="Whole, normalised, in reading order.")


class StoryTold(BaseModel):
    """One document's story. Operators see more of it than readers."""

    model_config = ConfigDict(extra="allow")

    document: dict[str, Any]
    events: list[dict[str, Any]]
    generations: list[dict[str, Any]]
    access: dict[str, Any]
    dead: list[dict[str, Any]]
    searchable: bool
    reason: str


class MeTold(Told):
    tenant: str
    principal: str | None
    key: str | None = Field(description="The name of the API key, for a service.")
    kind: Literal["token", "key", "development"]
    # "class" is no name for a field in Python.
    klass: CallerClass = Field(serialization_alias="class")
    operator: bool


class FacetsTold(Told):
    """Of what the caller may read, the most frequent first."""

    sources: list[str]
    authors: list[str]
    media_types: list[str]


class ReviewTold(Told):
    waiting: list[dict[str, Any]]


class PipelineTold(BaseModel):
    """docs/page.md describes the parts. One that is away is null, and named in `away`."""

    model_config = ConfigDict(extra="allow")

    at: str
    away: list[str]
