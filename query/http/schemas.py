"""Request and response bodies. OpenAPI and the validation of requests follow from these models.

A field that is not described here is refused: the caller, its tenant and its tags come from a token or an API key, and
nothing in a body can change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from pipeline.core.conflicts import Kind
from pipeline.core.metadata_keys import MAX_VALUE_CHARACTERS, KeyFilter, KeyType, key_filter
from pipeline.core.publication import (
    DEFAULT_WAIT_SECONDS,
    MAX_TOKEN_CHARACTERS,
    MAX_WAIT_SECONDS,
    Publication,
    check,
    publications_of,
)
from query.access.facets import MAX_FACETS
from query.access.filters import MAX_KEYS, Filters
from query.model import MAX_QUERY_CHARACTERS, MAX_TOP, AnswerMode, BadQuery, CallerClass, Lag, Mode, Ranker, Sort
from query.modes import material
from query.modes.material import MAX_ANSWER_CHARACTERS, MAX_TURNS, Question
from query.preview import model as preview
from query.retrieval.cursor import MAX_CHARACTERS


def _without_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("text must not contain U+0000")
    return text


def _with_time_zone(time: datetime) -> datetime:
    """A time without a zone is read as UTC."""
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_without_nul)]
Storable = Annotated[str, AfterValidator(_without_nul)]
"""A text that Postgres takes."""
Time = Annotated[datetime, AfterValidator(_with_time_zone)]
Names = Annotated[list[Name], Field(max_length=100)]
Ids = Annotated[list[UUID], Field(max_length=100)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARACTERS)]
WrittenTime = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""A time of a response, as it is written in JSON."""

# Requests


MAX_UNKNOWN_FIELDS = 20
"""With more, a request is refused without naming each: a body of 1 MB can have a hundred thousand, and describing them
takes a second, in which nobody is answered."""


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, body: object) -> object:
        if isinstance(body, dict) and len(body) > len(cls.model_fields) + MAX_UNKNOWN_FIELDS:
            raise ValueError("has too many unknown fields")
        return body


KeyText = Annotated[str, Field(min_length=1, max_length=MAX_VALUE_CHARACTERS), AfterValidator(_without_nul)]
KeyValue = bool | int | float | KeyText
KeyValues = Annotated[list[KeyValue], Field(max_length=100, fail_fast=True)]
KeyBound = int | float | KeyText


class KeyConditions(RequestBody):
    """Conditions on the values of one key of metadata, which must all hold."""

    any: KeyValues = Field([], description="The document has at least one of these values.")
    all: KeyValues = Field([], description="The document has every one of these values.")
    none: KeyValues = Field([], description="The document has none of these values, or not the key at all.")
    gte: KeyBound | None = Field(None, description="A value is at least this number, date or text.")
    gt: KeyBound | None = Field(None, description="A value is greater than this number, date or text.")
    lte: KeyBound | None = Field(None, description="A value is at most this number, date or text.")
    lt: KeyBound | None = Field(None, description="A value is less than this number, date or text.")


KeyCondition = KeyValue | KeyValues | KeyConditions


def _has_few_keys(metadata: object) -> object:
    """Before any value is looked at: each of very many would be described with all its mistakes."""
    if isinstance(metadata, dict) and len(metadata) > MAX_KEYS:
        raise ValueError(f"has {len(metadata)} keys; the maximum is {MAX_KEYS}")
    return metadata


Metadata = Annotated[dict[str, KeyCondition], Field(max_length=MAX_KEYS), BeforeValidator(_has_few_keys)]


def key_filters(metadata: Mapping[str, KeyCondition]) -> tuple[KeyFilter, ...]:
    """The filters by declared keys. Raises BadQuery."""
    try:
        return tuple(_key_filter(name, condition) for name, condition in metadata.items())
    except ValueError as error:
        raise BadQuery(str(error)) from error


