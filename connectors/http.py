"""The HTTP side of the connectors: events, uploads and conversations.

Callers are services, each with a bearer key of which the settings hold only the SHA-256. Bodies are read within limits
of size and time, and all of them together within a limit of size.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import structlog
from fastapi import APIRouter, FastAPI, Header, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from connectors.declared import Key, Way
from connectors.runner.activity import explained
from connectors.runner.instance import Instance
from connectors.source import Refused, Request
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.observability.traced_http import Traced
from pipeline.runtime.http_server import KeyedLimit, address_key

RETRY_AFTER_SECONDS = 5


class BodyRefused(Exception):
    """``status`` (408, 413, 503) and one line."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}


class Bodies:
    """Law: what is held of bodies never exceeds the shares, whatever their requests declared. Of one event loop."""

    def __init__(self, shares: KeyedLimit, on_full: Callable[[], None]) -> None:
        """shares: bytes in all and for each key. on_full: called for each request that is turned away by them."""
        self._shares, self._on_full = shares, on_full

    @asynccontextmanager
    async def read(self, request: HttpRequest, *, most: int, seconds: float, key: str) -> AsyncIterator[bytes]:
        """Its room is given back at the end: leave when nothing of it is needed. key: whose share it is counted in.
        Raises BodyRefused, and ClientDisconnect when its sender leaves."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
            raise BodyRefused(413, f"a request has at most {most} bytes")
        body = bytearray()
        taken = 0
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for part in request.stream():
                        if len(body) + len(part) > most:
                            raise BodyRefused(413, f"a request has at most {most} bytes")
                        if self._shares.lacks(key, len(part)) is not None:
                            self._on_full()
                            raise BodyRefused(503, "too much is being sent at once: send it again in a moment")
                        self._shares.take(key, len(part))
                        taken += len(part)
                        body += part
            except TimeoutError as error:
                raise BodyRefused(408, f"the whole request has to arrive within {seconds:g} s") from error
            yield bytes(body)
        finally:
            self._shares.give(key, taken)


SCHEME = "bearer "


def tenant_for(way: Way, keys: Mapping[str, Key]) -> Callable[..., str]:
    """A FastAPI dependency: the tenant of a caller who may use this way in. 401: no key, or none of ours; 403: a key
    that may not."""

    def tenant(authorization: Annotated[str | None, Header()] = None) -> str:
        given = authorization or ""
        if given[: len(SCHEME)].lower() != SCHEME:
            raise HTTPException(401, "send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        found = _known(given[len(SCHEME) :].strip(), keys)
        if found is None:
            raise HTTPException(401, "this key is not known, or it has expired", {"WWW-Authenticate": "Bearer"})
        if way not in found.may:
            raise HTTPException(403, f"this key may not use {way}")
        return found.tenant

    return tenant


def _known(given: str, keys: Mapping[str, Key]) -> Key | None:
    """Every hash is compared, each in constant time: how long it takes tells nothing."""
    digest = hashlib.sha256(given.encode()).hexdigest()
    found = None
    for key in keys.values():
        if hmac.compare_digest(digest, key.sha256):
            found = key
    return found if found is not None and found.expires > datetime.now(UTC) else None


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
    from connectors.conversations import router

    bodies = parts.bodies(CONVERSATION_BYTES, CONVERSATION_BYTES_PER_TENANT)
    return router(parts.producer, parts.tenant_for("conversations"), bodies)


def _uploads(parts: Parts) -> APIRouter:
    from connectors.uploads.http import router
    from connectors.uploads.source import intakes

    refused = parts.metrics.uploads_refused
    return router(
        lambda tenant: intakes(parts.instances, tenant),
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
