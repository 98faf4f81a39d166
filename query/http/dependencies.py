"""Dependencies of the routes: the service, the identity of the caller, its access, and connections to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from pipeline.core.publication import Publication
from pipeline.runtime.tasks import time_limit
from pipeline.stores.postgres import Connection, translated
from query.access.callers import Caller
from query.access.tenant_rows import rows_of
from query.auth.identity import Identity
from query.limits.concurrency import Slot
from query.model import AtLeast
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
MAX_HEADER_CHARACTERS = 16_000
"""The longest token in a header, of about 480 documents: a request's head has at most 24 KiB."""
AtLeastHeader = Annotated[
    str | None,
    Header(
        alias="X-Penstock-At-Least",
        max_length=MAX_HEADER_CHARACTERS,
        description="The token of a publication, as `at_least` in the body, if it is short enough for a header.",
    ),
]


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


async def wait_for_publication(
    request: Request, service: Service, caller: Caller, publications: Sequence[Publication], seconds: float
) -> tuple[Caller, AtLeast | None]:
    """Wait until the caller can see these changes, without a slot between two looks. Returns its access after that, and
    what it can see; None if there are no changes to wait for. Raises Problem (429, 503) and Retryable."""
    if not publications:
        return caller, None
    identity = identity_of(request)
    slot, now = cast(Slot, request.state.slot), asyncio.get_running_loop().time
    ends = now() + seconds

    async def pause(length: float) -> None:
        while True:
            try:
                async with slot.released():
                    await asyncio.sleep(length)
            except Problem:  # no slot is free: the next look may have one
                if now() >= ends:
                    raise
            else:
                return

    search, tenant = service.search, identity.tenant
    access = {"principals": identity.principals, "tags": identity.tags}
    seen = await search.wait_for(publications, tenant, seconds=seconds, pause=pause, **access)
    assert seen is not None
    service.metrics.at_least.labels("applied" if seen.applied else "pending").observe(seen.waited_ms / 1000)
    return await search.identify(tenant, **access), seen


def note_mode(request: Request, mode: str) -> None:
    """Note the mode of the response for the metrics."""
    request.state.mode = mode
