"""Standing questions, their sentences, and the difference between two answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import SequenceMatcher
from typing import Any, Literal
from uuid import UUID

from pydantic import TypeAdapter

from pipeline.core.sentences import sentences
from query.access.filters import Filters
from query.answers.model import Answer, NumberedPassage
from query.answers.support import cites, claims_of
from query.modes.material import Question

Kind = Literal["changed", "deleted", "unreadable", "new"]
"""A change that invalidates an answer: a passage's text was changed, its document was deleted, the asker may no longer
read it, or a new passage would be among those that the answer is made from."""
LOST: tuple[Kind, ...] = ("deleted", "unreadable")
"""Kinds after which the sentences made from a passage are withheld."""
KINDS: tuple[Kind, ...] = ("unreadable", "deleted", "changed", "new")
"""All kinds, the most serious first."""

MAX_BEHIND = 20_000
"""The most passages behind the sentences of an answer, counted for each sentence. All of them are read to list a
person's questions: three hundred sentences without a citation, in an answer from two thousand passages, would be
700,000 numbers, of each of a hundred questions."""

_SPACES = re.compile(r"\s+")
_CITATION = re.compile(r"\s*\[\d+\]")
_FILTERS = TypeAdapter(Filters)


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    cites: tuple[int, ...]
    """The passages behind it. All of the answer's, where nothing says which: it cites none, or those that it cites do
    not support it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk behind an answer."""

    n: int
    chunk_id: UUID
    document_id: UUID
    change: Kind | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A standing question with the state of its answer, and without its sentences and passages."""

    id: UUID
    question: str
    stored_at: datetime
    asked_at: datetime
    erased: bool
    """Whether the answer was erased together with a document that it was made from."""
    changes: Mapping[Kind, Sequence[int]]
    """The kinds of change, each with the numbers of the sentences concerned, from 1."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A standing question with the state of its answer. The sentences are those that its reader may see."""

    id: UUID
    question: str
    stored_at: datetime
    asked_at: datetime
    model: str | None
    sentences: Sequence[Sentence | None]
    """None: withheld, because a passage behind it was deleted or may no longer be read."""
    erased: bool
    """Whether the answer was erased together with a document that it was made from."""
    sources: Sequence[Source]
    entered: Sequence[UUID] = ()
    """Documents with a new passage that would be in the context, which the reader may read now."""
    behind: Sequence[tuple[int, ...]] = ()
    """The passages behind each sentence, withheld or not."""

    @property
    def changes(self) -> dict[Kind, list[int]]:
        """See ``changes_of``."""
        return changes_of(self.behind, by_kind(self.sources), has_entered=bool(self.entered))

    @property
    def summary(self) -> Summary:
        return Summary(self.id, self.question, self.stored_at, self.asked_at, self.erased, self.changes)

    @property
    def shown_documents(self) -> list[UUID]:
        """The documents that the shown sentences were made from, each once."""
        return list(dict.fromkeys(source.document_id for source in self.sources if source.change not in LOST))


def changes_of(
    behind: Sequence[Sequence[int]], changed: Mapping[Kind, set[int]], *, has_entered: bool
) -> dict[Kind, list[int]]:
    """The kinds of change, the most serious first, each with the numbers of the sentences concerned, from 1.

    behind: the numbers of the passages behind each sentence. changed: those of the changed passages. has_entered:
    whether there is a new passage, which concerns all sentences."""
    results = {kind: affected(behind, passages) for kind, passages in changed.items()}
    if has_entered:
        results["new"] = list(range(1, len(behind) + 1))
    return {kind: results[kind] for kind in KINDS if kind in results}


def by_kind(sources: Iterable[Source]) -> dict[Kind, set[int]]:
    """The numbers of the passages with each kind of change."""
    numbers: dict[Kind, set[int]] = {}
    for source in sources:
        if source.change is not None:
            numbers.setdefault(source.change, set()).add(source.n)
    return numbers


def affected(behind: Sequence[Sequence[int]], passages: set[int]) -> list[int]:
    """The numbers, from 1, of the sentences that one of these passages is behind."""
    return [number for number, cited in enumerate(behind, 1) if not passages.isdisjoint(cited)]


