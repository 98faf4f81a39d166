"""Answers, and the events of a streamed answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from pipeline.core.errors import PenstockError
from query.model import AnswerMode, AtLeast, Result, SourceFreshness, Step, result_as_json

NO_INFORMATION = "I don't have information on this."
"""The whole answer if nothing that the caller may read is relevant. The prompt tells the model to use it."""

Reason = Literal["unsupported", "uncited", "bad_citation", "active_content"]
"""Why an answer is in the review queue: sentences that its passages do not support, too few citations, a citation of a
passage that does not exist, or removed images, links or markup."""


@dataclass(frozen=True, slots=True)
class NumberedPassage:
    """A passage that the answer is made from. ``[n]`` in the answer refers to its ``n``: from 1, the best first, or in
    reading order for whole documents."""

    n: int
    result: Result
    text: str
    """The text that the model read: visible text, possibly cut."""
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request, as the model's server counts them."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """Markdown without images, with links only to the passages' sources and ``[n]`` only if passage n exists."""
    cited: Sequence[NumberedPassage]
    """The cited passages, in the order of their numbers."""
    mode: AnswerMode
    steps: Sequence[Step]
    grounded: bool
    """Whether every claim is supported by the passages that it cites. Also true without claims: for quotations and
    NO_INFORMATION."""
    relevant: bool
    """False: no passage is relevant to the question."""
    answer_id: UUID
    notes: Sequence[str] = ()
    model: str | None = None
    """None: the text consists of quotations."""
    degraded: bool = False
    """Whether the text consists of quotations because the configured model failed."""
    unsupported: Sequence[str] = ()
    """Sentences of the text that the cited passages do not support."""
    support: float = 1.0
    """The share of claims that are supported."""
    density: float = 1.0
    """The share of claims that have a citation of their own."""
    reasons: Sequence[Reason] = ()
    review: bool = False
    """True if it is in the review queue."""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Sources:
    """The first event: the passages that the answer is made from."""

    passages: Sequence[NumberedPassage]
    mode: AnswerMode
    notes: Sequence[str]
    steps: Sequence[Step]
    history_documents: Collection[UUID] = ()
    """The documents that the included history and earlier answers of the conversation were made from; they are not
    among the passages."""
    is_full: bool = True
    """Whether a further passage would take the place of one of these."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer while it is written; the answer in ``Done`` replaces all pieces."""

    text: str


@dataclass(frozen=True, slots=True)
class Cited:
    """The answer cites passage n for the first time."""

    n: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last event, with the checked answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event if there is no answer. The error is BadQuery, Retryable or Misconfigured."""

    error: PenstockError


Event = Sources | Delta | Cited | Done | Failed


def sources_json(event: Sources) -> dict[str, Any]:
    return {
        "passages": [{"n": p.n, **result_as_json(p.result), "text": p.text} for p in event.passages],
        "mode": event.mode,
        "notes": list(event.notes),
        "steps": steps_json(event.steps),
    }


def passage_json(passage: NumberedPassage) -> dict[str, Any]:
    """A citation, with the document and the position of its passage."""
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
    """The response of /v1/answers and of ``penstock ask --json``."""
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


def consistent_json(answer: Answer, seen: AtLeast | None, fresh: Sequence[SourceFreshness]) -> dict[str, Any]:
    """An answer's JSON with what became of the changes that the request waited for, and with certificates from before
    its material was gathered."""
    notes = [seen.reason] if seen is not None and not seen.applied else []
    return answer_json(answer) | {
        "notes": [*answer.notes, *notes],
        "at_least": seen and seen.as_json(),
        "freshness": [source.as_json() for source in fresh],
    }
