"""What an answer is made from: found or read whole, by the mode that was decided on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from query.access.filters import NONE, Filters
from query.model import AnswerMode, Result, Step
from query.modes.history import History


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    mode: AnswerMode | None = None
    """None: the service decides."""
    documents: tuple[UUID, ...] = ()
    """Answer from these, whole."""
    collection: str | None = None
    """A source: answer from it alone."""
    filters: Filters = NONE
    top: int | None = None
    """Passages; None: as the settings say."""
    member: str | None = None
    """Whose conversation history is read along: the authenticated principal, never a name that a client sent."""


@dataclass(frozen=True, slots=True)
class Material:
    mode: AnswerMode
    passages: Sequence[Result]
    """Found: the best first. Whole documents: in reading order, document by document."""
    whole: bool
    """Whether passages are documents in reading order, and are to be kept so."""
    steps: Sequence[Step]
    notes: Sequence[str] = ()
    """What whoever reads the answer should know of what is missing, one line each: trimmed, degraded, not embedded."""
    history: History | None = None
    relevant: bool = True
    """False: nothing that was found is about the question."""
    budget_tokens: int | None = None
    """Of whole documents: what their passages fit, headings included (cl100k). None: they were found, and what they
    may fill is the settings' ``context_tokens``."""