def sentences_of(answer: Answer, passages: Sequence[NumberedPassage]) -> list[Sentence]:
    """The sentences of an answer with the passages behind each. passages: all that the model read. An answer with more
    than MAX_BEHIND of these is one sentence, with everything behind it."""
    everything = tuple(sorted(passage.n for passage in passages))
    unsupported = set(answer.unsupported)
    results = []
    for paragraph in re.split(r"\n\s*\n", answer.text):
        around = cites(paragraph)
        for text in sentences(paragraph):
            cited = cites(text) or around
            unclear = any(claim.text in unsupported for claim in claims_of(text))
            results.append(Sentence(text, cited if cited and not unclear else everything))
    if sum(len(sentence.cites) for sentence in results) > MAX_BEHIND:
        return [Sentence(answer.text, everything)]
    return results


def readable(sentence: Sentence, lost: set[int]) -> Sentence | None:
    """The sentence while none of the passages behind it is lost."""
    return None if lost & set(sentence.cites) else sentence


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the difference between two answers."""

    change: Literal["same", "removed", "added", "withheld"]
    text: str | None
    """None: a sentence of the old answer is withheld."""


def difference(before: Sequence[Sentence | None], after: Sequence[Sentence]) -> list[Line]:
    """The difference, sentence by sentence. Citations and white space do not count: their numbers are each answer's."""
    old = ["\0" if sentence is None else _plain(sentence.text) for sentence in before]
    new = [_plain(sentence.text) for sentence in after]
    lines = []
    for _, a, until_a, b, until_b in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if old[a:until_a] == new[b:until_b]:
            lines += [Line("same", sentence.text) for sentence in after[b:until_b]]
            continue
        lines += [Line("withheld", None) if s is None else Line("removed", s.text) for s in before[a:until_a]]
        lines += [Line("added", sentence.text) for sentence in after[b:until_b]]
    return lines


def _plain(text: str) -> str:
    return _SPACES.sub(" ", _CITATION.sub("", text)).strip()


def request_json(question: Question) -> dict[str, Any]:
    """How a question is to be asked again, besides its text."""
    return {
        "mode": question.mode,
        "documents": [str(id_) for id_ in question.documents],
        "collection": question.collection,
        "top": question.top,
        "filters": _FILTERS.dump_python(question.filters, mode="json"),
    }


def question_of(text: str, request: Mapping[str, Any]) -> Question:
    """The question again. Raises pydantic.ValidationError and KeyError for a request of another form."""
    return Question(
        text,
        request["mode"],
        tuple(UUID(id_) for id_ in request["documents"]),
        request["collection"],
        _FILTERS.validate_python(request["filters"]),
        request["top"],
    )


def summary_json(summary: Summary) -> dict[str, Any]:
    """A standing question for a list."""
    return {
        "id": str(summary.id),
        "question": summary.question,
        "stored_at": summary.stored_at.isoformat(),
        "asked_at": summary.asked_at.isoformat(),
        "state": "erased" if summary.erased else "invalidated" if summary.changes else "current",
        "changes": [{"kind": kind, "sentences": list(numbers)} for kind, numbers in summary.changes.items()],
    }


def as_json(standing: Standing) -> dict[str, Any]:
    """A standing question for a response, with its sentences and passages."""
    summary = standing.summary
    changes = summary.changes
    return summary_json(summary) | {
        "model": standing.model,
        "sentences": [
            {
                "n": number,
                "text": sentence and sentence.text,
                "passages": list(behind),
                "changes": [kind for kind, numbers in changes.items() if number in numbers],
            }
            for number, (sentence, behind) in enumerate(zip(standing.sentences, standing.behind, strict=True), 1)
        ],
        "passages": [
            {
                "n": source.n,
                "chunk_id": str(source.chunk_id),
                "document_id": str(source.document_id),
                "change": source.change,
            }
            for source in standing.sources
        ],
        "new_documents": [str(id_) for id_ in standing.entered],
    }


def lines_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"change": line.change, "text": line.text} for line in lines]
