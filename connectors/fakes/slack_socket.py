"""Socket Mode of the fake: a real websocket server beside the Web API, as Slack's is a host of its own.

docs.slack.dev/apis/events-api/using-socket-mode: hello first, an envelope for each event, acknowledged by its id, sent
again where it was not; ``disconnect`` before the server closes.
"""

from __future__ import annotations

import itertools
import json
import secrets
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from connectors.fakes.slack_workspace import APP_ID, Object


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
            "envelope_id": id, "type": "events_api", "payload": envelope, "accepts_response_payload": False,
            "retry_attempt": 0, "retry_reason": "",
        }  # fmt: skip
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
                "type": "hello", "num_connections": len(self.connections), "connection_info": {"app_id": APP_ID},
                "debug_info": {"host": "fake", "approximate_connection_time": 18060},
            }  # fmt: skip
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
