"""The route /v1/answers: a whole answer, or a stream while it is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pipeline.core.errors import PenstockError
from query import problems
from query.access.callers import Caller
from query.answers.model import (
    Answer,
    Cited,
    Delta,
    Done,
    Failed,
    Sources,
    answer_json,
    consistent_json,
    sources_json,
)
from query.auth.identity import Identity
from query.http.audit_trail import EVENT_STREAM, note
from query.http.dependencies import (
    AtLeastHeader,
    Authenticated,
    Reader,
    Serving,
    caller_now,
    note_mode,
    release_search,
    wait_for_publication,
)
from query.http.schemas import ANSWER_EVENT, AnswerRequest, AnswerResponse
from query.model import AnswerMode, AtLeast, CallerClass, SourceFreshness, shown_documents
from query.modes.filters import effective_filters
from query.modes.gather import SEARCHED
from query.modes.material import Question
from query.service import Service

routes = APIRouter()

STREAM = """\
`sources` {passages, mode, notes, steps}, then `delta` {text} and `citation` {n} while the answer is written, then
`done` with the complete response, which replaces the streamed text because its citations were checked. `error`, a
problem, ends a stream that cannot be completed.
"""


@routes.post(
    "/v1/answers",
    response_model=AnswerResponse,
    tags=["answers"],
    responses={
        200: {
            "description": f"The answer. With `stream`, server-sent events: {STREAM}",
            "content": {
                EVENT_STREAM: {
                    "schema": {
                        "type": "string",
                        "contentMediaType": EVENT_STREAM,
                        "contentSchema": {"$ref": f"#/components/schemas/{ANSWER_EVENT}"},
                    }
                }
            },
        }
    },
)
async def answers(
    body: AnswerRequest,
    request: Request,
    service: Serving,
    identity: Authenticated,
    caller: Reader,
    at_least: AtLeastHeader = None,
) -> Response:
    """An answer from passages that the caller may read, with a citation for each claim."""
    if body.history and not identity.has("history"):
        raise problems.Problem("forbidden", "this service may not read people's conversations: see its scopes")
    question = body.to_question(identity.principal)
    keeper = await _keeper(service, identity, question) if body.keep else None
    caller, seen = await wait_for_publication(request, service, caller, body.publications(at_least), body.wait_seconds)
    fresh = await service.search.freshness(caller, question.sources)
    if body.stream or EVENT_STREAM in request.headers.get("accept", ""):
        events = _events(service, request, question, caller, identity.caller_class, seen, fresh, keeper)
        return EventStream(events, service.answer_seconds)
    answer, material = await whole(service, request, question, caller, identity.caller_class)
    standing = await keeper.keep(service, caller, question, answer, material) if keeper else None
    return JSONResponse(consistent_json(answer, seen, fresh) | _standing_id(standing))


class _Keeper(NamedTuple):
    """The principal that a standing question will belong to, and when it was asked."""

    principal: str
    since: datetime

    async def keep(
        self, service: Service, caller: Caller, question: Question, answer: Answer, material: Sources
    ) -> UUID:
        return await service.standing.keep(caller, self.principal, question, answer, material, since=self.since)


async def whole(
    service: Service, request: Request, question: Question, caller: Caller, caller_class: CallerClass
) -> tuple[Answer, Sources]:
    """An answer within its time limit, and the passages that it is made from, noted for the audit trail."""
    material: list[Sources] = []

    def take(sources: Sources) -> None:
        _note_sources(request, sources)
        material.append(sources)

    async with asyncio.timeout(service.answer_seconds):
        answer = await service.answers.whole(
            question, caller, caller_class, on_sources=take, identify=partial(caller_now, request)
        )
    note(request, object=f"answer:{answer.answer_id}")
    note_mode(request, answer.mode)
    _shadow(service, question, caller, answer.mode)
    return answer, material[0]


async def _keeper(service: Service, identity: Identity, question: Question) -> _Keeper:
    """Whom the standing question will belong to. Raises Problem and BadQuery."""
    if identity.principal is None:
        raise problems.Problem("forbidden", "only a person can keep a question: this API key has tags and no principal")
    since = await service.standing.check_room(identity.tenant, identity.principal, question)
    return _Keeper(identity.principal, since)


def _standing_id(standing: UUID | None) -> dict[str, Any]:
    return {"standing_id": None if standing is None else str(standing)}


async def _events(
    service: Service,
    request: Request,
    question: Question,
    caller: Caller,
    caller_class: CallerClass,
    seen: AtLeast | None,
    fresh: Sequence[SourceFreshness],
    keeper: _Keeper | None,
) -> AsyncGenerator[Event, None]:
    began, first = perf_counter(), True
    material: Sources | None = None
    service.metrics.streams.inc()
    try:
        identify = partial(caller_now, request)
        async with aclosing(service.answers.answer(question, caller, caller_class, identify=identify)) as events:
            async for event in events:
                match event:
                    case Sources():
                        material = event
                        _note_sources(request, event)
                        note_mode(request, event.mode)
                        _shadow(service, question, caller, event.mode)
                    case Delta() if first:
                        first = False
                        service.metrics.first_token.observe(perf_counter() - began)
                name, data = _event(event)
                if isinstance(event, Done):
                    data = consistent_json(event.answer, seen, fresh)
                    if keeper is not None and material is not None:
                        standing_id = await keeper.keep(service, caller, question, event.answer, material)
                        data |= _standing_id(standing_id)
                yield name, data
    finally:
        service.metrics.streams.dec()


def _note_sources(request: Request, sources: Sources) -> None:
    """Note the documents for the audit trail: all that the answer is made from, cited or not, and those that the
    conversation history was made from."""
    release_search(request)
    note(
        request, [*shown_documents(passage.result for passage in sources.passages), *sorted(sources.history_documents)]
    )


def _shadow(service: Service, question: Question, caller: Caller, mode: AnswerMode) -> None:
    if mode in SEARCHED:
        service.shadow.offer(question.text, caller, mode=SEARCHED[mode], filters=effective_filters(question))


def _event(event: Sources | Delta | Cited | Done | Failed) -> tuple[str, dict[str, Any]]:
    match event:
        case Sources():
            return "sources", sources_json(event)
        case Delta(text):
            return "delta", {"text": text}
        case Cited(n):
            return "citation", {"n": n}
        case Done(answer):
            return "done", answer_json(answer)
        case Failed(error):
            return "error", problems.of(error).as_json()


KEEPALIVE_SECONDS = 15.0
"""The interval of comment lines, which keep proxies from closing the connection while the model is silent."""

Event = tuple[str, Mapping[str, Any]]
"""The name and the data of a server-sent event."""


class EventStream(Response):
    """A response of server-sent events. The generator ``events`` runs in one task, and is always closed."""

    media_type = EVENT_STREAM

    def __init__(self, events: AsyncGenerator[Event, None], seconds: float) -> None:
        """seconds: the time limit of the events, however slowly the client reads them."""
        super().__init__()
        self._events = events
        self._seconds = seconds
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # else nginx buffers it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # One item, so that a slow reader slows the model down instead of filling memory.
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(1)
        producer = asyncio.create_task(self._produce(queue), name="events")
        try:
            while True:
                item: bytes | Exception | None = KEEPALIVE_COMMENT
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_SECONDS):
                        item = await queue.get()
                if item is None:
                    break
                if isinstance(item, Exception):
                    raise item
                await send({"type": "http.response.body", "body": item, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def _produce(self, queue: asyncio.Queue[bytes | Exception | None]) -> None:
        try:
            try:
                # Not within the generator: while a slow client is waited for here, it would not learn of its limit.
                async with asyncio.timeout(self._seconds), aclosing(self._events) as events:
                    async for name, data in events:
                        await queue.put(_written(name, data))
            except (TimeoutError, PenstockError) as error:
                await queue.put(_written("error", problems.of(error).as_json()))
        except Exception as error:  # noqa: BLE001 # raised again by __call__
            await queue.put(error)
        else:
            await queue.put(None)


def _written(name: str, data: Mapping[str, Any]) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data))
