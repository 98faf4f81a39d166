"""The user of a tool call, and what a call results in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from uuid import UUID

from pydantic import BaseModel

from query.access.callers import Caller
from query.http.audit_trail import ToolCall
from query.model import AtLeast, CallerClass


@dataclass(frozen=True, slots=True)
class Asker:
    """The user of a tool call."""

    caller: Caller
    """With its access at this call."""
    principal: str | None
    """The owner of standing questions. None: the user has none, because it is a service of fixed tags, or one that may
    not use answers on behalf of this person."""
    caller_class: CallerClass
    seen: AtLeast | None
    """The published changes that it can see, of those that the call named."""
    answering: Callable[[], AbstractAsyncContextManager[None]]
    """Admits an answer: the place and the budget that it needs beyond those of a search. Raises Problem and
    Retryable."""
    release_search: Callable[[], None]
    """Releases the slot of a search while a model writes."""
    record: Callable[[ToolCall], Awaitable[None]]
    """Writes the record of a change to the audit trail before it is committed. Raises Retryable."""
    identify: Callable[[], Awaitable[Caller]]
    """Returns it with its access at that moment, for a call that had to wait. Raises Retryable."""
    operator: bool = False
    may_preview: bool = True
    """False: a service that acts for this person without the scope of previews."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a tool, and what the audit trail records of it."""

    output: BaseModel
    documents: Sequence[UUID] = ()
    object: str = ""
    is_recorded: bool = False
    """Whether the record is already written, because the call is a change."""
