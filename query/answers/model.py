"""What an answer is, and the events that it comes in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from pipeline.core.errors import PenstockError
from query.model import AnswerMode, Result, Step, result_as_json

NO_INFORMATION = "I don't have information on this."
"""The whole answer when nothing that the caller may read is about the question. The model is told to say this."""

Reason = Literal["unsupported", "uncited", "bad_citation", "active_content"]
"""Why an answer stands in the review queue: a sentence that its passages do not support, too few citations, a number
that no passage has, an image, link or markup that was taken out."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A passage that the answer was made from. ``n`` is what ``[n]`` in the answer points to: from 1, the best first;
    of whole documents, in reading order."""

    n: int
    result: Result
    text: str
    """What the model was shown of it: visible text, perhaps cut."""
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the model's server counts them."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """Markdown without images, links only to the passages' sources; ``[n]`` only where passage n exists."""
    cited: Sequence[Numbered]
    """In the order of their numbers."""
    mode: AnswerMode
    steps: Sequence[Step]
    grounded: bool
    """Every claim is supported by passages it cites. True also where nothing is claimed: quotations, and
    NO_INFORMATION."""
    relevant: bool
    """False: nothing that was read is about the question."""
    answer_id: UUID
    notes: Sequence[str] = ()
    model: str | None = None
    """None: no model wrote this; the text is made of quotations."""
    degraded: bool = False
    """A model is configured, and failed: the text is made of quotations."""
    unsupported: Sequence[str] = ()
    """Sentences of the text that the passages they cite do not say."""
    support: float = 1.0
    """Share of the claims that are supported."""
    density: float = 1.0
    """Share of the claims that carry a citation of their own."""
    reasons: Sequence[Reason] = ()
    review: bool = False
    """It was put into the review queue."""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Sources:
    """The first event: what the answer will be made from."""

    passages: Sequence[Numbered]
    mode: AnswerMode
    notes: Sequence[str]
    steps: Sequence[Step]
    behind: Collection[UUID] = ()
    """Documents that the history was made of which is read along: shown to nobody as passages."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer as it is being written; ``Done`` has the answer that counts."""

    text: str


@dataclass(frozen=True, slots=True)
class Cited:
    """The answer has just cited passage n for the first time."""

    n: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last event."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The only event, or the last one: there is no answer. BadQuery, Retryable or Misconfigured."""

    error: PenstockError


Event = Sources | Delta | Cited | Done | Failed


def sources_json(event: Sources) -> dict[str, Any]:
    return {
        "passages": [{"n": p.n, **result_as_json(p.result), "text": p.text} for p in event.passages],
        "mode": event.mode,
        "notes": list(event.notes),
        "steps": steps_json(event.steps),
    }


def passage_json(passage: Numbered) -> dict[str, Any]:
    """A citation: the contract's fields, and where the passage stands."""
    place = passage.result.passage
    return {
        "n": passage.n,
        "chunk_id": str(place.chunk_id),
        "document_id": str(place.document_id),
        "external_id": place.external_id,
        "source": place.source,
        "title": place.title,
        "source_url": place.source_url,
        "chunk_index": place.chunk_index,
        "text": passage.text,
    }


def answer_json(answer: Answer) -> dict[str, Any]:
    """The plain answer of the HTTP interface and of ``penstock ask --json``."""
    return {
        "answer": answer.text,
        "citations": [passage_json(passage) for passage in answer.cited],
        "steps": steps_json(answer.steps),
        "grounded": answer.grounded,
        "mode": answer.mode,
        "notes": list(answer.notes),
        "relevant": answer.relevant,
        "model": answer.model,
        "degraded": answer.degraded,
        "unsupported": list(answer.unsupported),
        "support": round(answer.support, 3),
        "density": round(answer.density, 3),
        "review": answer.review,
        "answer_id": str(answer.answer_id),
    }


def steps_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [{"step": step.name, "took_ms": step.took_ms, **step.facts} for step in steps]
