"""Routes for feedback on answers and for operators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request

from query.answers import review
from query.http.audit_trail import note, record_change
from query.http.dependencies import Authenticated, Operator, Reader, Serving, ledger
from query.http.schemas import FeedbackRequest, PipelineResponse, ResolutionRequest, ReviewResponse
from query.problems import Problem

routes = APIRouter()


@routes.post("/v1/feedback", status_code=204, response_model=None, tags=["answers"])
async def feedback(
    body: FeedbackRequest, request: Request, service: Serving, identity: Authenticated, caller: Reader
) -> None:
    """Rates an answer or a passage. A caller's later rating replaces its earlier one. A rating of something that the
    caller was not shown is discarded; the response is the same, so that it does not reveal whether the id exists."""
    rating = review.Feedback(body.verdict, body.answer_id, body.chunk_id, body.query, body.note)
    keys = service.query.feedback.secrets(make=service.query.serve.development)
    if not keys:
        raise Problem("forbidden", "feedback is disabled: PENSTOCK_FEEDBACK_KEYS is not set")
    authors = review.author_digests(keys, identity.tenant, principal=identity.principal, key=identity.key)
    async with ledger(service, "feedback", identity.tenant) as connection:
        await review.store_feedback(connection, caller, authors, rating)
        rated = f"answer:{body.answer_id}" if body.answer_id else f"passage:{body.chunk_id}"
        await record_change(request, 204, object=rated)


@routes.get("/v1/review", response_model=ReviewResponse, tags=["operators"])
async def waiting(
    request: Request,
    service: Serving,
    operator: Operator,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=review.MAX_LISTED_ANSWERS)] = 50,
    before: Annotated[datetime | None, Query(description="The last `asked_at` of the previous page.")] = None,
) -> dict[str, Any]:
    """Answers of the operator's tenant that need a review, the newest first. An answer's text is included only if the
    operator may read every document that it was made from."""
    async with ledger(service, "review", operator.tenant) as connection:
        entries = await review.list_pending(connection, caller, limit=limit, before=before)
    note(request, list(dict.fromkeys(id_ for entry in entries for id_ in entry.documents)))
    return {"waiting": [review.entry_json(entry) for entry in entries]}


@routes.post("/v1/review/{answer_id}", status_code=204, response_model=None, tags=["operators"])
async def resolve(
    answer_id: UUID, body: ResolutionRequest, request: Request, service: Serving, operator: Operator
) -> None:
    """Removes a reviewed answer from the queue."""
    async with ledger(service, "review", operator.tenant) as connection:
        if not await review.resolve(connection, operator.tenant, answer_id, body.verdict):
            raise Problem("not-found", "no such answer in the review queue")
        await record_change(request, 204)


@routes.get("/v1/pipeline", response_model=PipelineResponse, tags=["operators"])
async def pipeline(service: Serving, operator: Operator) -> dict[str, Any]:
    """Freshness, backlog, dead letters and health of the pipeline, for all tenants."""
    return await service.pipeline.look()
