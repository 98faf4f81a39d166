"""The route that previews an edit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request

from query.access.callers import Caller
from query.access.still_readable import Lost, StillReadable
from query.http.audit_trail import note
from query.http.dependencies import Authenticated, Serving, caller_now, release_search
from query.http.schemas import PreviewRequest, PreviewResponse
from query.preview import model
from query.preview.model import Edit, Report
from query.preview.turns import Busy
from query.problems import Problem
from query.service import Service

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
    report = await preview(
        service,
        body.edit(),
        identity.tenant,
        lambda: caller_now(request),
        operator=identity.operator,
        principal=identity.principal if identity.has("answers") else None,
    )
    note(request, model.shown_documents(report))
    return model.as_json(report)


async def preview(
    service: Service,
    edit: Edit,
    tenant: str,
    identify: Callable[[], Awaitable[Caller]],
    *,
    operator: bool,
    principal: str | None,
) -> Report:
    """The report of an edit, in the tenant's turn. identify: returns the caller with its access at that moment, which
    is read after the wait for the turn, and again at the end. operator, principal: as of ``Previews.preview``. Raises
    Problem (503), BadQuery, Retryable, Misconfigured and TimeoutError."""
    try:
        async with service.previewing.of(tenant, WAITING_SECONDS), asyncio.timeout(SECONDS):
            caller = await identify()
            report = await service.previews.preview(edit, caller, operator=operator, principal=principal)
            await StillReadable(service.pool, identify, model.read_documents(report, tenant)).require()
    except Lost:
        detail = "access to a document of the report ended while it was made: repeat the preview"
        raise Problem("busy", detail, headers={"Retry-After": "1"}) from None
    except Busy as error:
        raise Problem("busy", "another preview is running: retry later", headers={"Retry-After": "10"}) from error
    service.metrics.previews.labels("fails" if report.fails else "passes").inc()
    return report
