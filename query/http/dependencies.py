"""What a route is handed: who asks, what that caller may read now, a connection that is not waited for too long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, cast

from fastapi import Depends, Request

from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.auth.identity import Who
from query.limits.concurrency import Place
from query.problems import Problem
from query.service import Service


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def who_asks(request: Request) -> Who:
    """As the gate has found it (query/http/gate.py)."""
    return cast(Who, request.state.who)


async def caller_now(request: Request) -> Caller:
    """What is held at this request, by the ledger: never remembered, never the request's own word. Raises Retryable."""
    who = who_asks(request)
    return await service_of(request).search.identify(who.tenant, principals=who.principals, tags=who.tags)


async def operator(request: Request) -> Who:
    who = who_asks(request)
    if not who.operator:
        raise Problem("forbidden", "operators only")
    return who


Serving = Annotated[Service, Depends(service_of)]
Asker = Annotated[Who, Depends(who_asks)]
Reader = Annotated[Caller, Depends(caller_now)]
Operator = Annotated[Who, Depends(operator)]


@asynccontextmanager
async def ledger(service: Service, doing: str, tenant: str) -> AsyncIterator[Connection]:
    """It shows the rows of this tenant alone. Raises Retryable when it is away or late."""
    async with time_limit(service.budget.ledger, "Postgres"):
        with translated(doing):
            async with rows_of(service.pool, tenant) as connection:
                yield connection


def model_writes(request: Request) -> None:
    """An answer's passages are found: its place is free for another search."""
    cast(Place, request.state.place).written()


def note_mode(request: Request, mode: str) -> None:
    """For the metrics: how it was answered."""
    request.state.mode = mode