def _key_filter(name: str, condition: KeyCondition) -> KeyFilter:
    if isinstance(condition, list):
        return key_filter(name, any=condition)
    if not isinstance(condition, KeyConditions):
        return key_filter(name, any=[condition])
    sides = {"gte": condition.gte, "gt": condition.gt, "lte": condition.lte, "lt": condition.lt}
    bounds = {side: bound for side, bound in sides.items() if bound is not None}
    return key_filter(name, any=condition.any, all=condition.all, none=condition.none, **bounds)


class SearchFilters(RequestBody):
    """A document must match every filter that is set, and any one value of a list."""

    sources: Names = Field([], description="Names of sources.", examples=[["wiki"]])
    authors: Names = Field([], description="Authors, as the sources name them.")
    media_types: Names = Field([], description="Media types; `text/*` matches every type that starts with `text/`.")
    since: Time | None = Field(None, description="Changed at its source at or after this time.")
    before: Time | None = Field(None, description="Changed at its source before this time.")
    documents: Ids = Field([], description="Ids of documents.")
    metadata: Metadata = Field(
        {},
        description="Conditions on declared keys of metadata, by key: a value, a list of values of which any matches,"
        " or an object of conditions.",
        examples=[{"labels": ["policy", "2026"], "priority": {"gte": 2}}],
    )

    def filters(self) -> Filters:
        return Filters(
            tuple(self.sources),
            tuple(self.authors),
            tuple(self.media_types),
            self.since,
            self.before,
            tuple(self.documents),
            key_filters(self.metadata),
        )


class PublicationRequest(RequestBody):
    """The part of a request that waits for published changes."""

    at_least: Annotated[str, Field(min_length=1, max_length=MAX_TOKEN_CHARACTERS)] | None = Field(
        None,
        description="The token of a publication: wait until the caller can see its changes.",
    )
    wait_seconds: float = Field(
        DEFAULT_WAIT_SECONDS, ge=0, le=MAX_WAIT_SECONDS, description="How long to wait for the changes of `at_least`."
    )

    @field_validator("at_least")
    @classmethod
    def _is_a_token(cls, token: str | None) -> str | None:
        if token is not None:
            check(token)
        return token

    def publications(self, header: str | None) -> tuple[Publication, ...]:
        """The changes to wait for. header: the value of ``X-Penstock-At-Least``. Raises BadQuery."""
        try:
            return publications_of(self.at_least or header or "1.")
        except ValueError as error:
            raise BadQuery(f"X-Penstock-At-Least {error}") from error


class SearchRequest(PublicationRequest):
    query: Text = Field(description="Search text in natural language.", examples=["how do I undo a commit"])
    top: int = Field(10, ge=1, le=MAX_TOP, description="Maximum number of passages to return.")
    mode: Mode = Field("hybrid", description="`hybrid` searches both stores; `vector` and `keyword` search one.")
    filters: SearchFilters = Field(SearchFilters(), description="Restricts the documents that are searched.")
    rerank: bool = Field(True, description="Whether to rerank the results, if a reranker is configured.")
    sort: Sort = Field(
        "relevance",
        description="`newest` and `oldest` return the passages that have most of the query's words by the time of their"
        " document. They need keyword search.",
    )
    cursor: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None = Field(
        None, description="The `cursor` of the previous response, for the next page of the same search."
    )
    facets: Annotated[list[Name], Field(max_length=MAX_FACETS)] = Field(
        [], description="Declared keys whose values are counted, over the documents that match the filters."
    )


class Turn(RequestBody):
    """An earlier question of the conversation, with its answer."""

    question: Text
    answer: Annotated[str, Field(max_length=MAX_ANSWER_CHARACTERS)] = ""
    answer_id: UUID | None = Field(
        None,
        description="The answer's id, if the service gave it. The answer is then used only while the caller may read"
        " all documents that it was made from.",
    )


