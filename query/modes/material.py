"""The material of an answer: retrieved passages or whole documents, depending on the answer mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from query.access.filters import NONE, Filters
from query.model import AnswerMode, Result, Step
from query.modes.history import History

MAX_TURNS = 10
"""The most earlier turns of a conversation that a question brings along."""
MAX_ANSWER_CHARACTERS = 20_000
"""The longest answer in a turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier question of a conversation with its answer, in the words of the caller: nothing in it is trusted."""

    question: str
    answer: str = ""
    answer_id: UUID | None = None
    """The id that the service gave the answer. The answer is then used only while the caller may read every document
    that it was made from."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    mode: AnswerMode | None = None
    """None: the service decides."""
    documents: tuple[UUID, ...] = ()
    """Documents to read whole and to answer from."""
    collection: str | None = None
    """The only source to answer from."""
    filters: Filters = NONE
    top: int | None = None
    """The number of passages; None: the settings' default."""
    turns: tuple[Turn, ...] = ()
    """The conversation so far, in its order: what the text may refer to."""
    member: str | None = None
    """The member whose conversation history is used: the authenticated principal, never a name from the request."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that may be answered from; empty: all."""
        return (self.collection,) if self.collection is not None else self.filters.sources


@dataclass(frozen=True, slots=True)
class Material:
    mode: AnswerMode
    passages: Sequence[Result]
    """Retrieved passages, the best first; or whole documents, one after another in reading order."""
    whole: bool
    """Whether the passages are whole documents, whose order must stay."""
    steps: Sequence[Step]
    notes: Sequence[str] = ()
    """Notes for the reader on what is missing, one line each: trimmed, degraded or not embedded."""
    history: History | None = None
    relevant: bool = True
    """False: no retrieved passage is relevant to the question."""
    budget_tokens: int | None = None
    """The tokens that whole documents, or the passages of a personal collection, fit into, including headings (cl100k).
    None: the setting ``context_tokens`` is the limit of the retrieved passages."""
    is_full: bool = False
    """Whether there are as many passages as were requested, so that a further one would take the place of one."""
