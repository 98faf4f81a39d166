"""Dependencies of the routes: the service, the identity of the caller, its access, and connections to the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, cast

from fastapi import Depends, Request

from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.auth.identity import Identity
from query.limits.concurrency import Slot
from query.problems import Problem
from query.service import Service


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def identity_of(request: Request) -> Identity:
    """The authenticated caller, which the gate has stored (query/http/gate.py)."""
    return cast(Identity, request.state.identity)


async def caller_now(request: Request) -> Caller:
    """The caller's access at this request, from the ledger, never from a cache or the request itself. Raises
    Retryable."""
    identity = identity_of(request)
    return await service_of(request).search.identify(
        identity.tenant, principals=identity.principals, tags=identity.tags
    )


async def operator(request: Request) -> Identity:
    identity = identity_of(request)
    if not identity.operator:
        raise Problem("forbidden", "operators only")
    return identity


Serving = Annotated[Service, Depends(service_of)]
Authenticated = Annotated[Identity, Depends(identity_of)]
Reader = Annotated[Caller, Depends(caller_now)]
Operator = Annotated[Identity, Depends(operator)]


@asynccontextmanager
async def ledger(service: Service, doing: str, tenant: str) -> AsyncIterator[Connection]:
    """A connection that sees only the rows of this tenant. Raises Retryable when Postgres is unavailable or slow."""
    async with time_limit(service.budget.ledger, "Postgres"):
        with translated(doing):
            async with rows_of(service.pool, tenant) as connection:
                yield connection


def release_search(request: Request) -> None:
    """Release the slot of an answer's search, because its passages are retrieved."""
    cast(Slot, request.state.slot).release_search()


def note_mode(request: Request, mode: str) -> None:
    """Note the mode of the response for the metrics."""
    request.state.mode = mode
