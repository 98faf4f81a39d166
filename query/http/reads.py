"""Routes that read: search, one document, its story, what there is to narrow a search to."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request

from pipeline.ledger import story
from pipeline.ledger.story_json import as_json as story_json
from pipeline.ledger.story_json import for_reader
from query import model
from query.http import reading
from query.http.asked import SearchAsked
from query.http.asking import Asker, Reader, Serving, ledger, note_mode
from query.http.problems import Problem
from query.http.told import DocumentTold, FacetsTold, MeTold, SearchTold, StoryTold
from query.http.trail import note

routes = APIRouter()

NOT_FOUND = "there is no such document, or it may not be read by this caller"


@routes.post("/v1/search", response_model=SearchTold, tags=["search"])
async def search(asked: SearchAsked, request: Request, service: Serving, caller: Reader) -> dict[str, Any]:
    """The best passages that the caller may read, from both stores, each verified against the ledger."""
    note_mode(request, asked.mode)
    async with asyncio.timeout(service.budget.total):
        found = await service.search.search(
            asked.query, caller, top=asked.top, mode=asked.mode, filters=asked.filters.filters(), rerank=asked.rerank
        )
    for step in found.steps:
        if step.degraded:
            service.metrics.degraded.labels(step.name).inc()
    service.shadow.offer(asked.query, caller, mode=asked.mode, filters=asked.filters.filters())
    note(request, model.shown_in(found.results))
    return model.as_json(found)


@routes.get("/v1/documents/{document_id}", response_model=DocumentTold, tags=["documents"])
async def document(document_id: UUID, request: Request, service: Serving, caller: Reader) -> dict[str, Any]:
    """One document with its text. What may not be read is answered like what does not exist."""
    async with ledger(service, "document", caller.tenant) as connection:
        found = await reading.read(connection, caller, document_id)
    if found is None:
        raise Problem("not-found", NOT_FOUND)
    note(request, [found.document_id])
    return {
        "document_id": str(found.document_id),
        "external_id": found.external_id,
        "source": found.source,
        "title": found.title,
        "source_url": found.source_url,
        "author": found.author,
        "media_type": found.media_type,
        "source_modified_at": found.source_modified_at.isoformat() if found.source_modified_at else None,
        "text": found.text,
    }


@routes.get("/v1/documents/{document_id}/why", response_model=StoryTold, tags=["documents"])
async def why(document_id: UUID, request: Request, service: Serving, asker: Asker, caller: Reader) -> dict[str, Any]:
    """What happened to a document, and whether it can be found: to its readers, and in full to operators of its
    tenant."""
    async with ledger(service, "why", asker.tenant) as connection:
        if asker.operator:
            told = await story.tell(connection, document_id)
            if told.document is not None and told.document.identity.tenant == asker.tenant:
                note(request, [document_id])
                return story_json(told)
        elif await reading.may_read(connection, caller, document_id):
            told = await story.tell(connection, document_id)
            if told.document is not None and told.document.alive:
                note(request, [document_id])
                return for_reader(told, caller.tags)
    raise Problem("not-found", NOT_FOUND)


@routes.get("/v1/facets", response_model=FacetsTold, tags=["search"])
async def facets(service: Serving, caller: Reader) -> FacetsTold:
    """What there is to narrow a search to, of what the caller may read. Of a large library a sample, spread
    over its sources."""
    async with ledger(service, "facets", caller.tenant) as connection:
        found = await reading.facets(connection, caller)
    return FacetsTold(sources=found.sources, authors=found.authors, media_types=found.media_types)


@routes.get("/v1/me", response_model=MeTold, tags=["service"])
async def me(asker: Asker) -> MeTold:
    """Who asks, as the service has it."""
    return MeTold(
        tenant=asker.tenant, principal=asker.principal, key=asker.key, kind=asker.kind, klass=asker.klass,
        operator=asker.operator,
    )  # fmt: skip