class AnswerRequest(PublicationRequest):
    question: Text = Field(examples=["Who approves a change to the release branch?"])
    mode: AnswerMode | None = Field(
        None, description="Answer mode. By default the service chooses one and returns it as `mode`."
    )
    documents: Ids = Field([], description="Answer from these whole documents.")
    collection: Name | None = Field(None, description="Answer from this source only.")
    filters: SearchFilters = Field(SearchFilters(), description="Restricts the documents that are searched.")
    top: int | None = Field(None, ge=1, le=50, description="Number of passages to answer from.")
    history: bool = Field(False, description="Whether to include the caller's own conversation history.")
    turns: Annotated[list[Turn], Field(max_length=MAX_TURNS)] = Field(
        [],
        description="The conversation so far, in its order. A question that refers to it is completed before documents"
        " are searched; the step `follow_up` shows how.",
    )
    keep: bool = Field(
        False,
        description="Keep the answer as a standing question: its changes are reported (see /v1/standing).",
    )
    stream: bool = Field(False, description="Stream server-sent events, as with `Accept: text/event-stream`.")

    def to_question(self, principal: str | None) -> Question:
        """principal: the authenticated caller, whose history is included if the request asks for it."""
        return Question(
            self.question,
            self.mode,
            tuple(self.documents),
            self.collection,
            self.filters.filters(),
            self.top,
            tuple(material.Turn(turn.question, turn.answer, turn.answer_id) for turn in self.turns),
            principal if self.history else None,
        )


class FeedbackRequest(RequestBody):
    answer_id: UUID | None = Field(None, description="The answer to rate. Exclusive with `chunk_id`.")
    chunk_id: UUID | None = Field(None, description="The passage to rate, together with the `query` that returned it.")
    query: Text | None = None
    verdict: Literal["up", "down"]
    note: Annotated[str, Field(max_length=2_000), AfterValidator(_without_nul)] | None = None


class ProposedDocument(RequestBody):
    """A document as it would be published."""

    path: Name = Field(
        description="Path relative to the root of the source, with `/`. It decides which document is meant, unless"
        " `external_id` does.",
        examples=["guide/leave.md"],
    )
    content: str | None = Field(None, description="The text. Null: the document is deleted.")
    title: Annotated[str, Field(max_length=4_000), AfterValidator(_without_nul)] = Field(
        "", description="By default that of the document at present."
    )
    media_type: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_without_nul)] = "text/plain"
    external_id: Annotated[str, Field(min_length=1, max_length=2_000), AfterValidator(_without_nul)] | None = Field(
        None, description="The document's id at its source."
    )

    def proposed(self) -> preview.ProposedDocument:
        return preview.ProposedDocument(self.path, self.content, self.title, self.media_type, self.external_id)


class PreviewRequest(RequestBody):
    """A proposed edit of a source."""

    source: Name = Field(examples=["handbook"])
    documents: Annotated[list[ProposedDocument], Field(max_length=preview.MAX_DOCUMENTS)] = Field(
        description="The changed, new and deleted documents. Unchanged ones cost nothing."
    )
    folders: Names = Field(
        [],
        description="Folders, by path or by external id, that `documents` lists completely: other documents below them"
        " are deleted.",
    )

    def edit(self) -> preview.Edit:
        return preview.Edit(self.source, [document.proposed() for document in self.documents], self.folders)


class ResolutionRequest(RequestBody):
    verdict: Literal["right", "wrong"]


class ConflictDecisionRequest(RequestBody):
    decision: Literal["dismissed", "accepted", "open"] = Field(
        description="dismissed: it is none, or nobody minds; accepted: it has to be resolved; open: neither any more."
    )


# Responses


class ResponseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FieldError(ResponseBody):
    pointer: str = Field(description="JSON pointer into the request (RFC 6901).", examples=["/filters/since"])
    detail: str


