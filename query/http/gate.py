"""What every request passes, in this order: who asks → its rate and budget → its body, capped and in time → a place to
work at → the route, watched for the client's leaving. Nothing of a stranger's request is read or parsed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from traceback import extract_tb

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.core.errors import PenstockError, Retryable
from pipeline.runtime.http_server import KeyedLimit
from query import problems
from query.auth.authenticator import LOOPBACK_NAMES, Authenticator
from query.auth.identity import Who
from query.limits.budgets import Meter
from query.limits.charging import charge_to
from query.limits.concurrency import Limits, kind_of
from query.model import BadQuery
from query.problems import Problem
from query.settings import ServeSettings
from query.telemetry import QueryMetrics

log = structlog.get_logger()

GUARDED = ("/v1", "/mcp")
"""Beginnings of the paths that want to know who asks. The others show nothing of anybody's documents."""
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
BODIES_BYTES, BODIES_BYTES_PER_TENANT = 64 * 1024 * 1024, 16 * 1024 * 1024
"""Of requests that are waited for or answered, counted as they arrive: each caller may send as many at once as its rate
lets it. A few of the longest fit in any case."""
LINGER_TIMES = 16
PROBES = frozenset({"/livez", "/readyz"})
"""Whoever orchestrates asks by address, and learns two words."""
QUIET = PROBES | {"/metrics"}
"""Asked every few seconds by machines: counted, not logged."""


_AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:@/\[\]\s]+))(?::\d*)?")
"""A Host header's value."""


class _ClientLeft(Exception):
    """The connection was closed, or nobody takes what we send."""


@dataclass(slots=True)
class _Exchange:
    """One request and what became of it."""

    began: float
    status: int | None = None
    who: Who | None = None
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
        of = {401: "unauthorized", 429: "limited", 500: "failed", 503: "unavailable", 504: "unavailable"}
        return of.get(self.status, "refused" if self.status < 500 else "failed")


class _Room:
    """What one request's body takes of the memory for all."""

    def __init__(self, bodies: KeyedLimit, tenant: str, metrics: QueryMetrics) -> None:
        self._bodies, self._tenant, self._metrics = bodies, tenant, metrics
        self._taken = 0

    def take(self, size: int) -> None:
        """Raises Problem (429, 503)."""
        lacking = self._bodies.lacks(self._tenant, size)
        if lacking is not None:
            self._metrics.shed.labels("memory").inc()
            kind: problems.Kind = "over-share" if lacking == "address" else "busy"
            whose = "of this tenant " if lacking == "address" else ""
            raise Problem(
                kind, f"request bodies {whose}exceed the memory for them: retry soon", headers={"Retry-After": "1"}
            )
        self._bodies.take(self._tenant, size)
        self._taken += size

    def leave(self) -> None:
        self._bodies.give(self._tenant, self._taken)
        self._taken = 0


