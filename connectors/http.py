"""The HTTP side of the connectors: events of sources, and the ways in that services use (uploads, conversations)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from connectors.bodies import Bodies, BodyRefused
from connectors.declared import Key, Way
from connectors.runner.activity import explained
from connectors.runner.instance import Instance
from connectors.serving_auth import tenant_for
from connectors.source import Refused, Request
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.serving import KeyedLimit, address_key
from pipeline.telemetry import Metrics
from pipeline.traced.http import Traced
from topics.producer import Producer

log = structlog.get_logger()

PORT = "connectors"
"""Its name in metrics."""
MAX_EVENT_BYTES = 1024 * 1024
EVENT_BODY_SECONDS = 10.0
"""For an event to arrive: who sends one is a server."""
EVENT_BYTES, EVENT_BYTES_PER_ADDRESS = 32 * 1024 * 1024, 8 * 1024 * 1024
"""Of events at once: they are read before it is known whether their signature holds."""
CONVERSATION_BYTES, CONVERSATION_BYTES_PER_TENANT = 64 * 1024 * 1024, 16 * 1024 * 1024
EVENT_SECONDS = 2.5
"""Slack gives up after three."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a way in may build on."""

    instances: Mapping[str, Instance]
    keys: Mapping[str, Key]
    producer: Producer
    metrics: Metrics

    def tenant_for(self, way: Way) -> Callable[..., str]:
        """A FastAPI dependency: the caller's tenant, or 401 or 403."""
        return tenant_for(way, self.keys)

    def bodies(self, total: int, each: int) -> Bodies:
        """So many bytes of bodies at once, in all and for each key."""
        return Bodies(KeyedLimit(total, each), self.metrics.ports.refused.labels(PORT, "memory").inc)


def _conversations(parts: Parts) -> APIRouter:
    from connectors.conversations.api import router

    bodies = parts.bodies(CONVERSATION_BYTES, CONVERSATION_BYTES_PER_TENANT)
    return router(parts.producer, parts.tenant_for("conversations"), bodies)


def _uploads(parts: Parts) -> APIRouter:
    from connectors.uploads.http import router
    from connectors.uploads.source import desks

    refused = parts.metrics.uploads_refused
    return router(
        lambda tenant: desks(parts.instances, tenant),
        parts.tenant_for("uploads"),
        lambda source, reason: refused.labels(source, reason).inc(),
    )


WAYS: dict[Way, Callable[[Parts], APIRouter]] = {"conversations": _conversations, "uploads": _uploads}
"""Ways in, mounted where a key may use them. Whoever adds one adds a line."""


def app(parts: Parts) -> FastAPI:
    """Raises Misconfigured when a key names a way in that this version has not."""
    made = FastAPI(title="Penstock connectors", openapi_url=None)
    made.add_middleware(Traced)
    made.include_router(_events(parts))
    for way in sorted({way for key in parts.keys.values() for way in key.may}):
        if way not in WAYS:
            raise Misconfigured(f"a key may use {way!r}, which this version does not serve")
        made.include_router(WAYS[way](parts))
    return made


def _events(parts: Parts) -> APIRouter:
    routes = APIRouter(prefix="/v1/events", tags=["events"])
    bodies = parts.bodies(EVENT_BYTES, EVENT_BYTES_PER_ADDRESS)

    @routes.post("/{name}")
    async def event(name: str, request: HttpRequest) -> Response:
        """What a source tells us. It is answered before anything is done about it."""
        instance = parts.instances.get(name)
        if instance is None:
            raise HTTPException(404, "no such connector")
        address = address_key(request.client.host if request.client else "")
        try:
            async with bodies.read(request, most=MAX_EVENT_BYTES, seconds=EVENT_BODY_SECONDS, key=address) as body:
                given = Request(dict(request.headers), dict(request.query_params), body)
                outcome, response = await _reaction(instance, given)
        except BodyRefused as refused:
            raise HTTPException(refused.status, refused.detail, refused.headers) from refused
        parts.metrics.connector_events.labels(name, outcome).inc()
        return response

    return routes


async def _reaction(instance: Instance, request: Request) -> tuple[str, Response]:
    try:
        async with asyncio.timeout(EVENT_SECONDS):
            reaction = await instance.on_event(request)
    except Refused as error:
        log.warning("event_refused", source=instance.plan.name, reason=explained(error))
        return "refused", Response("this event does not prove where it comes from\n", 401)
    except (Retryable, TimeoutError):
        return "postponed", Response("not now: send it again\n", 503, {"Retry-After": "5"})
    except Exception as error:  # noqa: BLE001 # what a source stumbles over here was sent by somebody
        log.warning("event_failed", source=instance.plan.name, error=explained(error))
        return "failed", Response("this event could not be read\n", 500)
    return "accepted", Response(reaction.answer, reaction.status, media_type=reaction.media_type)