class ProblemResponse(ResponseBody):
    """An error (RFC 9457). `type` is `urn:penstock:problem:KIND`; docs/http.md lists the kinds."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []


class Step(BaseModel):
    """One step of the search or answer, with its duration and further facts."""

    model_config = ConfigDict(extra="allow")

    step: str
    took_ms: float


class ChunkReference(ResponseBody):
    """A chunk and the document that it belongs to."""

    chunk_id: str
    document_id: str
    external_id: str = Field(description="The document's id at its source.")
    source: str
    title: str
    source_url: str | None


class SearchResult(ChunkReference):
    chunk_index: int = Field(description="Position of the best chunk in the document, from 0.")
    text: str
    score: float = Field(description="Comparable within one response only.")
    stores: list[Ranker]
    ranks: dict[Ranker, int] = Field(description="Rank by store, from 1. A store that did not return it is absent.")
    rerank_score: float | None
    chunk_ids: list[str] = Field(description="Adjacent chunks that were merged into this passage.")
    also: list[ChunkReference] = Field(description="Other documents that contain the same text.")
    author: str | None
    media_type: str | None
    source_modified_at: WrittenTime | None
    headings: list[str] = Field(description="Headings above the best chunk, outermost first.")


class AtLeastResponse(ResponseBody):
    """The outcome of the changes that the request named in `at_least`."""

    applied: bool = Field(description="Whether the caller can see all of them in both stores.")
    changes: int
    pending: int = Field(description="Changes that are not in both stores yet, or that the caller may not read.")
    waited_ms: float


class SourceFreshness(ResponseBody):
    """The freshness certificate of a source: what the caller can rely on."""

    source: str
    complete_until: WrittenTime | None = Field(
        description="Every change made at the source before this time is in both stores. Null: not known."
    )
    access_until: WrittenTime | None = Field(
        description="Every change of access rights and groups made there before this time is applied. Null: not known."
    )
    lags: list[Lag] = Field(
        description="Why it is not complete up to now: `stores`, what was read last is not in both stores yet;"
        " `source`, it was not read completely for longer than it should be; `unlisted`, no connector has ever listed"
        " it, so that nobody knows when it is complete: wait for what was published with `at_least`."
    )
    has_gaps: bool = Field(description="Whether documents that could not be read are left out.")


Freshness = Annotated[
    list[SourceFreshness], Field(description="For each searched source of which the caller can read a document.")
]


class SearchResponse(ResponseBody):
    results: list[SearchResult]
    steps: list[Step]
    took_ms: float
    relevant: bool = Field(description="False if no passage is relevant to the query; `results` is then empty.")
    degraded: list[str] = Field(description="Reasons why this response is incomplete, one for each failed part.")
    cursor: str | None = Field(description="Where the next page begins; null if this is the last.")
    facets: dict[str, Facet] = Field(description="The facets that were requested, by key.")
    at_least: AtLeastResponse | None = Field(description="Null if the request named no publication.")
    freshness: Freshness


class FacetValue(ResponseBody):
    value: bool | int | float | str
    count: int = Field(description="Number of documents that the caller may read and that match.")


class Facet(ResponseBody):
    type: KeyType
    values: list[FacetValue] = Field(description="The most frequent first, at most 50.")
    complete: bool = Field(description="False if so many documents match that a part of them was counted.")


class Citation(ChunkReference):
    n: int = Field(description="The number that `[n]` in the answer refers to.")
    chunk_index: int
    text: str


class AnswerResponse(BaseModel):
    model_config = ConfigDict(extra="allow")

    answer: str
    citations: list[Citation]
    steps: list[Step]
    grounded: bool = Field(description="Whether every claim is supported by the passages that it cites.")
    mode: AnswerMode
    notes: list[str] = Field(description="What is missing: passages left out, failed parts, texts not yet embedded.")
    relevant: bool
    model: str | None = Field(description="Null if no chat model is configured; the answer then consists of quotes.")
    unsupported: list[str] = Field(description="Sentences that the cited passages do not support.")
    review: bool
    answer_id: str
    standing_id: str | None = Field(None, description="The id of the standing question, if the answer was kept.")
    at_least: AtLeastResponse | None = Field(None, description="Null if the request named no publication.")
    freshness: Freshness = []


ChangeKind = Literal["unreadable", "deleted", "changed", "new"]


class StandingChange(ResponseBody):
    kind: ChangeKind = Field(
        description="What became of passages: `unreadable` for the caller, `deleted`, `changed`; or `new`: a passage"
        " that would be among those that the answer is made from."
    )
    sentences: list[int] = Field(description="Numbers of the sentences concerned, from 1.")


class StandingSummary(ResponseBody):
    id: str
    question: str
    stored_at: datetime
    asked_at: datetime = Field(description="When the stored answer was given.")
    state: Literal["current", "invalidated", "erased"]
    changes: list[StandingChange] = Field(description="What happened since `asked_at`; empty while it is current.")


class StandingListResponse(ResponseBody):
    standing: list[StandingSummary] = Field(description="The caller's own, the newest first.")


class StandingSentence(ResponseBody):
    n: int
    text: str | None = Field(description="Null while a passage behind it is deleted or not readable for the caller.")
    passages: list[int] = Field(description="Numbers of the passages behind it.")
    changes: list[ChangeKind]


class StandingPassage(ResponseBody):
    n: int = Field(description="The number that `[n]` in a sentence refers to.")
    chunk_id: str
    document_id: str
    change: ChangeKind | None


class StandingResponse(StandingSummary):
    model: str | None
    sentences: list[StandingSentence]
    passages: list[StandingPassage]
    new_documents: list[str] = Field(description="Documents with new passages that the caller may read.")


class DifferenceLine(ResponseBody):
    """A sentence of the old or the new answer."""

    change: Literal["same", "removed", "added", "withheld"]
    text: str | None = Field(description="Null for a sentence of the old answer that is withheld.")


class StandingAnswerResponse(AnswerResponse):
    """The answer to a standing question that was asked again. It replaces the stored one."""

    difference: list[DifferenceLine] = Field(description="The old answer and the new one, sentence by sentence.")


class NumberedResult(SearchResult):
    n: int = Field(description="The number that `[n]` in the answer refers to.")


class SourcesEvent(ResponseBody):
    """The first event of a streamed answer: the passages that it is made from."""

    passages: list[NumberedResult]
    mode: AnswerMode
    notes: list[str]
    steps: list[Step]


class DeltaEvent(ResponseBody):
    """The next piece of a streamed answer, not checked yet."""

    text: str


class CitationEvent(ResponseBody):
    """The streamed answer has cited a passage."""

    n: int


ANSWER_EVENT = "AnswerEvent"
"""The name of the schema of any server-sent event of /v1/answers."""
STREAM_EVENTS: Mapping[str, type[BaseModel]] = {
    "sources": SourcesEvent,
    "delta": DeltaEvent,
    "citation": CitationEvent,
    "done": AnswerResponse,
    "error": ProblemResponse,
}
"""The data of each server-sent event of /v1/answers, by the event's name."""