class Gate:
    """ASGI middleware, the outermost. ``scope["state"]["who"]`` is the caller where the path is guarded."""

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
        self._bodies = KeyedLimit(max(BODIES_BYTES, 8 * longest), max(BODIES_BYTES_PER_TENANT, 2 * longest))
        self._hosts: Collection[str] = settings.allowed_hosts or (
            LOOPBACK_NAMES if authenticator.development else ()  # a name that was rebound to loopback is no proof
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
                _guard(MutableHeaders(scope=message), guarded=_is_guarded(scope["path"]))
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    await send(message)
            except TimeoutError as error:
                raise _ClientLeft from error

        try:
            await self._handle(scope, receive, sending, exchange)
        except (_ClientLeft, asyncio.CancelledError):
            # Cancelled is what the server does to the requests that outlive its grace when it stops; this is the
            # outermost call of the request's own task, and whoever it works for is told by the cut connection.
            exchange.left = True
        except Exception as error:  # noqa: BLE001 # whatever it is: an answer of ours, and a line in the log
            if not isinstance(error, Problem | BadQuery):  # theirs to mend
                _log(error, scope)
            problem = problems.of(error)
            exchange.shed = problem.kind == "busy"
            if exchange.status is not None:
                exchange.status = problem.status  # half an answer is out: the server cuts it off
            else:
                with suppress(_ClientLeft):
                    await problem.response()(scope, receive, sending)
        finally:
            self._record(scope, exchange)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        headers = Headers(scope=scope)
        if self._hosts and scope["path"] not in PROBES and _host(headers) not in self._hosts:
            raise Problem("bad-request", "unknown host name in the Host header")
        if not _is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        exchange.who = scope["state"]["who"] = await self._authenticator.authenticate(headers)
        structlog.contextvars.bind_contextvars(tenant=exchange.who.tenant)  # of this request's task alone
        self._limits.count(exchange.who)
        kind = kind_of(scope["path"])
        account = await self._meter.admit(exchange.who, kind)
        room = _Room(self._bodies, exchange.who.tenant, self._metrics)
        try:
            body = await self._body(headers, receive, room)
            async with self._limits.place(exchange.who, kind) as scope["state"]["place"]:
                charge_to(account.charge)  # in this request's task alone
                await _while_connected(self._app, scope, body, receive, send)
        except Problem:
            account.close(refund=True)
            raise
        finally:
            room.leave()
            account.close()

    async def _body(self, headers: Headers, receive: Receive, room: _Room) -> bytes:
        """Raises Problem (408, 413, 429, 503) or _ClientLeft."""
        most = self._settings.max_body_bytes
        declared = headers.get("content-length", "0")
        is_large = declared.isdecimal() and int(declared[:20]) > most
        body, discarded = bytearray(), 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    part = message.get("body", b"")
                    if is_large or len(body) + len(part) > most:
                        is_large = True
                        body.clear()
                        discarded += len(part)
                    else:
                        room.take(len(part))
                        body += part
                    is_over = not message.get("more_body", False)
                    # Who is cut off in the middle of sending never reads why: some of the rest is taken and dropped.
                    if is_large and (is_over or discarded > LINGER_TIMES * most):
                        raise Problem(
                            "too-large", f"the request body exceeds {most} bytes", headers={"Connection": "close"}
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
        who = exchange.who
        log.info(
            "request_handled",
            method=scope["method"][:16],
            route=route,
            status=exchange.status,
            outcome=exchange.outcome,
            ms=round(1000 * seconds, 1),
            caller=who and who.log_name,
            tenant=who and who.tenant,
        )


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Answer, and stop when the client leaves: what nobody waits for is not worked on. Raises _ClientLeft."""
    left = asyncio.ensure_future(_leaving(receive))
    was_sent, answered = False, False

    async def noting(message: Message) -> None:
        nonlocal answered
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    async def again() -> Message:
        nonlocal was_sent
        if not was_sent:
            was_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(left)
        return {"type": "http.disconnect"}

    work = asyncio.ensure_future(app(scope, again, noting))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not answered:  # the server says the same when a whole answer is out
            raise _ClientLeft
        await work
    finally:
        for task in (work, left):
            task.cancel()
        await asyncio.gather(work, left, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_guarded(path: str) -> bool:
    return any(path == beginning or path.startswith(f"{beginning}/") for beginning in GUARDED)


def _guard(headers: MutableHeaders, *, guarded: bool) -> None:
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
    if guarded or "cache-control" not in headers:
        headers["cache-control"] = "no-store" if guarded else "no-cache"


def _host(headers: Headers) -> str:
    """Without the port; "" where it is none."""
    match = _AUTHORITY.fullmatch(headers.get("host", "").lower())
    return (match["address"] or match["name"]) if match else ""


def _template(scope: Scope) -> str:
    """The route's path as it is declared: a label, and never an id."""
    return getattr(scope.get("route"), "path", None) or "none"


def _log(error: Exception, scope: Scope) -> None:
    """What is ours to mend, with where it happened; what the world has to heal, with its reason."""
    if isinstance(error, Retryable | TimeoutError):
        log.warning("service_unavailable", route=_template(scope), reason=str(error))
    elif isinstance(error, PenstockError):
        log.error("service_misconfigured", route=_template(scope), reason=str(error))
    else:
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
        log.error(
            "request_failed", route=_template(scope), error=type(error).__name__, at=frames
        )  # its words may quote content
