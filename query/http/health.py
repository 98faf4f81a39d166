"""The routes /livez, /readyz and /metrics, for machines and without authentication.

Live: the event loop runs. Ready: the ledger, which verifies all results, responds, and the model has been loaded or has
failed to load. Without Elasticsearch or the model, the service is degraded but ready: partial results are better than a
restart.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from pipeline.core.errors import Fenced, IndexFenced, PenstockError
from pipeline.ledger import generations
from pipeline.runtime.tasks import time_limit
from pipeline.stores.elasticsearch import translated
from query.access.tenant_rows import NO_TENANT
from query.auth.authenticator import PROXY_HEADERS, Authenticator, host_name, is_loopback
from query.http.dependencies import ledger, service_of
from query.service import Service

CHECK_SECONDS = 2.0
"""The time limit for each part's check."""
CONDITION_TTL_SECONDS = 1.0
"""How long a result is reused, so that the servers are checked at most once a second."""

routes = APIRouter()


@dataclass(frozen=True, slots=True)
class Condition:
    ready: bool
    unavailable: tuple[str, ...]
    """The unavailable parts: ledger, ledger fenced, keywords, keywords fenced, model; or starting."""

    @property
    def line(self) -> str:
        if not self.unavailable:
            return "ready\n"
        return f"{'degraded' if self.ready else 'not ready'}: {', '.join(self.unavailable)}\n"


class Health:
    """The readiness checks of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._check: asyncio.Task[Condition] | None = None
        self._checked_at = float("-inf")

    async def condition(self) -> Condition:
        if self._check is None or (self._check.done() and monotonic() - self._checked_at > CONDITION_TTL_SECONDS):
            self._check = asyncio.create_task(self._check_parts(), name="readiness")
        return await asyncio.shield(self._check)

    async def _check_parts(self) -> Condition:
        service = self._service
        try:
            async with time_limit(CHECK_SECONDS, "Postgres"), ledger(service, "readiness", NO_TENANT) as connection:
                active = await generations.active(connection)
        except PenstockError as error:
            self._checked_at = monotonic()
            return Condition(False, ("ledger fenced" if isinstance(error, Fenced) else "ledger",))
        unavailable = []
        try:
            async with time_limit(CHECK_SECONDS, "Elasticsearch"):
                with translated("readiness"):
                    if not await service.es.indices.exists(index=active.keyword_index):
                        unavailable.append("keywords")
                    else:
                        await service.search.require_index(active)
        except IndexFenced:
            unavailable.append("keywords fenced")
        except PenstockError:
            unavailable.append("keywords")
        if not service.following.warm.is_set():
            unavailable.append("starting")
        elif active.name in service.following.errors:
            unavailable.append("model")
            service.following.start()  # try again: the next check sees whether it recovered
        if "starting" in unavailable:
            return Condition(False, tuple(unavailable))  # not cached: the next probe may see it ready
        self._checked_at = monotonic()
        return Condition(True, tuple(unavailable))


@routes.get("/livez", response_class=PlainTextResponse, tags=["service"])
async def live() -> str:
    """The process responds."""
    return "ok\n"


@routes.get(
    "/readyz",
    response_class=PlainTextResponse,
    tags=["service"],
    responses={
        503: {"description": "The ledger is unavailable, or the service is starting.", "content": {"text/plain": {}}}
    },
)
async def ready(request: Request) -> Response:
    """200 if searches are answered, possibly by one of the stores only (`degraded: …`)."""
    condition: Condition = await request.app.state.health.condition()
    return PlainTextResponse(condition.line, 200 if condition.ready else 503)


@routes.get("/metrics", response_class=PlainTextResponse, tags=["service"])
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format. Without credentials on this machine only; elsewhere for operators."""
    if not _is_local(request):
        authenticator: Authenticator = request.app.state.authenticator
        identity = await authenticator.authenticate(request.headers)
        if not identity.operator:
            return PlainTextResponse("operators only\n", 403)
    return Response(generate_latest(service_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    return (
        request.client is not None
        and is_loopback(request.client.host)
        and is_loopback(host_name(request.headers))  # else a web page may have pointed its own name at this machine
        and not any(name in request.headers for name in PROXY_HEADERS)
    )
