"""The audit trail of requests. Routes note which documents they return; the middleware here records the rest."""

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
from query.auth.identity import Identity
from query.limits.charging import charge

ACTIONS = {
    "/v1/search": "search",
    "/v1/answers": "answer",
    "/v1/standing": "standing.list",
    "/v1/standing/{question_id}": "standing.read",
    "/v1/standing/{question_id}/answer": "standing.ask",
    "/v1/documents/{document_id}": "document.read",
    "/v1/documents/{document_id}/why": "document.why",
    "/v1/previews": "preview",
    "/v1/feedback": "feedback.give",
    "/v1/conflicts": "conflicts.list",
    "/v1/conflicts/{conflict_id}": "conflicts.decide",
    "/v1/review": "review.list",
    "/v1/review/{answer_id}": "review.resolve",
}
"""The recorded actions, by the route's path."""
REMOVALS = {"/v1/standing/{question_id}": "standing.remove"}
"""The recorded actions of DELETE, where a path is read with other methods."""
UNRECORDED = frozenset({"/v1/facets", "/v1/me", "/v1/pipeline"})
"""Routes that return no document: filter values, the caller's identity, and counts. The tools under /mcp record their
own calls."""
REFUSED = {403: "forbidden", 404: "not-found"}
"""Statuses that are a decision about access. Other refusals, such as malformed requests, are not recorded."""
RECORD_BYTES, RECORDED_DOCUMENT_BYTES = 700, 48
"""The usual size of a record without its documents, and of each of them, with indexes."""
EVENT_STREAM = "text/event-stream"
REQUEST_ID = "request-id"
"""The response header that holds the id of the request's record."""


@dataclass(slots=True)
class RecordDraft:
    """The facts about one request that are not recorded yet."""

    request: str = field(default_factory=lambda: uuid4().hex)
    action: str = ""
    documents: list[UUID] = field(default_factory=list)
    object: str = ""
    decision: Decision | None = None
    """None: the response's status decides."""
    reason: str = ""
    is_new: bool = False
    recorded: int = 0
    write: Callable[[int], Awaitable[None]] | None = None
    """Writes the record for a response with this status."""
    is_change: bool = False
    """Whether the request is a change whose record is already written."""


def note(request: HTTPConnection, documents: Sequence[UUID] = (), *, object: str = "") -> None:
    """Note documents or an object that the response is about to return, before any of it is sent."""
    draft = cast(RecordDraft, request.state.draft)
    draft.documents += documents
    draft.object = object or draft.object
    draft.is_new = True


async def record_change(request: HTTPConnection, status: int, *, object: str = "") -> None:
    """Write the record of a change before its transaction ends, so that in mode ``required`` every change has a record
    even if the client disconnects. status: that of the response if the change is committed. Raises Retryable."""
    draft = cast(RecordDraft, request.state.draft)
    draft.object = object or draft.object
    assert draft.write is not None
    await draft.write(status)
    draft.is_change = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The outcome of a tool call over MCP, with any transport."""

    tool: str
    decision: Decision
    reason: str = ""
    object: str = ""
    documents: Sequence[UUID] = ()

    @property
    def action(self) -> str:
        return f"mcp.{self.tool}"


def note_call(request: HTTPConnection, call: ToolCall) -> None:
    draft: RecordDraft | None = getattr(request.state, "draft", None)
    if draft is None:
        if call.documents:
            raise Misconfigured("the MCP endpoint is not behind the recorder of the audit trail")
        return
    draft.action, draft.decision, draft.reason = call.action, call.decision, call.reason
    note(request, call.documents, object=call.object)


class Recorder:
    """ASGI middleware behind the gate. In mode ``required`` nothing is sent before its record is committed: sending
    raises Retryable instead."""

    def __init__(self, app: ASGIApp, *, trail: Trail) -> None:
        self._app = app
        self._trail = trail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity: Identity | None = scope.get("state", {}).get("identity")
        if identity is None:
            await self._app(scope, receive, send)
            return
        draft: RecordDraft = scope["state"].setdefault("draft", RecordDraft())
        status = 0

        async def write(status: int) -> None:
            await self._record(scope, identity, draft, status)

        draft.write = write

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = draft.request
                if not headers.get("content-type", "").startswith(EVENT_STREAM):  # a stream notes its documents later
                    draft.is_new = not (draft.is_change and status < 400)
            if draft.is_new:
                draft.is_new = False
                await write(status)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:  # the client disconnected
            self._failed(scope, identity, draft, "left")
            raise
        except Exception as error:
            self._failed(scope, identity, draft, problems.of(error).kind)
            raise
        if not draft.recorded:  # a stream that ended before it returned anything
            self._failed(scope, identity, draft, "no-answer")

    async def _record(self, scope: Scope, identity: Identity, draft: RecordDraft, status: int) -> None:
        action = draft.action or _action(scope)
        by_status: Decision = "allowed" if status < 400 else "failed" if status >= 500 else "refused"
        decision = draft.decision or by_status
        if not action or (by_status == "refused" and status not in REFUSED):
            draft.recorded += 1
            return
        documents = tuple(dict.fromkeys(draft.documents)) if decision == "allowed" else ()
        draft.documents = []
        reason = draft.reason or ("" if decision == "allowed" else REFUSED.get(status, str(status)))
        if self._trail.mode != "off":
            charge(stored=RECORD_BYTES + RECORDED_DOCUMENT_BYTES * len(documents))
        await self._trail.write(_record(scope, identity, draft, action, documents, decision, reason))
        draft.recorded += 1

    def _failed(self, scope: Scope, identity: Identity, draft: RecordDraft, reason: str) -> None:
        action = draft.action or _action(scope)
        if action and not draft.recorded:
            self._trail.offer(_record(scope, identity, draft, action, (), "failed", reason))
            draft.recorded += 1


def _action(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", "")
    if scope.get("method") == "DELETE" and path in REMOVALS:
        return REMOVALS[path]
    return ACTIONS.get(path, "")


def _record(
    scope: Scope,
    identity: Identity,
    draft: RecordDraft,
    action: str,
    documents: tuple[UUID, ...],
    decision: Decision,
    reason: str,
) -> Record:
    object_ = draft.object
    parameters: dict[str, Any] = scope.get("path_params", {})
    if not object_ and not documents:
        object_ = next((f"{name.removesuffix('_id')}:{_canonical_id(value)}" for name, value in parameters.items()), "")
    client = scope.get("client")
    return Record(
        datetime.now(UTC),
        identity.principal or identity.key or "",
        cast(Credential, identity.kind),
        action,
        identity.tenant,
        object=object_,
        documents=documents,
        decision=decision,
        reason=reason,
        address=client[0] if client else "",
        request=draft.request,
        access=_access(identity),
    )


def _canonical_id(id_: str) -> str:
    """An id in its canonical form: a caller may write one with capitals, in braces or without hyphens."""
    try:
        return str(UUID(id_))
    except ValueError:
        return id_


def _access(identity: Identity) -> tuple[str, ...]:
    """The API key that gave access, which may have a principal or tags of its own."""
    return (f"key:{identity.key}",) if identity.key is not None else ()
