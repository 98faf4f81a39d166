"""Routes of standing questions: the caller's own, and nobody else's."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from query.answers.model import consistent_json
from query.auth.identity import Identity
from query.http.answers import whole
from query.http.audit_trail import note, record_change
from query.http.dependencies import Authenticated, Reader, Serving
from query.http.schemas import StandingAnswerResponse, StandingListResponse, StandingResponse
from query.problems import Problem
from query.standing.model import as_json, lines_json, summary_json
from query.standing.questions import Unknown

routes = APIRouter()


@routes.get("/v1/standing", response_model=StandingListResponse, tags=["answers"])
async def standing_list(request: Request, service: Serving, identity: Authenticated, caller: Reader) -> dict[str, Any]:
    """The caller's standing questions with the state of each: whether its answer still holds, and what changed."""
    results = await service.standing.every(caller, _principal(identity))
    return {"standing": [summary_json(summary) for summary in results]}


@routes.get("/v1/standing/{question_id}", response_model=StandingResponse, tags=["answers"])
async def standing_show(
    question_id: UUID, request: Request, service: Serving, identity: Authenticated, caller: Reader
) -> dict[str, Any]:
    """A standing question with its stored answer. A sentence is null while the caller may not read a passage behind
    it."""
    try:
        standing = await service.standing.show(caller, _principal(identity), question_id)
    except Unknown as error:
        raise Problem("not-found", str(error)) from error
    note(request, standing.shown_documents, object=f"question:{question_id}")
    return as_json(standing)


@routes.post("/v1/standing/{question_id}/answer", response_model=StandingAnswerResponse, tags=["answers"])
async def standing_answer(
    question_id: UUID, request: Request, service: Serving, identity: Authenticated, caller: Reader
) -> Response:
    """Asks a standing question again, with the caller's present access. The answer replaces the stored one; the
    difference is returned."""
    principal = _principal(identity)
    try:
        before, question = await service.standing.question(caller, principal, question_id)
        fresh = await service.search.freshness(caller, question.sources)
        answer, material = await whole(service, request, question, caller, identity.caller_class)
        note(request, before.shown_documents)
        lines = await service.standing.renew(caller, principal, before, question, answer, material)
    except Unknown as error:
        raise Problem("not-found", str(error)) from error
    return JSONResponse(
        consistent_json(answer, None, fresh) | {"standing_id": str(question_id), "difference": lines_json(lines)}
    )


@routes.delete("/v1/standing/{question_id}", status_code=204, response_model=None, tags=["answers"])
async def standing_remove(question_id: UUID, request: Request, service: Serving, identity: Authenticated) -> None:
    """Removes a standing question with its answer."""
    try:
        await service.standing.remove(
            identity.tenant, _principal(identity), question_id, record=lambda: record_change(request, 204)
        )
    except Unknown as error:
        raise Problem("not-found", str(error)) from error


def _principal(identity: Identity) -> str:
    if identity.principal is None:
        raise Problem("forbidden", "only a person has standing questions: this API key has tags and no principal")
    return identity.principal
