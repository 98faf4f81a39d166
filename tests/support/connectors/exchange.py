"""Records what a client and a fake service send each other, for tests that compare it with a published description."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Exchange:
    request: bytes = b""
    status: int = 0
    response: bytes = b""


async def recorded(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Exchange:
    """Let the application respond, and return both bodies."""
    exchange = Exchange()

    async def on_receive() -> Message:
        message = await receive()
        exchange.request += message.get("body", b"")
        return message

    async def on_send(message: Message) -> None:
        exchange.status = message.get("status", exchange.status)
        exchange.response += message.get("body", b"")
        await send(message)

    await app(scope, on_receive, on_send)
    return exchange
