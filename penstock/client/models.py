"""The shapes of requests and responses, with the names of docs/openapi.json, which a test compares with them.

A response may have fields that this version does not know: they are in ``model_extra``. Where the description lists the
values of a response's field, its type here is ``str``, because a later service may have more of them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

SearchMode = Literal["hybrid", "vector", "keyword"]
SearchSort = Literal["relevance", "newest", "oldest"]
AnswerMode = Literal["focused", "long_context", "semantic", "hybrid", "keyword", "vector"]


KeyValue = bool | int | float | str


class KeyConditions(BaseModel):
    """Conditions on the values of one key of metadata, which must all hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    any: list[KeyValue] = []
    """The document has at least one of these values."""
    all: list[KeyValue] = []
    """The document has every one of these values."""
    none: list[KeyValue] = []
    """The document has none of these values, or not the key at all."""
    gte: int | float | str | None = None
    gt: int | float | str | None = None
    lte: int | float | str | None = None
    lt: int | float | str | None = None
    """Bounds: numbers, dates (ISO 8601) or other texts. One value lies within all of them."""


class SearchFilters(BaseModel):
    """Restricts the documents that are searched. A document must match every filter that is set, and any one value of a
    list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[str] = []
    authors: list[str] = []
    media_types: list[str] = []
    """``text/*`` matches every type that starts with ``text/``."""
    since: datetime | None = None
    """Changed at its source at or after this time. Without a time zone: UTC."""
    before: datetime | None = None
    documents: list[UUID] = []
    metadata: dict[str, KeyValue | list[KeyValue] | KeyConditions] = {}
    """By declared key: a value, a list of values of which any matches, or ``KeyConditions``."""


class _Response(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Step(_Response):
    """One step of a search or answer; further facts are in ``model_extra``."""

    step: str
    took_ms: float


class ChunkReference(_Response):
    """A chunk and the document that it belongs to."""

    chunk_id: str
    document_id: str
    external_id: str
    """The document's id at its source."""
    source: str
    title: str
    source_url: str | None


class SearchResult(ChunkReference):
    """A passage: one chunk, or adjacent ones that were merged."""

    chunk_index: int
    """Position of the best chunk in the document, from 0."""
    text: str
    score: float
    """Comparable within one response only."""
    stores: list[str]
    """``vector``, ``keyword`` or both."""
    ranks: dict[str, int]
    """Rank by store, from 1."""
    rerank_score: float | None
    chunk_ids: list[str]
    also: list[ChunkReference]
    """Other documents that contain the same text."""
    author: str | None
    media_type: str | None
    source_modified_at: datetime | None
    headings: list[str]
    """Headings above the best chunk, outermost first."""

    def citation(self) -> str:
        """Where the passage stands, in one line for people: ``Title › Heading (address)``. The address is the URL, or
        ``source/external_id``."""
        return _citation(self, *self.headings)

    def metadata(self) -> dict[str, Any]:
        """The metadata that LangChain and LlamaIndex store with the text. Every value can be written as JSON."""
        passage = {"chunk_id": self.chunk_id, "score": self.score, "headings": self.headings}
        return {"citation": self.citation(), **_metadata(self), **passage}


class NumberedResult(SearchResult):
    """A passage that an answer is made from."""

    n: int
    """The number that ``[n]`` in the answer refers to."""


class FacetValue(_Response):
    """A value of a declared key."""

    value: KeyValue
    count: int
    """The number of documents that the caller may read and that match."""


class Facet(_Response):
    """The values of a declared key, the most frequent first."""

    type: str
    values: list[FacetValue]
    complete: bool
    """False if so many documents match that a part of them was counted."""


class AtLeastResponse(_Response):
    """The outcome of the changes that the request named in ``at_least``."""

    applied: bool
    """Whether the caller can see all of them in both stores."""
    changes: int
    pending: int
    """Changes that are not in both stores yet, or that the caller may not read."""
    waited_ms: float


class SourceFreshness(_Response):
    """The freshness certificate of a source: what the caller can rely on."""

    source: str
    complete_until: datetime | None
    """Every change made at the source before this time is in both stores; None: not known."""
    access_until: datetime | None
    """Every change of access rights and groups made there before this time is applied; None: not known."""
    lags: list[str]
    """``stores``: what was read last is not in both stores yet; ``source``: it was not read completely for longer than
    it should be; ``unlisted``: no connector has ever listed it, so that nobody knows when it is complete."""
    has_gaps: bool
    """Whether documents that could not be read are left out."""


class SearchResponse(_Response):
    """Passages, the best first."""

    results: list[SearchResult]
    steps: list[Step]
    took_ms: float
    relevant: bool
    """False if no passage is relevant to the query; ``results`` is then empty."""
    degraded: list[str]
    """Reasons why this response is incomplete, one for each failed part."""
    cursor: str | None
    """Where the next page of the same search begins; None if this is the last."""
    facets: dict[str, Facet]
    """The facets that were requested, by key."""
    at_least: AtLeastResponse | None
    """None if the request named no publication."""
    freshness: list[SourceFreshness]
    """For each searched source of which the caller can read a document."""


class Citation(ChunkReference):
    """A passage that an answer cites."""

    n: int
    """The number that ``[n]`` in the answer refers to."""
    chunk_index: int
    text: str


class Turn(BaseModel):
    """An earlier question of a conversation with its answer, for the ``turns`` of the next question."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    answer: str = ""
    answer_id: UUID | None = None
    """The ``answer_id`` of the response. The answer is then used only while the caller may read its documents."""


class AnswerResponse(_Response):
    """A complete answer, whose citations were checked. It is also the last event of a streamed answer."""

    answer: str
    citations: list[Citation]
    steps: list[Step]
    grounded: bool
    """Whether every claim is supported by the passages that it cites."""
    mode: str
    notes: list[str]
    """The missing parts: passages left out, failed parts, texts not yet embedded."""
    relevant: bool
    model: str | None
    """None if the service has no chat model; the answer then consists of quotes."""
    unsupported: list[str]
    """Sentences that the cited passages do not support."""
    review: bool
    answer_id: str
    standing_id: str | None = None
    """The id of the standing question, if the answer was kept."""
    at_least: AtLeastResponse | None = None
    """None if the request named no publication."""
    freshness: list[SourceFreshness] = []
    """For each searched source of which the caller can read a document."""

    def turn(self, question: str) -> Turn:
        """This answer to a question, for the ``turns`` of the next one."""
        return Turn(question=question, answer=self.answer, answer_id=UUID(self.answer_id))


class StandingChange(_Response):
    """A kind of change since the answer was given."""

    kind: str
    """``unreadable``, ``deleted`` or ``changed`` passages; ``new``: a passage that the answer would be made from."""
    sentences: list[int]
    """Numbers of the sentences concerned, from 1."""


class StandingSummary(_Response):
    """A standing question of the caller's."""

    id: str
    question: str
    stored_at: datetime
    asked_at: datetime
    """When the stored answer was given."""
    state: str
    """``current``, ``invalidated``, or ``erased`` together with a document."""
    changes: list[StandingChange]


class StandingListResponse(_Response):
    standing: list[StandingSummary]


class StandingSentence(_Response):
    n: int
    text: str | None
    """None while a passage behind it is deleted or not readable for the caller."""
    passages: list[int]
    changes: list[str]


class StandingPassage(_Response):
    n: int
    """The number that ``[n]`` in a sentence refers to."""
    chunk_id: str
    document_id: str
    change: str | None


class StandingResponse(StandingSummary):
    """A standing question with its stored answer."""

    model: str | None
    sentences: list[StandingSentence]
    passages: list[StandingPassage]
    new_documents: list[str]
    """Documents with new passages that the caller may read."""


class DifferenceLine(_Response):
    """A sentence of the old or the new answer."""

    change: str
    """``same``, ``removed``, ``added`` or ``withheld``."""
    text: str | None
    """None for a sentence of the old answer that is withheld."""


class StandingAnswerResponse(AnswerResponse):
    """The answer to a standing question that was asked again. It replaces the stored one."""

    difference: list[DifferenceLine]


class SourcesEvent(_Response):
    """The first event of a streamed answer: the passages that it is made from."""

    passages: list[NumberedResult]
    mode: str
    notes: list[str]
    steps: list[Step]


class DeltaEvent(_Response):
    """The next piece of a streamed answer, not checked yet."""

    text: str


class CitationEvent(_Response):
    """The streamed answer has cited passage ``n``."""

    n: int


AnswerEvent = SourcesEvent | DeltaEvent | CitationEvent | AnswerResponse


class DocumentResponse(_Response):
    """A document with its whole text, in reading order."""

    document_id: str
    external_id: str
    source: str
    title: str
    source_url: str | None
    author: str | None
    media_type: str | None
    source_modified_at: datetime | None
    text: str

    def citation(self) -> str:
        """The title and the address in one line for people."""
        return _citation(self)

    def metadata(self) -> dict[str, Any]:
        """The metadata that LlamaIndex stores with the text. Every value can be written as JSON."""
        return {"citation": self.citation(), **_metadata(self)}


class StoryResponse(_Response):
    """The processing history of one document (docs/why.md). Operators see more of it than readers."""

    document: dict[str, Any]
    events: list[dict[str, Any]]
    generations: list[dict[str, Any]]
    access: dict[str, Any]
    dead: list[dict[str, Any]]
    searchable: bool
    reason: str


class FacetsResponse(_Response):
    """Values that occur in documents that the caller may read, the most frequent first."""

    sources: list[str]
    authors: list[str]
    media_types: list[str]
    metadata: dict[str, Facet]
    """Values of the declared keys with their counts, by key."""


class ConflictPlace(_Response):
    """A place at which two passages contradict each other."""

    kind: str
    spans: list[list[int]]
    """Start and end of the place in each of both passages, in characters."""


class ConflictBody(_Response):
    """Two passages that contradict or repeat each other. Lists have two members, one for each passage."""

    id: UUID
    kind: str
    """``number``, ``date``, ``version``, ``unit``, ``name`` or ``negation``: what differs in otherwise equal
    statements; or ``duplicate``; or ``outdated``, an older edition."""
    state: str
    """``open``, ``dismissed`` or ``accepted``."""
    documents: list[UUID]
    passages: list[UUID]
    """Chunk ids."""
    sources: list[str]
    external_ids: list[str]
    titles: list[str]
    source_urls: list[str | None]
    older: int | None
    """The passage whose document is older: 0 or 1. None: not known."""
    places: list[ConflictPlace]
    quotes: list[str] | None
    """The text of the passages around the first place. None: they are changing right now."""
    at: datetime
    """The time of detection."""


class ConflictsResponse(_Response):
    """Passages that contradict or repeat each other, the newest first."""

    conflicts: list[ConflictBody]
    cursor: str | None
    """Where the next page begins; None if this is the last."""


class CallerResponse(_Response):
    """The authenticated caller."""

    tenant: str
    principal: str | None
    key: str | None
    """Name of the API key, if the caller is a service."""
    kind: str
    """``token``, ``key`` or ``development``."""
    caller_class: str = Field(alias="class")
    """``standard`` or ``extended``."""
    operator: bool


class ProposedDocument(BaseModel):
    """A document as it would be published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Relative to the root of the source, with ``/``."""
    content: str | None = None
    """The text. None: the document is deleted."""
    title: str = ""
    """By default that of the document at present."""
    media_type: str = "text/plain"
    external_id: str | None = None
    """The document's id at its source. None: the path decides which document is meant."""


class EditedDocument(_Response):
    """How a document of the edit differs from the index."""

    path: str
    external_id: str
    document_id: str
    state: str
    """``changed``, ``new``, ``deleted``, ``unchanged`` or ``unknown`` (nothing that the caller may read is deleted)."""
    chunks: int
    new: int
    """Chunks that the index lacks."""
    removed: int
    """Chunks that the index would lose."""


class QuotedPassage(_Response):
    """A passage that an answer quotes."""

    document_id: str
    external_id: str
    source: str
    title: str
    source_url: str | None
    excerpt: str
    """The part that it quotes."""


class MovedPassage(_Response):
    """A judged passage that the edit would take away from an answer."""

    source: str
    external_id: str
    anchor: str
    """Words of the passage; empty: any passage of the document."""
    before: int
    """Rank at present, from 1."""
    after: int | None
    """Rank with the edit; None: it is not among the results."""


class PreviewContradiction(_Response):
    """Two statements among the results that say different things."""

    kind: str
    """``number``, ``date``, ``version``, ``unit``, ``name`` or ``negation``."""
    new: QuotedPassage
    """The statement of the edit."""
    other: QuotedPassage
    """The statement of another document."""


class PreviewFinding(_Response):
    """A golden or standing question whose answer would change."""

    question: str
    standing_id: UUID | None
    """The caller's standing question; None: a golden question."""
    kind: str
    """``lost``, ``uncited``, ``contradicts`` or ``changed``."""
    moved: list[MovedPassage]
    before: list[QuotedPassage]
    after: list[QuotedPassage]
    contradictions: list[PreviewContradiction]


class PreviewResponse(_Response):
    """The answers that an edit would change."""

    documents: list[EditedDocument]
    questions: int
    """How many questions were asked."""
    affected: int
    """How many of these the edit may affect."""
    skipped: int
    """How many questions were not asked, because the time was over."""
    embedded: int
    findings: list[PreviewFinding]
    """The worst first."""
    took_ms: float
    fails: bool
    """Whether an answer is lost, loses a citation, or starts to contradict."""


class ReviewResponse(_Response):
    """Answers that a person should review, the newest first."""

    waiting: list[dict[str, Any]]


class PipelineResponse(_Response):
    """The state of the pipeline; its parts, which docs/page.md describes, are in ``model_extra``."""

    at: str
    away: list[str]
    """The parts that could not be read."""


def _citation(document: SearchResult | DocumentResponse, *headings: str) -> str:
    address = document.source_url or f"{document.source}/{document.external_id}"
    below = headings[1:] if headings[:1] == (document.title,) else headings  # many texts begin with their title
    return f"{' › '.join([document.title, *below])} ({address})"


def _metadata(document: SearchResult | DocumentResponse) -> dict[str, Any]:
    modified = document.source_modified_at
    return {
        "url": document.source_url,
        "document_id": document.document_id,
        "title": document.title,
        "source": document.source,
        "external_id": document.external_id,
        "author": document.author,
        "media_type": document.media_type,
        "source_modified_at": modified.isoformat() if modified else None,
    }
