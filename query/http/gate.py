"""The outermost middleware. A request passes, in this order: authentication → rate limit and budget → a place among the
concurrent requests of its caller → its body, limited in size and time → a slot to run in → the route, cancelled if the
client disconnects. The body of an unauthenticated request is neither read nor parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from traceback import extract_tb

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.http_server import PROBES, BodyShare, KeyedLimit
from query import problems
from query.auth.authenticator import LOOPBACK_NAMES, Authenticator, host_name
from query.auth.identity import Identity
from query.limits.budgets import Meter
from query.limits.charging import charge_to
from query.limits.concurrency import Limits, Slot, kind_of
from query.model import BadQuery
from query.problems import Problem
from query.settings import ServeSettings
from query.telemetry import QueryMetrics

log = structlog.get_logger()

GUARDED = ("/v1", "/mcp")
"""Prefixes of the paths that require authentication. The other paths return nothing from documents."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
MAX_BODIES_BYTES, MAX_TENANT_BODIES_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""The memory for the bodies of all running and waiting requests. Without it, each caller could send as many bodies at
once as its rate limit permits. It is raised if necessary, so that a few bodies of maximum size always fit."""
MAX_DISCARDED_BODIES = 16
"""How many times the maximum size of a body is read and discarded, so that the client reads the refusal."""
LOOK_SECONDS, MISSES = 2.0, 2
"""How often the API key of a request that runs for longer is looked for in its file, and how often in a row it must be
missing: a file may be read while it is written."""
QUIET = PROBES | {"/metrics"}
"""Paths that machines request every few seconds: counted, but not logged."""


class _ClientLeft(Exception):
    """The client closed the connection or does not read the response."""


@dataclass(slots=True)
class _Exchange:
    """One request and its outcome."""

    began: float
    status: int | None = None
    identity: Identity | None = None
    left: bool = False
    shed: bool = False

    @property
    def outcome(self) -> str:
        if self.left or self.status is None:
            return "cancelled"
        if self.shed:
            return "shed"
        if self.status < 400:
            return "ok"
        outcomes = {401: "unauthorized", 429: "limited", 500: "failed", 503: "unavailable", 504: "unavailable"}
        return outcomes.get(self.status, "refused" if self.status < 500 else "failed")


class Gate:
    """The outermost ASGI middleware. It stores the caller of a guarded path in ``scope["state"]["identity"]``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        limits: Limits,
        meter: Meter,
        metrics: QueryMetrics,
        settings: ServeSettings,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limits = limits
        self._meter = meter
        self._metrics = metrics
        self._settings = settings
        longest = settings.max_body_bytes
        self._bodies = KeyedLimit(max(MAX_BODIES_BYTES, 8 * longest), max(MAX_TENANT_BODIES_BYTES, 2 * longest))
        self._hosts: Collection[str] = settings.allowed_hosts or (
            LOOPBACK_NAMES if authenticator.development else ()  # against DNS rebinding
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets: uvicorn answers 403
        scope["state"] = dict(scope.get("state", {}))
        exchange = _Exchange(perf_counter())

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                _set_headers(MutableHeaders(scope=message), guarded=_is_guarded(scope["path"]))
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    await send(message)
            except TimeoutError as error:
                raise _ClientLeft from error

        try:
            await self._handle(scope, receive, sending, exchange)
        except (_ClientLeft, asyncio.CancelledError):
            # The server cancels requests that outlive its grace period when it stops. This is the outermost call of the
            # request's own task, and the client sees the closed connection.
            exchange.left = True
        except Exception as error:  # noqa: BLE001 # every error becomes a problem response and a log line
            if not isinstance(error, Problem | BadQuery):  # the client's errors
                _log(error, scope)
            problem = problems.of(error)
            exchange.shed = problem.kind == "busy"
            if exchange.status is not None:
                exchange.status = problem.status  # a part is sent already: the server closes the connection
            else:
                with suppress(_ClientLeft):
                    await problem.response()(scope, receive, sending)
        finally:
            self._record(scope, exchange)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        headers = Headers(scope=scope)
        if self._hosts and scope["path"] not in PROBES and host_name(headers) not in self._hosts:
            raise Problem("bad-request", "unknown host name in the Host header")
        if "\n" in scope["path"]:  # "/mcp\n" is a path of the route /mcp, and none that is guarded
            raise Problem("not-found", "no such path")
        if not _is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        exchange.identity = scope["state"]["identity"] = await self._authenticator.authenticate(headers)
        structlog.contextvars.bind_contextvars(tenant=exchange.identity.tenant)  # only in this request's task
        if not exchange.identity.may_use(scope["path"]):
            raise Problem("forbidden", "this service may not do that on behalf of people: see its scopes")
        self._limits.count(exchange.identity)
        kind = kind_of(scope["path"])
        account = await self._meter.admit(exchange.identity, kind)
        share = BodyShare(self._bodies, exchange.identity.tenant)
        try:
            with self._limits.place(exchange.identity):
                async with self._in_force(headers, exchange.identity):
                    body = await self._body(headers, receive, share)
                    async with self._limits.slot(exchange.identity, kind) as slot:
                        scope["state"]["slot"] = slot
                        scope["state"]["answering"] = partial(self._answering, exchange.identity, slot)
                        charge_to(account.charge)  # only in this request's task
                        await _while_connected(self._app, scope, body, receive, send)
        except Problem:
            account.close(refund=True)
            raise
        finally:
            share.release()
            account.close()

    @asynccontextmanager
    async def _in_force(self, headers: Headers, identity: Identity) -> AsyncIterator[None]:
        """End a request, wherever it waits or how much of it was sent, soon after its API key was removed or changed:
        a streamed answer takes minutes. Raises Problem (401)."""
        loop, timer = asyncio.get_running_loop(), None
        misses = 0

        def look() -> None:
            nonlocal misses, timer
            try:
                misses = 0 if self._authenticator.is_in_force(headers, identity) else misses + 1
            except Misconfigured:
                misses += 1
            if misses == MISSES:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(LOOK_SECONDS, look)

        try:
            async with asyncio.timeout(None) as limit:
                if identity.key is not None:
                    timer = loop.call_later(LOOK_SECONDS, look)
                try:
                    yield
                finally:
                    if timer is not None:
                        timer.cancel()
        except TimeoutError:
            if misses < MISSES:
                raise
            raise Problem(
                "unauthorized",
                "the API key was removed or changed, or expired, during the request",
                headers={"WWW-Authenticate": 'Bearer realm="penstock", error="invalid_token"'},
            ) from None

    @asynccontextmanager
    async def _answering(self, identity: Identity, slot: Slot) -> AsyncIterator[None]:
        """Admit an answer within a request that was admitted as a search: a tool may have a model write one, which only
        the body says. Raises Problem (429, 503) and Retryable."""
        account = await self._meter.admit(identity, "answer")
        try:
            async with self._limits.answering(identity, slot):
                yield
        except Problem:
            account.close(refund=True)
            raise
        finally:
            account.close()

    async def _body(self, headers: Headers, receive: Receive, share: BodyShare) -> bytes:
        """The whole body. Raises Problem (408, 413, 429, 503) or _ClientLeft."""
        max_bytes = self._settings.max_body_bytes
        declared = headers.get("content-length", "0")
        is_large = declared.isdecimal() and int(declared[:20]) > max_bytes
        body, discarded = bytearray(), 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    part = message.get("body", b"")
                    if is_large or len(body) + len(part) > max_bytes:
                        is_large = True
                        body.clear()
                        discarded += len(part)
                    else:
                        if (exceeded := share.grow(len(body) + len(part))) is not None:
                            self._metrics.shed.labels("memory").inc()
                            raise _over_memory(is_tenants=exceeded == "address")
                        body += part
                    is_over = not message.get("more_body", False)
                    # A client whose connection closes while it sends never reads the reason: discard some of the rest.
                    if is_large and (is_over or discarded > MAX_DISCARDED_BODIES * max_bytes):
                        raise Problem(
                            "too-large", f"the request body exceeds {max_bytes} bytes", headers={"Connection": "close"}
                        )
                    if is_over:
                        return bytes(body)
        except TimeoutError as error:
            raise Problem(
                "slow-request",
                f"the request body did not arrive within {self._settings.body_seconds:g} s",
                headers={"Connection": "close"},
            ) from error

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        route, seconds = _template(scope), perf_counter() - exchange.began
        state = scope["state"]
        self._metrics.requests.labels(route, exchange.outcome).inc()
        self._metrics.seconds.labels(route, state.get("mode", "")).observe(seconds)
        if scope["path"] in QUIET:
            return
        identity = exchange.identity
        log.info(
            "request_handled",
            method=scope["method"][:16],
            route=route,
            status=exchange.status,
            outcome=exchange.outcome,
            ms=round(1000 * seconds, 1),
            caller=identity and identity.log_name,
            tenant=identity and identity.tenant,
        )


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run the route, and cancel it when the client disconnects. Raises _ClientLeft."""
    left = asyncio.ensure_future(_disconnected(receive))
    was_sent, answered = False, False

    async def send_and_note(message: Message) -> None:
        nonlocal answered
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    async def receive_body() -> Message:
        nonlocal was_sent
        if not was_sent:
            was_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(left)
        return {"type": "http.disconnect"}

    work = asyncio.ensure_future(app(scope, receive_body, send_and_note))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not answered:  # also sent after a whole response
            raise _ClientLeft
        await work
    finally:
        for task in (work, left):
            task.cancel()
        await asyncio.gather(work, left, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _over_memory(*, is_tenants: bool) -> Problem:
    kind: problems.Kind = "over-share" if is_tenants else "busy"
    whose = "of this tenant " if is_tenants else ""
    detail = f"request bodies {whose}exceed their memory limit: retry shortly"
    return Problem(kind, detail, headers={"Retry-After": "1"})


def _is_guarded(path: str) -> bool:
    return any(path == beginning or path.startswith(f"{beginning}/") for beginning in GUARDED)


def _set_headers(headers: MutableHeaders, *, guarded: bool) -> None:
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
    if guarded or "cache-control" not in headers:
        headers["cache-control"] = "no-store" if guarded else "no-cache"


def _template(scope: Scope) -> str:
    """The route's declared path, which is a label without ids."""
    return getattr(scope.get("route"), "path", None) or "none"


def _log(error: Exception, scope: Scope) -> None:
    """Log an error: an outage with its reason, an unexpected error with the place where it happened."""
    if isinstance(error, Retryable | TimeoutError):
        log.warning("service_unavailable", route=_template(scope), reason=str(error))
    elif isinstance(error, PenstockError):
        log.error("service_misconfigured", route=_template(scope), reason=str(error))
    else:
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
        # The message is not logged, because it may quote content.
        log.error("request_failed", route=_template(scope), error=type(error).__name__, at=frames)
