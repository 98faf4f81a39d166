"""What people think of answers, and what those see who operate the service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request

from query import review
from query.http.asked import FeedbackAsked, ResolutionAsked
from query.http.asking import Asker, Operator, Reader, Serving, ledger
from query.http.problems import Problem
from query.http.told import PipelineTold, ReviewTold
from query.http.trail import note, record_change

routes = APIRouter()


@routes.post("/v1/feedback", status_code=204, response_model=None, tags=["answers"])
async def feedback(asked: FeedbackAsked, request: Request, service: Serving, asker: Asker, caller: Reader) -> None:
    """What the caller thinks of an answer or a passage. One voice each: a second one replaces the first. What the
    caller was not shown is not kept, and the response is the same, so that nobody learns whether it exists."""
    given = review.Feedback(asked.verdict, asked.answer_id, asked.chunk_id, asked.query, asked.note)
    keys = service.query.feedback.secrets(make=service.query.serve.development)
    if not keys:
        raise Problem("forbidden", "feedback is not kept here: PENSTOCK_FEEDBACK_KEYS is not set")
    voice = review.givers(keys, asker.tenant, principal=asker.principal, key=asker.key)
    async with ledger(service, "feedback", asker.tenant) as connection:
        await review.give(connection, caller, voice, given)
        about = f"answer:{asked.answer_id}" if asked.answer_id else f"passage:{asked.chunk_id}"
        await record_change(request, 204, object=about)


@routes.get("/v1/review", response_model=ReviewTold, tags=["operators"])
async def waiting(
    request: Request,
    service: Serving,
    operator: Operator,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=review.MOST_LISTED)] = 50,
    before: Annotated[datetime | None, Query(description="The last page's last `asked_at`.")] = None,
) -> dict[str, Any]:
    """Answers of the operator's tenant that somebody should look at, the newest first. What was written is shown only
    to who may read every document that it was made from."""
    async with ledger(service, "review", operator.tenant) as connection:
        found = await review.waiting(connection, caller, limit=limit, before=before)
    note(request, list(dict.fromkeys(id_ for entry in found for id_ in entry.documents)))
    return {"waiting": [review.waiting_json(entry) for entry in found]}


@routes.post("/v1/review/{answer_id}", status_code=204, response_model=None, tags=["operators"])
async def resolve(
    answer_id: UUID, asked: ResolutionAsked, request: Request, service: Serving, operator: Operator
) -> None:
    """Somebody has looked at it: it leaves the queue."""
    async with ledger(service, "review", operator.tenant) as connection:
        if not await review.resolve(connection, operator.tenant, answer_id, asked.verdict):
            raise Problem("not-found", "no such answer waits for review")
        await record_change(request, 204)


@routes.get("/v1/pipeline", response_model=PipelineTold, tags=["operators"])
async def pipeline(service: Serving, operator: Operator) -> dict[str, Any]:
    """How fresh everything is, what waits, what was set aside, and what stands in the way: of all tenants."""
    return await service.pipeline.look()
