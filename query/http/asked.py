"""What may be asked: the bodies of requests. Any field that is not described is refused: who asks, for which tenant and
with which tags is proved by token or key, and nothing in a body can say it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from query.filters import Filters
from query.material import AnswerMode, Question
from query.model import MAX_QUERY_CHARACTERS, MAX_TOP, Mode


def _sayable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("U+0000 stands in no document")
    return text


def _aware(moment: datetime) -> datetime:
    """A time without a zone is UTC's."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


Name = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_sayable)]
Moment = Annotated[datetime, AfterValidator(_aware)]
Names = Annotated[list[Name], Field(max_length=100)]
Ids = Annotated[list[UUID], Field(max_length=100)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARACTERS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AskedFilters(Body):
    """All that is given must hold; of each list, any one."""

    sources: Names = Field([], description="Names of sources.", examples=[["wiki"]])
    authors: Names = Field([], description="Authors, as the sources name them.")
    media_types: Names = Field([], description="Media types; `text/*` stands for all that begin so.")
    since: Moment | None = Field(None, description="Changed at its source at this time or later.")
    before: Moment | None = Field(None, description="Changed at its source before this time.")
    documents: Ids = Field([], description="Ids of documents.")

    def filters(self) -> Filters:
        return Filters(
            tuple(self.sources), tuple(self.authors), tuple(self.media_types), self.since, self.before,
            tuple(self.documents),
        )  # fmt: skip


class SearchAsked(Body):
    query: Text = Field(description="What to look for, in your own words.", examples=["how do I undo a commit"])
    top: int = Field(10, ge=1, le=MAX_TOP, description="How many passages.")
    mode: Mode = Field("hybrid", description="hybrid asks both stores; vector and keyword ask one.")
    filters: AskedFilters = Field(AskedFilters(), description="What may be found besides.")
    rerank: bool = Field(True, description="Where a reranker is set: whether it has the last word on the order.")


class AnswerAsked(Body):
    question: Text = Field(examples=["Who approves a change to the release branch?"])
    mode: AnswerMode | None = Field(
        None, description="Default: the service decides, and `mode` in the answer says how."
    )
    documents: Ids = Field([], description="Answer from these documents, whole.")
    collection: Name | None = Field(None, description="Answer from this source alone.")
    filters: AskedFilters = Field(AskedFilters(), description="What may be found besides.")
    top: int | None = Field(None, ge=1, le=50, description="Passages that the answer is made from.")
    history: bool = Field(False, description="Whether the caller's own conversation history is read along.")
    stream: bool = Field(False, description="Server-sent events; `Accept: text/event-stream` asks for the same.")

    def asks(self, principal: str | None) -> Question:
        """principal: as it was authenticated."""
        return Question(
            self.question, self.mode, tuple(self.documents), self.collection, self.filters.filters(), self.top,
            principal if self.history else None,
        )  # fmt: skip


class FeedbackAsked(Body):
    answer_id: UUID | None = Field(None, description="The answer that is judged …")
    chunk_id: UUID | None = Field(None, description="… or the passage, with the query that found it.")
    query: Text | None = None
    verdict: Literal["up", "down"]
    note: Annotated[str, Field(max_length=2_000), AfterValidator(_sayable)] | None = None


class ResolutionAsked(Body):
    verdict: Literal["right", "wrong"]
