"""Slack, as far as a source needs it: the Web API, signed events, and Socket Mode.

In a test: ``fake = FakeSlack()``, ``async with served(fake.app) as url`` (pipeline.runtime.http_server); the Web API is
at ``{url}/api/``. Change ``fake.workspace``; look at ``fake.requests``; spoil things with ``fake.faults``.
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
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.fakes.slack_methods import METHODS, Arguments, Desk, Failed, Faults
from connectors.fakes.slack_workspace import APP_ID, SCOPES, Object, Workspace
from connectors.source import Request


class SocketServer:
    def __init__(self) -> None:
        self.connections: list[web.WebSocketResponse] = []
        self.unacknowledged: dict[str, Object] = {}
        """Envelopes by id; what nobody has acknowledged is sent to whoever connects next."""
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
        """An address that works once, as ``apps.connections.open`` returns it."""
        ticket = secrets.token_hex(8)
        self._tickets.add(ticket)
        return f"{self._url}?ticket={ticket}&app_id={APP_ID}"

    async def send(self, envelope: Object) -> None:
        """An event, to one of those connected; kept until acknowledged."""
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
        """Asks everybody to connect anew, and hangs up."""
        for connection in list(self.connections):
            await connection.send_json({"type": "disconnect", "reason": "refresh_requested", "debug_info": {}})
            await connection.close(code=WSCloseCode.OK)

    async def drop(self) -> None:
        """Hangs up without a word."""
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
            for waiting in list(self.unacknowledged.values()):
                waiting |= {"retry_attempt": waiting["retry_attempt"] + 1, "retry_reason": "timeout"}
                await connection.send_json(waiting)
            async for message in connection:
                if message.type == WSMsgType.TEXT:
                    envelope = self.unacknowledged.pop(json.loads(message.data).get("envelope_id"), None)
                    if envelope is not None:
                        self.acknowledged.append(envelope["payload"]["event_id"])
        finally:
            self.connections.remove(connection)
        return connection


MINUTE = 60.0
TOKEN, APP_TOKEN, SIGNING_SECRET = "xoxb-fake-token", "xapp-fake-token", "fake-signing-secret"


class FakeSlack:
    """token, app_token: the only ones taken. scopes: of the token; may be changed."""

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
        self.faults = Faults()
        self.socket = SocketServer()
        self.requests: Counter[str] = Counter()
        """Answered with something else than 429 and 500, by method."""
        self.desk = Desk(self.workspace, set(scopes), self.faults)
        self._asked: defaultdict[str, deque[float]] = defaultdict(deque)
        self._outbox: list[Object] = []
        self.workspace.listeners.append(self._outbox.append)
        self.app = Starlette(
            routes=[Route("/api/{method}", self._answer, methods=["GET", "POST"])], lifespan=self._lifespan
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.socket.start()
        try:
            yield
        finally:
            await self.socket.stop()

    # The Web API

    async def _answer(self, asked: Asked) -> Response:
        method = asked.path_params["method"]
        if (spoilt := self._spoilt(method)) is not None:
            return spoilt
        self.requests[method] += 1
        arguments = await _arguments(asked)
        bearer = asked.headers.get("authorization", "").removeprefix("Bearer ") or arguments.pop("token", "")
        headers: dict[str, str] = {}
        if bearer == self.token:
            headers["x-oauth-scopes"] = ",".join(sorted(self.desk.scopes))
        try:
            answer = self._called(method, bearer, arguments)
        except Failed as failed:
            return JSONResponse(failed.answer, headers=headers)
        return JSONResponse({"ok": True, **answer}, headers=headers)

    def _called(self, method: str, bearer: str, arguments: Arguments) -> Object:
        if method == "apps.connections.open":
            self._authenticate(bearer, self.app_token)
            return {"url": self.socket.open()}
        self._authenticate(bearer, self.token)
        if error := self.faults.broken.get(method):
            raise Failed(error)
        if method not in METHODS:
            raise Failed("unknown_method", req_method=method)
        return METHODS[method](self.desk, arguments)

    def _authenticate(self, bearer: str, expected: str) -> None:
        if not bearer:
            raise Failed("not_authed")
        if bearer != expected:
            raise Failed("not_allowed_token_type" if bearer in (self.token, self.app_token) else "invalid_auth")
        if self.revoked:
            raise Failed("token_revoked")

    def _spoilt(self, method: str) -> Response | None:
        now, asked = self.workspace.clock(), self._asked[method]
        while asked and asked[0] <= now - MINUTE:
            asked.popleft()
        over = len(asked) >= self.faults.limits.get(method, len(asked) + 1)
        if self.faults.throttled > 0 or over:
            wait = int(asked[0] + MINUTE - now) + 1 if over else self.faults.retry_after
            self.faults.throttled = max(0, self.faults.throttled - 1)
            return JSONResponse({"ok": False, "error": "ratelimited"}, 429, headers={"retry-after": str(wait)})
        if self.faults.failing > 0:
            self.faults.failing -= 1
            return Response("upstream connect error", 500)
        asked.append(now)
        return None

    def expire_cursors(self) -> None:
        self.desk.cursors.clear()

    # Events

    def sent(self) -> list[Request]:
        """What the Events API has sent since the last call, signed now."""
        envelopes, self._outbox[:] = list(self._outbox), []
        return [self.signed(envelope) for envelope in envelopes]

    def lose(self) -> int:
        """Events that were never delivered; returns how many."""
        lost = len(self._outbox)
        self._outbox.clear()
        return lost

    def double_and_shuffle(self, seed: int) -> list[Request]:
        """As ``sent``, each event twice (the second one a retry), in an order of its own."""
        envelopes, self._outbox[:] = list(self._outbox), []
        requests = [self.signed(envelope, retry=retry) for envelope in envelopes for retry in (0, 1)]
        random.Random(seed).shuffle(requests)  # noqa: S311 — an order, no secret
        return requests

    async def deliver_to_socket(self) -> int:
        """What ``sent`` would return goes to Socket Mode instead; returns how many."""
        envelopes, self._outbox[:] = list(self._outbox), []
        for envelope in envelopes:
            await self.socket.send(envelope)
        return len(envelopes)

    def challenge(self) -> Request:
        """What Slack asks once, when the address of the events is entered."""
        return self.signed(
            {"token": "unused", "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmd", "type": "url_verification"}
        )

    def rate_limited(self) -> Request:
        """More than 30,000 events in an hour: the rest is not sent."""
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
        """docs.slack.dev/authentication/verifying-requests-from-slack. at: of the signature."""
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


async def _arguments(asked: Asked) -> Arguments:
    """From the query, a form, or a JSON body; all as text."""
    found: dict[str, Any] = dict(asked.query_params)
    if asked.method == "POST":
        if asked.headers.get("content-type", "").startswith("application/json"):
            found |= json.loads(await asked.body() or b"{}")
        else:
            found |= dict(await asked.form())
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()}
