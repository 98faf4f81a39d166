"""The HTTP server of the connectors: events, uploads and conversations.

Callers are services, each with a bearer key of which the settings hold only the SHA-256. Each body is read within
limits of size and time, and all bodies together within a limit of size.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated

import structlog
from fastapi import APIRouter, FastAPI, Header, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.routing import Route

from connectors.declared import Api, Key
from connectors.runner.activity import explained
from connectors.runner.instance import Instance
from connectors.source import Refused, Request
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.observability.traced_http import Traced
from pipeline.runtime.http_server import BodyShare, KeyedLimit, address_key

RETRY_AFTER_SECONDS = 5


class BodyRefused(Exception):
    """A body was refused, with a ``status`` (408, 413, 503) and one line."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}


class Bodies:
    """Reads the bodies of requests on one event loop. Law: the bytes in memory beyond the first UNCOUNTED_BODY_BYTES of
    each body never exceed the limits, whatever the requests declare."""

    def __init__(self, shares: KeyedLimit, on_full: Callable[[], None]) -> None:
        """shares: bytes in all and for each key. on_full: called for each request that they refuse."""
        self._shares, self._on_full = shares, on_full

    @asynccontextmanager
    async def read(self, request: HttpRequest, *, most: int, seconds: float, key: str) -> AsyncIterator[bytes]:
        """Yield the body; its bytes count until the context ends.

        most: the largest permitted size. key: the share that the bytes count against. Raises BodyRefused, and
        ClientDisconnect when the sender disconnects.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
            raise BodyRefused(413, f"a request has at most {most} bytes")
        body = bytearray()
        share = BodyShare(self._shares, key)
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for part in request.stream():
                        if len(body) + len(part) > most:
                            raise BodyRefused(413, f"a request has at most {most} bytes")
                        if share.grow(len(body) + len(part)) is not None:
                            self._on_full()
                            raise BodyRefused(503, "too many requests at once: retry shortly")
                        body += part
            except TimeoutError as error:
                raise BodyRefused(408, f"the request did not arrive within {seconds:g} s") from error
            yield bytes(body)
        finally:
            share.release()


SCHEME = "bearer "


def tenant_for(api: Api, keys: Mapping[str, Key]) -> Callable[..., str]:
    """Return a FastAPI dependency: the tenant of a caller who may use this API. It raises 401 without a known key, and
    403 for a key that may not use it."""

    def tenant(authorization: Annotated[str | None, Header()] = None) -> str:
        header = authorization or ""
        if header[: len(SCHEME)].lower() != SCHEME:
            raise HTTPException(401, "send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        key = _valid_key(header[len(SCHEME) :].strip(), keys)
        if key is None:
            raise HTTPException(401, "the key is unknown or has expired", {"WWW-Authenticate": "Bearer"})
        if api not in key.may:
            raise HTTPException(403, f"the key may not use {api}")
        return key.tenant

    return tenant


def _valid_key(secret: str, keys: Mapping[str, Key]) -> Key | None:
    """Return the key with this secret, or None if there is none or it has expired. Every hash is compared in constant
    time, so that the duration reveals nothing."""
    digest = hashlib.sha256(secret.encode()).hexdigest()
    match = None
    for key in keys.values():
        if hmac.compare_digest(digest, key.sha256):
            match = key
    return match if match is not None and match.expires > datetime.now(UTC) else None


log = structlog.get_logger()

PORT = "connectors"
"""The server's name in metrics."""
MAX_EVENT_BYTES = 1024 * 1024
EVENT_BODY_SECONDS = 10.0
"""The time for the body of an event to arrive; its sender is a server, not a person."""
EVENT_BYTES, EVENT_BYTES_PER_ADDRESS = 32 * 1024 * 1024, 8 * 1024 * 1024
"""The bytes of events in memory at once: they are read before their signature is checked."""
CONVERSATION_BYTES, CONVERSATION_BYTES_PER_TENANT = 64 * 1024 * 1024, 16 * 1024 * 1024
EVENT_SECONDS = 2.5
"""The time for a source's reaction to an event; Slack waits for three seconds."""
EVENT_LOG_SECONDS = 60.0
"""Between two lines of the log about events of one source that were refused, or that failed."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the worker that the routes of an API may use."""

    instances: Mapping[str, Instance]
    keys: Mapping[str, Key]
    producer: Producer
    metrics: Metrics

    def tenant_for(self, api: Api) -> Callable[..., str]:
        """Return a FastAPI dependency: the caller's tenant, or 401 or 403."""
        return tenant_for(api, self.keys)

    def bodies(self, max_bytes: int, max_bytes_per_key: int) -> Bodies:
        """Limit the bytes of bodies in memory, in all and for each key."""
        return Bodies(KeyedLimit(max_bytes, max_bytes_per_key), self.metrics.ports.refused.labels(PORT, "memory").inc)


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


