"""Routes for contradictions between passages: the list of those that the caller may see, and decisions on them."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request

from pipeline.core.conflicts import Kind
from pipeline.ledger.conflicts import State
from query import conflicts
from query.conflicts import MOST_SOURCES
from query.http.audit_trail import note, record_change
from query.http.dependencies import Authenticated, Reader, Serving, ledger
from query.http.schemas import ConflictDecisionRequest, ConflictsResponse, Storable
from query.problems import Problem

routes = APIRouter()


@routes.get("/v1/conflicts", response_model=ConflictsResponse, tags=["conflicts"])
async def conflicting(
    request: Request,
    service: Serving,
    identity: Authenticated,
    caller: Reader,
    state: Annotated[State, Query(description="open, or those that were dismissed or accepted.")] = "open",
    kind: Annotated[list[Kind] | None, Query(description="Only these kinds. Repeatable. Default: all.")] = None,
    source: Annotated[
        list[Storable] | None,
        Query(description="Only conflicts with a document of this source. Repeatable.", max_length=MOST_SOURCES),
    ] = None,
    document: Annotated[
        Storable | None,
        Query(description="Only conflicts of the document with this id or external id.", max_length=2_000),
    ] = None,
    cursor: Annotated[str | None, Query(description="The `cursor` of the previous response.", max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=conflicts.MOST_LISTED)] = 50,
) -> dict[str, Any]:
    """Passages that contradict or repeat each other, the newest first: those of which the caller may read both."""
    async with ledger(service, "conflicts", identity.tenant) as connection:
        standing = await conflicts.visible(
            connection,
            caller,
            state=state,
            kinds=kind,
            sources=source,
            document=document,
            cursor=cursor,
            limit=limit,
        )
        quoted = await conflicts.quotes(connection, standing)
    note(request, list(dict.fromkeys(id_ for c in standing for id_ in (c.document_a, c.document_b))))
    return {
        "conflicts": [conflicts.conflict_json(conflict, quoted.get(conflict.id)) for conflict in standing],
        "cursor": conflicts.cursor_after(standing, limit),
    }


@routes.post("/v1/conflicts/{conflict_id}", status_code=204, response_model=None, tags=["conflicts"])
async def decide_conflict(
    conflict_id: UUID,
    body: ConflictDecisionRequest,
    request: Request,
    service: Serving,
    identity: Authenticated,
    caller: Reader,
) -> None:
    """Dismisses or accepts a conflict, or opens it again, for everybody. The decision holds until a passage changes."""
    async with ledger(service, "conflicts", identity.tenant) as connection:
        if not await conflicts.decide(connection, caller, conflict_id, body.decision):
            raise Problem("not-found", "no such conflict between passages that you may read")
        await record_change(request, 204)
