"""The material of an answer: retrieved passages or whole documents, depending on the answer mode."""

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
    """Documents to read whole and to answer from."""
    collection: str | None = None
    """The only source to answer from."""
    filters: Filters = NONE
    top: int | None = None
    """The number of passages; None: the settings' default."""
    member: str | None = None
    """The member whose conversation history is used: the authenticated principal, never a name from the request."""


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
