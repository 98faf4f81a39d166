"""/v1/answers: at once, or as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from query.access import Caller
from query.answers.model import Cited, Delta, Done, Failed, Sources, answer_json, sources_json
from query.http import problems
from query.http.asked import AnswerAsked
from query.http.asking import Asker, Reader, Serving, model_writes, note_mode
from query.http.streaming import MEDIA_TYPE, Event, EventStream
from query.http.told import AnswerTold
from query.http.trail import note
from query.material import AnswerMode, CallerClass, Question
from query.model import shown_in
from query.modes.gather import SEARCHED
from query.modes.narrow import narrowed
from query.service import Service

routes = APIRouter()

STREAM = """\
`sources` {passages, mode, notes, steps} → `delta` {text} and `citation` {n} as it is written → `done`, the plain
answer, which is the one that counts: it was checked. `error`, a problem, ends a stream that cannot be finished.
"""


@routes.post(
    "/v1/answers",
    response_model=AnswerTold,
    tags=["answers"],
    responses={
        200: {
            "description": f"The answer; with `stream`, server-sent events: {STREAM}",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        }
    },
)
async def answers(asked: AnswerAsked, request: Request, service: Serving, asker: Asker, caller: Reader) -> Response:
    """An answer made from passages that the caller may read, each claim with the passage that says it."""
    question = asked.asks(asker.principal)
    if asked.stream or MEDIA_TYPE in request.headers.get("accept", ""):
        return EventStream(_told(service, request, question, caller, asker.klass))
    async with asyncio.timeout(service.answer_seconds):
        answer = await service.answers.whole(
            question, caller, asker.klass, on_sources=lambda sources: _found(request, sources)
        )
    note(request, object=f"answer:{answer.answer_id}")
    note_mode(request, answer.mode)
    _shadow(service, question, caller, answer.mode)
    return JSONResponse(answer_json(answer))


async def _told(
    service: Service, request: Request, question: Question, caller: Caller, klass: CallerClass
) -> AsyncGenerator[Event, None]:
    began, first = perf_counter(), True
    service.metrics.streams.inc()
    try:
        async with (
            asyncio.timeout(service.answer_seconds),
            aclosing(service.answers.answer(question, caller, klass)) as events,
        ):
            async for event in events:
                match event:
                    case Sources():
                        _found(request, event)
                        note_mode(request, event.mode)
                        _shadow(service, question, caller, event.mode)
                    case Delta() if first:
                        first = False
                        service.metrics.first_token.observe(perf_counter() - began)
                yield _event(event)
    except TimeoutError as error:
        yield "error", problems.of(error).as_json()
    finally:
        service.metrics.streams.dec()


def _found(request: Request, sources: Sources) -> None:
    """For the audit trail all that the answer is made from, cited or not, and what history that is read along was."""
    model_writes(request)
    note(request, [*shown_in(passage.result for passage in sources.passages), *sorted(sources.behind)])


def _shadow(service: Service, question: Question, caller: Caller, mode: AnswerMode) -> None:
    if mode in SEARCHED:
        service.shadow.offer(question.text, caller, mode=SEARCHED[mode], filters=narrowed(question))


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
