"""/livez, /readyz and /metrics: for machines, without a name.

Live: the loop turns. Ready: the ledger answers, for nothing is shown that it did not verify, and the model has answered
once or failed to. With Elasticsearch or the model away the service is degraded, and ready: half an answer is better
than a restart.
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
from query.auth.authenticator import PROXY_HEADERS, Authenticator, is_loopback
from query.http.dependencies import ledger, service_of
from query.service import Service

LOOK_SECONDS = 2.0
"""A part that takes longer to say that it is there is not."""
REMEMBERED_SECONDS = 1.0
"""However often it is asked, the servers are looked at once a second."""

routes = APIRouter()


@dataclass(frozen=True, slots=True)
class Condition:
    ready: bool
    away: tuple[str, ...]
    """Parts that do not answer: ledger, ledger fenced, keywords, keywords fenced, model; starting."""

    @property
    def line(self) -> str:
        if not self.away:
            return "ready\n"
        return f"{'degraded' if self.ready else 'not ready'}: {', '.join(self.away)}\n"


class Health:
    """One a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._looking: asyncio.Task[Condition] | None = None
        self._looked_at = float("-inf")

    async def condition(self) -> Condition:
        if self._looking is None or (self._looking.done() and monotonic() - self._looked_at > REMEMBERED_SECONDS):
            self._looking = asyncio.create_task(self._look(), name="readiness")
        return await asyncio.shield(self._looking)

    async def _look(self) -> Condition:
        service = self._service
        try:
            async with time_limit(LOOK_SECONDS, "Postgres"), ledger(service, "readiness", NO_TENANT) as connection:
                active = await generations.active(connection)
        except PenstockError as error:
            self._looked_at = monotonic()
            return Condition(False, ("ledger fenced" if isinstance(error, Fenced) else "ledger",))
        away = []
        try:
            async with time_limit(LOOK_SECONDS, "Elasticsearch"):
                with translated("readiness"):
                    if not await service.es.indices.exists(index=active.keyword_index):
                        away.append("keywords")
                    else:
                        await service.search.require_index(active)
        except IndexFenced:
            away.append("keywords fenced")
        except PenstockError:
            away.append("keywords")
        if not service.following.warm.is_set():
            away.append("starting")
        elif active.name in service.following.errors:
            away.append("model")
            service.following.start()  # what healed meanwhile shows at the next look
        if "starting" in away:
            return Condition(False, tuple(away))  # not remembered: the next question finds it ready
        self._looked_at = monotonic()
        return Condition(True, tuple(away))


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
        who = await authenticator.authenticate(request.headers)
        if not who.operator:
            return PlainTextResponse("operators only\n", 403)
    return Response(generate_latest(service_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    return (
        request.client is not None
        and is_loopback(request.client.host)
        and not any(name in request.headers for name in PROXY_HEADERS)
    )
