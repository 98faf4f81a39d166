"""What each request leaves in the audit trail. Routes say which documents they show; the rest is seen from here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID, uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.core.errors import Misconfigured
from pipeline.core.trail import Credential, Decision, Record
from pipeline.trail import Trail
from query import problems
from query.auth.identity import Who

ACTIONS = {
    "/v1/search": "search",
    "/v1/answers": "answer",
    "/v1/documents/{document_id}": "document.read",
    "/v1/documents/{document_id}/why": "document.why",
    "/v1/feedback": "feedback.give",
    "/v1/review": "review.list",
    "/v1/review/{answer_id}": "review.resolve",
}
"""By the route's path."""
UNRECORDED = frozenset({"/v1/facets", "/v1/me", "/v1/pipeline"})
"""They show no document: values to narrow a search to, who asks, and counts. The tools under /mcp say themselves what
they do."""
REFUSED = {403: "forbidden", 404: "not-found"}
"""Statuses that are a decision about access. A request that is malformed, or one too many, is nothing that was done."""
EVENT_STREAM = "text/event-stream"
REQUEST_ID = "request-id"
"""The header of an answer by which its record is found."""


@dataclass(slots=True)
class Noted:
    """Of one request: what it has shown and is not recorded yet."""

    request: str = field(default_factory=lambda: uuid4().hex)
    action: str = ""
    documents: list[UUID] = field(default_factory=list)
    object: str = ""
    decision: Decision | None = None
    """None: as the answer's status says."""
    reason: str = ""
    is_new: bool = False
    recorded: int = 0
    write: Callable[[int], Awaitable[None]] | None = None
    """The record, as of an answer with this status."""
    is_change: bool = False
    """Its record is written, and the change follows."""


def note(request: HTTPConnection, documents: Sequence[UUID] = (), *, object: str = "") -> None:
    """What is about to be shown, before any of it is sent."""
    noted = cast(Noted, request.state.noted)
    noted.documents += documents
    noted.object = object or noted.object
    noted.is_new = True


async def record_change(request: HTTPConnection, status: int, *, object: str = "") -> None:
    """Before the transaction of a change ends, whatever becomes of the client after that: in mode ``required`` no
    change is without its record. status: of the answer, if the change is committed. Raises Retryable."""
    noted = cast(Noted, request.state.noted)
    noted.object = object or noted.object
    assert noted.write is not None
    await noted.write(status)
    noted.is_change = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Over MCP, whatever the transport: what became of a call."""

    tool: str
    decision: Decision
    reason: str = ""
    object: str = ""
    documents: Sequence[UUID] = ()

    @property
    def action(self) -> str:
        return f"mcp.{self.tool}"


def note_call(request: HTTPConnection, call: ToolCall) -> None:
    noted: Noted | None = getattr(request.state, "noted", None)
    if noted is None:
        if call.documents:
            raise Misconfigured("the MCP endpoint is not behind the recorder of the audit trail")
        return
    noted.action, noted.decision, noted.reason = call.action, call.decision, call.reason
    note(request, call.documents, object=call.object)


class Recorder:
    """ASGI middleware, behind the gate. In mode ``required`` nothing is sent before its record is committed: whoever
    sends raises Retryable instead."""

    def __init__(self, app: ASGIApp, *, trail: Trail) -> None:
        self._app = app
        self._trail = trail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who: Who | None = scope.get("state", {}).get("who")
        if who is None:
            await self._app(scope, receive, send)
            return
        noted: Noted = scope["state"].setdefault("noted", Noted())
        status = 0

        async def write(status: int) -> None:
            await self._record(scope, who, noted, status)

        noted.write = write

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = noted.request
                if not headers.get("content-type", "").startswith(EVENT_STREAM):  # of a stream nothing is known yet
                    noted.is_new = not (noted.is_change and status < 400)
            if noted.is_new:
                noted.is_new = False
                await write(status)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:  # the client is gone
            self._failed(scope, who, noted, "left")
            raise
        except Exception as error:
            self._failed(scope, who, noted, problems.of(error).kind)
            raise
        if not noted.recorded:  # a stream that ended before it showed anything
            self._failed(scope, who, noted, "no-answer")

    async def _record(self, scope: Scope, who: Who, noted: Noted, status: int) -> None:
        action = noted.action or _action(scope)
        by_status: Decision = "allowed" if status < 400 else "failed" if status >= 500 else "refused"
        decision = noted.decision or by_status
        if not action or (by_status == "refused" and status not in REFUSED):
            noted.recorded += 1
            return
        documents = tuple(dict.fromkeys(noted.documents)) if decision == "allowed" else ()
        noted.documents = []
        reason = noted.reason or ("" if decision == "allowed" else REFUSED.get(status, str(status)))
        await self._trail.write(_record(scope, who, noted, action, documents, decision, reason))
        noted.recorded += 1

    def _failed(self, scope: Scope, who: Who, noted: Noted, reason: str) -> None:
        action = noted.action or _action(scope)
        if action and not noted.recorded:
            self._trail.offer(_record(scope, who, noted, action, (), "failed", reason))
            noted.recorded += 1


def _action(scope: Scope) -> str:
    return ACTIONS.get(getattr(scope.get("route"), "path", ""), "")


def _record(
    scope: Scope, who: Who, noted: Noted, action: str, documents: tuple[UUID, ...], decision: Decision, reason: str
) -> Record:
    about = noted.object
    parameters: dict[str, Any] = scope.get("path_params", {})
    if not about and not documents:
        about = next((f"{name.removesuffix('_id')}:{_spelled(value)}" for name, value in parameters.items()), "")
    client = scope.get("client")
    return Record(
        datetime.now(UTC),
        who.principal or who.key or "",
        cast(Credential, who.kind),
        action,
        who.tenant,
        object=about,
        documents=documents,
        decision=decision,
        reason=reason,
        address=client[0] if client else "",
        request=noted.request,
        access=_access(who),
    )


def _spelled(id_: str) -> str:
    """As ids are looked for: a caller may write one with capitals, in braces or without hyphens."""
    try:
        return str(UUID(id_))
    except ValueError:
        return id_


def _access(who: Who) -> tuple[str, ...]:
    """A key may read as a person, or hold tags of its own."""
    return (f"key:{who.key}",) if who.key is not None else ()