class DocumentResponse(ResponseBody):
    document_id: str
    external_id: str
    source: str
    title: str
    source_url: str | None
    author: str | None
    media_type: str | None
    source_modified_at: WrittenTime | None
    text: str = Field(description="The whole normalised text, in reading order.")


class StoryResponse(BaseModel):
    """The processing history of one document. Operators see more details than readers."""

    model_config = ConfigDict(extra="allow")

    document: dict[str, Any]
    events: list[dict[str, Any]]
    generations: list[dict[str, Any]]
    access: dict[str, Any]
    dead: list[dict[str, Any]]
    searchable: bool
    reason: str


class CallerResponse(ResponseBody):
    tenant: str
    principal: str | None
    key: str | None = Field(description="Name of the service, if the caller is one or asks on behalf of a person.")
    kind: Literal["token", "key", "delegated", "development"]
    caller_class: CallerClass = Field(serialization_alias="class")  # "class" is a keyword in Python
    operator: bool


class FacetsResponse(ResponseBody):
    """Values that occur in documents that the caller may read, the most frequent first."""

    sources: list[str]
    authors: list[str]
    media_types: list[str]
    metadata: dict[str, Facet] = Field(description="Values of the declared keys with their counts, by key.")


class EditedDocument(ResponseBody):
    """How a document of the edit differs from the index."""

    path: str
    external_id: str
    document_id: str
    state: preview.State = Field(
        description="`unknown`: it is deleted, and there is no such document that the caller may read."
    )
    chunks: int
    new: int = Field(description="Chunks that the index lacks.")
    removed: int = Field(description="Chunks that the index would lose.")


