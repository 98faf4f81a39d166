"""Routes of one document: its text and its processing history."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request

from pipeline.diagnosis import story
from pipeline.diagnosis.story_json import as_json as story_json
from pipeline.diagnosis.story_json import for_reader
from query.access import documents as reading
from query.http.audit_trail import note
from query.http.dependencies import Authenticated, Reader, Serving, ledger
from query.http.schemas import DocumentResponse, StoryResponse
from query.problems import Problem

routes = APIRouter()

NOT_READABLE = "the document does not exist, or this caller may not read it"


@routes.get("/v1/documents/{document_id}", response_model=DocumentResponse, tags=["documents"])
async def document(document_id: UUID, request: Request, service: Serving, caller: Reader) -> dict[str, Any]:
    """One document with its text. A document that the caller may not read is reported as not found."""
    async with ledger(service, "document", caller.tenant) as connection:
        row = await reading.read(connection, caller, document_id)
    if row is None:
        raise Problem("not-found", NOT_READABLE)
    note(request, [row.document_id])
    return {
        "document_id": str(row.document_id),
        "external_id": row.external_id,
        "source": row.source,
        "title": row.title,
        "source_url": row.source_url,
        "author": row.author,
        "media_type": row.media_type,
        "source_modified_at": row.source_modified_at.isoformat() if row.source_modified_at else None,
        "text": row.text,
    }


@routes.get("/v1/documents/{document_id}/why", response_model=StoryResponse, tags=["documents"])
async def why(
    document_id: UUID, request: Request, service: Serving, identity: Authenticated, caller: Reader
) -> dict[str, Any]:
    """The processing history of a document and whether it is searchable. Operators of its tenant see all details,
    readers fewer."""
    async with ledger(service, "why", identity.tenant) as connection:
        if identity.operator:
            report = await story.read(connection, document_id)
            if report.document is not None and report.document.identity.tenant == identity.tenant:
                note(request, [document_id])
                return story_json(report)
        elif await reading.may_read(connection, caller, document_id):
            report = await story.read(connection, document_id)
            if report.document is not None and report.document.alive:
                note(request, [document_id])
                return for_reader(report, caller.tags)
    raise Problem("not-found", NOT_READABLE)
