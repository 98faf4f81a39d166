"""Routes for searching: passages, filter values and the authenticated caller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from query import model
from query.access import documents as reading
from query.access.facets import count_all
from query.http.audit_trail import note
from query.http.dependencies import (
    AtLeastHeader,
    Authenticated,
    Reader,
    Serving,
    ledger,
    note_mode,
    wait_for_publication,
)
from query.http.schemas import (
    CallerResponse,
    FacetsResponse,
    SearchRequest,
    SearchResponse,
)

routes = APIRouter()


@routes.post("/v1/search", response_model=SearchResponse, tags=["search"])
async def search(
    body: SearchRequest, request: Request, service: Serving, caller: Reader, at_least: AtLeastHeader = None
) -> dict[str, Any]:
    """The most relevant passages that the caller may read, each verified against the ledger."""
    note_mode(request, body.mode)
    filters = body.filters.filters()
    caller, seen = await wait_for_publication(request, service, caller, body.publications(at_least), body.wait_seconds)
    async with asyncio.timeout(service.budget.total):
        outcome = await service.search.search(
            body.query,
            caller,
            top=body.top,
            mode=body.mode,
            filters=filters,
            rerank=body.rerank,
            sort=body.sort,
            cursor=body.cursor,
            facets=body.facets,
        )
    for step in outcome.steps:
        if step.degraded:
            service.metrics.degraded.labels(step.name).inc()
    if body.sort == "relevance" and body.cursor is None:
        service.shadow.offer(body.query, caller, mode=body.mode, filters=filters, rerank=body.rerank)
    note(request, model.shown_documents(outcome.results))
    return model.as_json(replace(outcome, at_least=seen))


@routes.get("/v1/facets", response_model=FacetsResponse, tags=["search"])
async def facets(service: Serving, caller: Reader) -> FacetsResponse:
    """Values for search filters, from documents that the caller may read. From a large library, a sample across its
    sources."""
    async with ledger(service, "facets", caller.tenant) as connection:
        values = await reading.facets(connection, caller)
        metadata = model.facets_as_json(await count_all(connection, caller))
    return FacetsResponse(
        sources=values.sources, authors=values.authors, media_types=values.media_types, metadata=metadata
    )


@routes.get("/v1/me", response_model=CallerResponse, tags=["service"])
async def me(identity: Authenticated) -> CallerResponse:
    """The authenticated caller."""
    return CallerResponse(
        tenant=identity.tenant,
        principal=identity.principal,
        key=identity.key,
        kind=identity.kind,
        caller_class=identity.caller_class,
        operator=identity.operator,
    )
