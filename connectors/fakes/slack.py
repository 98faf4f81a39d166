"""A fake Slack, as far as a source needs it: the Web API, signed events, and Socket Mode.

In a test: ``fake = FakeSlack()``, ``async with served(fake.app) as url`` (pipeline.runtime.http_server); the Web API is
at ``{url}/api/``. Change ``fake.workspace``, read ``fake.requests``, and cause faults with ``fake.faults``.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import random
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.fakes.slack_methods import METHODS, Arguments, Faults, MethodContext, MethodError
from connectors.fakes.slack_workspace import APP_ID, SCOPES, Object, Workspace
from connectors.source import Request


class SocketServer:
    """The server of Socket Mode."""

    def __init__(self) -> None:
        self.connections: list[web.WebSocketResponse] = []
        self.unacknowledged: dict[str, Object] = {}
        """Envelopes by id; one that was not acknowledged is sent again to the next client that connects."""
        self.acknowledged: list[str] = []
        """Event ids, in the order of their acknowledgement."""
        self._tickets: set[str] = set()
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/link/", self._connected)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port, *_ = self._runner.addresses[0]
        self._url = f"ws://{host}:{port}/link/"

    async def stop(self) -> None:
        for connection in list(self.connections):
            await connection.close(code=WSCloseCode.GOING_AWAY)
        if self._runner:
            await self._runner.cleanup()

    def open(self) -> str:
        """Return an address that works once, as ``apps.connections.open`` does."""
        ticket = secrets.token_hex(8)
        self._tickets.add(ticket)
        return f"{self._url}?ticket={ticket}&app_id={APP_ID}"

    async def send(self, envelope: Object) -> None:
        """Send an event to one connected client, and store it until it is acknowledged."""
        id = f"e{next(self._numbers):06}"
        self.unacknowledged[id] = {
            "envelope_id": id,
            "type": "events_api",
            "payload": envelope,
            "accepts_response_payload": False,
            "retry_attempt": 0,
            "retry_reason": "",
        }
        if self.connections:
            await self.connections[0].send_json(self.unacknowledged[id])

    async def refresh(self) -> None:
        """Ask all clients to connect again, and close their connections."""
        for connection in list(self.connections):
            await connection.send_json({"type": "disconnect", "reason": "refresh_requested", "debug_info": {}})
            await connection.close(code=WSCloseCode.OK)

    async def drop(self) -> None:
        """Abort all connections without closing them."""
        for connection in list(self.connections):
            if connection._req is not None and connection._req.transport is not None:
                connection._req.transport.abort()

    async def _connected(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("ticket") not in self._tickets:
            raise web.HTTPForbidden
        self._tickets.discard(request.query["ticket"])
        connection = web.WebSocketResponse(heartbeat=30)
        await connection.prepare(request)
        self.connections.append(connection)
        try:
            hello: dict[str, Any] = {
                "type": "hello",
                "num_connections": len(self.connections),
                "connection_info": {"app_id": APP_ID},
                "debug_info": {"host": "fake", "approximate_connection_time": 18060},
            }
            await connection.send_json(hello)
            for envelope in list(self.unacknowledged.values()):
                envelope |= {"retry_attempt": envelope["retry_attempt"] + 1, "retry_reason": "timeout"}
                await connection.send_json(envelope)
            async for message in connection:
                if message.type == WSMsgType.TEXT:
                    acknowledged = self.unacknowledged.pop(json.loads(message.data).get("envelope_id"), None)
                    if acknowledged is not None:
                        self.acknowledged.append(acknowledged["payload"]["event_id"])
        finally:
            self.connections.remove(connection)
        return connection


MINUTE_SECONDS = 60.0
CLIENT_ID, CLIENT_SECRET = "4123.5678", "fake-client-secret"  # opens nothing else
TOKEN, APP_TOKEN, SIGNING_SECRET = "xoxb-fake-token", "xapp-fake-token", "fake-signing-secret"


class FakeSlack:
    """A workspace behind HTTP. ``token`` and ``app_token`` are the only valid ones; ``scopes`` are the token's."""

    def __init__(
        self,
        workspace: Workspace | None = None,
        *,
        token: str = TOKEN,
        app_token: str = APP_TOKEN,
        signing_secret: str = SIGNING_SECRET,
        scopes: Sequence[str] = SCOPES,
    ) -> None:
        self.workspace = workspace or Workspace()
        self.token, self.app_token, self.signing_secret = token, app_token, signing_secret
        self.revoked = False
        self.refresh_token: str | None = None
        """The only valid one; None: the app has no token rotation."""
        self.expired: set[str] = set()
        """Bot tokens that are valid no more."""
        self.faults = Faults()
        self.socket = SocketServer()
        self.requests: Counter[str] = Counter()
        """The number of requests by method, without those that a fault answered with 429 or 500."""
        self.context = MethodContext(self.workspace, set(scopes), self.faults)
        self._request_times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._outbox: list[Object] = []
        self.workspace.listeners.append(self._outbox.append)
        self.app = Starlette(
            routes=[
                Route("/api/{method}", self._answer, methods=["GET", "POST"]),
                Route("/files-pri/{id}/download/{name}", self._file),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.socket.start()
        try:
            yield
        finally:
            await self.socket.stop()

    # The Web API

    async def _answer(self, request: HttpRequest) -> Response:
        method = request.path_params["method"]
        if (fault := self._fault(method)) is not None:
            return fault
        self.requests[method] += 1
        arguments = await _arguments(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ") or arguments.pop("token", "")
        headers: dict[str, str] = {}
        if bearer == self.token:
            headers["x-oauth-scopes"] = ",".join(sorted(self.context.scopes))
        try:
            response = self._call(method, bearer, arguments)
        except MethodError as error:
            return JSONResponse(error.body, headers=headers)
        return JSONResponse({"ok": True, **response}, headers=headers)

    async def _file(self, request: HttpRequest) -> Response:
        """Serve a file. Whoever may not read it gets a page for signing in."""
        if (fault := self._fault("files")) is not None:
            return fault
        if self.faults.broken_files:
            return Response("upstream connect error", 500)
        self.requests["files"] += 1
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        content = self.workspace.files.get(request.path_params["id"].rpartition("-")[2])
        if bearer != self.token or "files:read" not in self.context.scopes:
            return Response("<!DOCTYPE html><html><title>Sign in | Slack</title></html>", media_type="text/html")
        return Response(status_code=404) if content is None else Response(content[0], media_type=content[1])

    def install_in_organization(self, *others: Workspace) -> None:
        """Make the token one of an organisation with these workspaces and ``workspace``."""
        self.context.organization = {team.team_id: team for team in (self.workspace, *others)}
        for other in others:
            other.listeners.append(self._outbox.append)

    def turn_on_rotation(self) -> str:
        """Let the bot's token expire after twelve hours. Returns the first refresh token."""
        self.refresh_token = f"xoxe-1-{secrets.token_hex(8)}"
        return self.refresh_token

    def _rotate(self, arguments: Arguments) -> Object:
        if arguments.get("client_id") != CLIENT_ID:
            raise MethodError("invalid_client_id")
        if arguments.get("client_secret") != CLIENT_SECRET:
            raise MethodError("bad_client_secret")
        if arguments.get("grant_type") != "refresh_token" or arguments.get("refresh_token") != self.refresh_token:
            raise MethodError("invalid_refresh_token")
        self.expired.add(self.token)
        self.token = f"xoxe.xoxb-1-{secrets.token_hex(8)}"
        return {
            "access_token": self.token,
            "token_type": "bot",
            "expires_in": 43_200,
            "refresh_token": self.turn_on_rotation(),
            "scope": ",".join(sorted(self.context.scopes)),
        }

    def _call(self, method: str, bearer: str, arguments: Arguments) -> Object:
        if method == "oauth.v2.access" and self.refresh_token is not None:
            return self._rotate(arguments)
        if method == "apps.connections.open":
            self._authenticate(bearer, self.app_token)
            return {"url": self.socket.open()}
        self._authenticate(bearer, self.token)
        if error := self.faults.broken.get(method):
            raise MethodError(error)
        if method not in METHODS:
            raise MethodError("unknown_method", req_method=method)
        return METHODS[method](self.context, arguments)

    def _authenticate(self, bearer: str, expected: str) -> None:
        if not bearer:
            raise MethodError("not_authed")
        if bearer in self.expired:
            raise MethodError("token_expired")
        if bearer != expected:
            raise MethodError("not_allowed_token_type" if bearer in (self.token, self.app_token) else "invalid_auth")
        if self.revoked:
            raise MethodError("token_revoked")

    def _fault(self, method: str) -> Response | None:
        now, times = self.workspace.clock(), self._request_times[method]
        while times and times[0] <= now - MINUTE_SECONDS:
            times.popleft()
        over = len(times) >= self.faults.limits.get(method, len(times) + 1)
        if self.faults.throttled > 0 or over:
            wait = int(times[0] + MINUTE_SECONDS - now) + 1 if over else self.faults.retry_after
            self.faults.throttled = max(0, self.faults.throttled - 1)
            return JSONResponse({"ok": False, "error": "ratelimited"}, 429, headers={"retry-after": str(wait)})
        if self.faults.failing > 0:
            self.faults.failing -= 1
            return Response("upstream connect error", 500)
        times.append(now)
        return None

    def expire_cursors(self) -> None:
        self.context.cursors.clear()

    # Events

    def sent(self) -> list[Request]:
        """Return the events of the Events API since the last call, signed now."""
        envelopes, self._outbox[:] = list(self._outbox), []
        return [self.signed(envelope) for envelope in envelopes]

    def drop_events(self) -> int:
        """Drop the pending events, as if they were never delivered; returns how many."""
        count = len(self._outbox)
        self._outbox.clear()
        return count

    def sent_twice_shuffled(self, seed: int) -> list[Request]:
        """Return the events as ``sent`` does, but each twice (the second one a retry) and in a random order."""
        envelopes, self._outbox[:] = list(self._outbox), []
        requests = [self.signed(envelope, retry=retry) for envelope in envelopes for retry in (0, 1)]
        random.Random(seed).shuffle(requests)  # noqa: S311 — an order, no secret
        return requests

    async def deliver_to_socket(self) -> int:
        """Send the pending events over Socket Mode instead; returns how many."""
        envelopes, self._outbox[:] = list(self._outbox), []
        for envelope in envelopes:
            await self.socket.send(envelope)
        return len(envelopes)

    def challenge(self) -> Request:
        """Return the request that Slack sends once to verify the address of the events."""
        return self.signed(
            {"token": "unused", "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmd", "type": "url_verification"}
        )

    def rate_limited(self) -> Request:
        """Return the event that Slack sends after 30,000 events in an hour, when it sends no more."""
        at = int(self.workspace.clock())
        return self.signed(
            {
                "token": "unused",
                "type": "app_rate_limited",
                "team_id": self.workspace.team_id,
                "minute_rate_limited": at - at % 60,
                "api_app_id": APP_ID,
            }
        )

    def signed(self, envelope: Object, *, retry: int = 0, at: float | None = None) -> Request:
        """Sign an event (docs.slack.dev/authentication/verifying-requests-from-slack); ``at`` is the signature's time,
        in seconds since 1970."""
        body = json.dumps(envelope).encode()
        timestamp = str(int(self.workspace.clock() if at is None else at))
        digest = hmac.new(self.signing_secret.encode(), b"v0:" + timestamp.encode() + b":" + body, hashlib.sha256)
        headers = {
            "content-type": "application/json",
            "x-slack-request-timestamp": timestamp,
            "x-slack-signature": f"v0={digest.hexdigest()}",
        }
        if retry:
            headers |= {"x-slack-retry-num": str(retry), "x-slack-retry-reason": "http_timeout"}
        return Request(headers, {}, body)


async def _arguments(request: HttpRequest) -> Arguments:
    """Return the arguments of the query, a form or a JSON body, all as text."""
    arguments: dict[str, Any] = dict(request.query_params)
    if request.method == "POST":
        if request.headers.get("content-type", "").startswith("application/json"):
            arguments |= json.loads(await request.body() or b"{}")
        else:
            arguments |= dict(await request.form())
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in arguments.items()}
