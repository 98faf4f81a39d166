"""The route that previews an edit."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from query.http.audit_trail import note
from query.http.dependencies import Authenticated, Serving, caller_now, release_search
from query.http.schemas import PreviewRequest, PreviewResponse
from query.preview import model
from query.preview.turns import Busy
from query.problems import Problem

SECONDS = 120.0
"""The time limit of a preview: its questions, and before them the embedding of the new chunks."""
WAITING_SECONDS = 50.0
"""How long a preview waits for those of other tenants: with SECONDS, less than the client waits (cli/preview.py)."""

routes = APIRouter()


@routes.post("/v1/previews", response_model=PreviewResponse, tags=["previews"])
async def previews(body: PreviewRequest, request: Request, service: Serving, identity: Authenticated) -> dict[str, Any]:
    """The answers that a proposed edit would change. The caller's standing questions, and the golden questions whose
    judged documents it may read, are asked twice: of the index as it is, and as if the edit were published. Nothing is
    stored."""
    # It takes long: it asks one question after the other, without the slot of a search.
    release_search(request)
    try:
        async with service.previewing.of(identity.tenant, WAITING_SECONDS), asyncio.timeout(SECONDS):
            # The caller's access as it is now, and not as it was before the wait.
            caller = await caller_now(request)
            own = identity.principal if identity.has("answers") else None
            report = await service.previews.preview(body.edit(), caller, operator=identity.operator, principal=own)
    except Busy as error:
        raise Problem("busy", "another preview is running: retry later", headers={"Retry-After": "10"}) from error
    service.metrics.previews.labels("fails" if report.fails else "passes").inc()
    note(request, model.shown_documents(report))
    return model.as_json(report)
