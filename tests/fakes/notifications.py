"""The receivers of Alertmanager's notifications: a webhook, and a mail server.

The shape of the webhook's body: prometheus.io/docs/alerting/latest/configuration/#webhook_config. A body of another
version is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.fakes.faults import Fake, Faults, Refusal, Stats


@dataclass(frozen=True)
class Notification:
    receiver: str
    """The last part of the path that was called."""
    alert: str
    status: str
    """firing or resolved."""
    labels: str
    """As JSON."""


class FakeReceiver(Fake[Faults, Stats]):
    def __init__(self) -> None:
        super().__init__(["/page", "/ticket"], Faults(), Stats())
        self.notifications: list[Notification] = []

    def url(self, receiver: str) -> str:
        return f"{self.address}/{receiver}"

    def received(self, receiver: str) -> dict[str, str]:
        """The last status of each alert that was received."""
        return {notified.alert: notified.status for notified in self.notifications if notified.receiver == receiver}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if body.get("version") != "4":
            raise Refusal(400, "another version")
        for alert in body["alerts"]:
            receiver, labels = request.path.removeprefix("/"), alert["labels"]
            self.notifications.append(Notification(receiver, labels["alertname"], alert["status"], json.dumps(labels)))
        return web.Response()


@dataclass
class FakeMailServer:
    """SMTP without TLS and without authentication (RFC 5321)."""

    address: str
    messages: list[str] = field(default_factory=list)
    """Headers and body, as they came."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(line: str) -> None:
            writer.write(f"{line}\r\n".encode())
            await writer.drain()

        await say("220 mail.test")
        while command := (await reader.readline()).decode().strip().upper():
            if command == "DATA":
                await say("354 go on")
                body = await reader.readuntil(b"\r\n.\r\n")
                self.messages.append(body.decode())
            if command == "QUIT":
                await say("221 bye")
                break
            is_known = command.split()[0] in ("EHLO", "HELO", "MAIL", "RCPT", "DATA", "RSET")
            await say("250 mail.test" if is_known else "502 unknown")
        writer.close()


@asynccontextmanager
async def mail_server() -> AsyncIterator[FakeMailServer]:
    fake = FakeMailServer("")
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    host, port, *_ = server.sockets[0].getsockname()
    fake.address = f"{host}:{port}"
    async with server:
        yield fake