APIS: dict[Api, Callable[[Parts], APIRouter]] = {"conversations": _conversations, "uploads": _uploads}
"""The APIs; each is served if a key may use it."""


def app(parts: Parts) -> FastAPI:
    """Create the application. Raises Misconfigured when a key names an API that this version does not have."""
    made = FastAPI(title="Penstock connectors", openapi_url=None)
    made.add_middleware(Traced)
    made.router.routes.append(_events(parts))
    for api in sorted({api for key in parts.keys.values() for api in key.may}):
        if api not in APIS:
            raise Misconfigured(f"a key may use {api!r}, which this version does not serve")
        made.include_router(APIS[api](parts))
    return made


def _events(parts: Parts) -> Route:
    """Return the route of events: a plain one, because FastAPI's has nothing to parse here, and costs a third of the
    time of an event."""
    bodies = parts.bodies(EVENT_BYTES, EVENT_BYTES_PER_ADDRESS)
    problems = _Problems()

    async def event(request: HttpRequest) -> Response:
        """Take an event of a source. The response is sent before the reaction begins."""
        request.scope["route"] = route  # names the request's span (pipeline.observability.traced_http)
        name = str(request.path_params["name"])
        instance = parts.instances.get(name)
        if instance is None:
            raise HTTPException(404, "no such connector")
        address = address_key(request.client.host if request.client else "")
        try:
            async with bodies.read(request, most=MAX_EVENT_BYTES, seconds=EVENT_BODY_SECONDS, key=address) as body:
                received = Request(dict(request.headers), dict(request.query_params), body)
                outcome, response = await _reaction(instance, received, problems)
        except BodyRefused as refused:
            raise HTTPException(refused.status, refused.detail, refused.headers) from refused
        parts.metrics.connector_events.labels(name, outcome).inc()
        return response

    route = Route("/v1/events/{name}", event, methods=["POST"])
    return route


class _Problems:
    """Events that were not accepted. Law: there is one line of the log in EVENT_LOG_SECONDS about each source and
    outcome, which says how many events it stands for: anybody may send a thousand of them a second, and fill the disk
    of the log. The metric counts each."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[tuple[str, str]] = Counter()

    def to_log(self, source: str, outcome: str) -> int:
        """Count an event. Returns how many a line of the log stands for; 0: there is to be none now."""
        key, now = (source, outcome), monotonic()
        self._unlogged[key] += 1
        if now < self._next.get(key, now):
            return 0
        self._next[key] = now + EVENT_LOG_SECONDS
        return self._unlogged.pop(key)


async def _reaction(instance: Instance, request: Request, problems: _Problems) -> tuple[str, Response]:
    try:
        async with asyncio.timeout(EVENT_SECONDS):
            reaction = await instance.on_event(request)
    except Refused as error:
        if count := problems.to_log(instance.plan.name, "refused"):
            log.warning("event_refused", source=instance.plan.name, count=count, reason=explained(error))
        return "refused", Response("the event's signature is missing or invalid\n", 401)
    except (Retryable, TimeoutError):
        return "postponed", Response("temporarily unavailable: send the event again\n", 503, {"Retry-After": "5"})
    except Exception as error:  # noqa: BLE001 # anybody may send a body that the source's code cannot read
        if count := problems.to_log(instance.plan.name, "failed"):
            log.warning("event_failed", source=instance.plan.name, count=count, error=explained(error))
        return "failed", Response("the event could not be read\n", 500)
    return "accepted", Response(reaction.answer, reaction.status, media_type=reaction.media_type)