class QuotedPassage(ResponseBody):
    document_id: str
    external_id: str
    source: str
    title: str
    source_url: str | None
    excerpt: str = Field(description="The part that the answer quotes.")


class MovedPassage(ResponseBody):
    """A judged passage that the edit would take away from an answer."""

    source: str
    external_id: str
    anchor: str = Field(description="Words of the passage; empty: any passage of the document.")
    before: int = Field(description="Rank at present, from 1.")
    after: int | None = Field(description="Rank with the edit; null: it is not among the results.")


class PreviewContradiction(ResponseBody):
    """Two statements among the results that say different things."""

    kind: str = Field(
        description="The difference: a `number`, `date`, `version`, `unit`, `name` or `negation`.", examples=["number"]
    )
    new: QuotedPassage = Field(description="The statement of the edit.")
    other: QuotedPassage = Field(description="The statement of another document.")


class PreviewFinding(ResponseBody):
    """A golden or standing question whose answer would change."""

    question: str
    standing_id: UUID | None = Field(
        description="Id of the caller's standing question, whose judged passages are the documents that its answer"
        " cites; null: a golden question."
    )
    kind: preview.Kind = Field(
        description="`lost`: a judged passage, or the whole answer, is not among the results any more. `uncited`: a"
        " judged passage is still a result, but is not quoted any more. `contradicts`: among the results, a statement"
        " of the edit contradicts another document. `changed`: the answer quotes other text."
    )
    moved: list[MovedPassage]
    before: list[QuotedPassage] = Field(description="The passages that the answer quotes at present.")
    after: list[QuotedPassage] = Field(description="The passages that it would quote.")
    contradictions: list[PreviewContradiction]


class PreviewResponse(ResponseBody):
    documents: list[EditedDocument]
    questions: int = Field(description="Number of questions that were asked.")
    affected: int = Field(description="Number of these that the edit may affect.")
    skipped: int = Field(description="Number of questions that were not asked, because the time was over.")
    embedded: int = Field(description="Number of texts that were embedded.")
    findings: list[PreviewFinding] = Field(description="The worst first.")
    took_ms: float
    fails: bool = Field(description="Whether an answer is lost, loses a citation, or starts to contradict.")


class ReviewResponse(ResponseBody):
    waiting: list[dict[str, Any]]


class ConflictPlace(ResponseBody):
    kind: Kind
    spans: list[list[int]] = Field(description="Start and end of the place in each of both passages, in characters.")


class ConflictBody(ResponseBody):
    """Two passages that contradict or repeat each other. Lists have two members, one for each passage."""

    id: UUID
    kind: Kind = Field(
        description="What differs in otherwise equal statements; or `duplicate`; or `outdated`, an older edition."
    )
    state: Literal["open", "dismissed", "accepted"]
    documents: list[UUID]
    passages: list[UUID] = Field(description="Chunk ids.")
    sources: list[str]
    external_ids: list[str]
    titles: list[str]
    source_urls: list[str | None]
    older: int | None = Field(description="The passage whose document is older: 0 or 1. Null: not known.")
    places: list[ConflictPlace]
    quotes: list[str] | None = Field(description="What the passages say there. Null: they are changing right now.")
    at: datetime = Field(description="When it was detected.")


class ConflictsResponse(ResponseBody):
    conflicts: list[ConflictBody]
    cursor: str | None = Field(description="Where the next page begins; null if this is the last.")


class PipelineResponse(BaseModel):
    """docs/page.md describes the parts. A part that cannot be read is null and listed in `away`."""

    model_config = ConfigDict(extra="allow")

    at: str
    away: list[str]
