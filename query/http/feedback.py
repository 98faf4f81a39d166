"""What people think of answers, and what those see who operate the service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request

from query.answers import review
from query.http.audit_trail import note, record_change
from query.http.dependencies import Asker, Operator, Reader, Serving, ledger
from query.http.schemas import FeedbackRequest, PipelineResponse, ResolutionRequest, ReviewResponse
from query.problems import Problem

routes = APIRouter()


@routes.post("/v1/feedback", status_code=204, response_model=None, tags=["answers"])
async def feedback(asked: FeedbackRequest, request: Request, service: Serving, asker: Asker, caller: Reader) -> None:
    """Rates an answer or a passage. A caller's later rating replaces its earlier one. A rating of something that the
    caller was not shown is discarded; the response is the same, so that it does not reveal whether the id exists."""
    rating = review.Feedback(asked.verdict, asked.answer_id, asked.chunk_id, asked.query, asked.note)
    keys = service.query.feedback.secrets(make=service.query.serve.development)
    if not keys:
        raise Problem("forbidden", "feedback is disabled: PENSTOCK_FEEDBACK_KEYS is not set")
    voice = review.givers(keys, asker.tenant, principal=asker.principal, key=asker.key)
    async with ledger(service, "feedback", asker.tenant) as connection:
        await review.give(connection, caller, voice, rating)
        about = f"answer:{asked.answer_id}" if asked.answer_id else f"passage:{asked.chunk_id}"
        await record_change(request, 204, object=about)


@routes.get("/v1/review", response_model=ReviewResponse, tags=["operators"])
async def waiting(
    request: Request,
    service: Serving,
    operator: Operator,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=review.MOST_LISTED)] = 50,
    before: Annotated[datetime | None, Query(description="The last `asked_at` of the previous page.")] = None,
) -> dict[str, Any]:
    """Answers of the operator's tenant that need a review, the newest first. An answer's text is included only if the
    operator may read every document that it was made from."""
    async with ledger(service, "review", operator.tenant) as connection:
        entries = await review.waiting(connection, caller, limit=limit, before=before)
    note(request, list(dict.fromkeys(id_ for entry in entries for id_ in entry.documents)))
    return {"waiting": [review.waiting_json(entry) for entry in entries]}


@routes.post("/v1/review/{answer_id}", status_code=204, response_model=None, tags=["operators"])
async def resolve(
    answer_id: UUID, asked: ResolutionRequest, request: Request, service: Serving, operator: Operator
) -> None:
    """Removes a reviewed answer from the queue."""
    async with ledger(service, "review", operator.tenant) as connection:
        if not await review.resolve(connection, operator.tenant, answer_id, asked.verdict):
            raise Problem("not-found", "no such answer in the review queue")
        await record_change(request, 204)


@routes.get("/v1/pipeline", response_model=PipelineResponse, tags=["operators"])
async def pipeline(service: Serving, operator: Operator) -> dict[str, Any]:
    """Freshness, backlog, dead letters and health of the pipeline, for all tenants."""
    return await service.pipeline.look()
