"""Socket Mode: events over a websocket that we open, for those who have no address on the internet.

docs.slack.dev/apis/events-api/using-socket-mode. The library's client keeps the connection; what it says of it may hold
the address with its ticket, so none of that is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from connectors.slack.api import Api
from pipeline.core.errors import Deferred, Misconfigured, Retryable

PING_SECONDS = 5.0
log = structlog.get_logger()

_silent = logging.getLogger(f"{__name__}.client")
_silent.propagate = False
_silent.disabled = True


class _Client(SocketModeClient):
    """Takes its addresses by our HTTP client, which knows the limits and the errors, and whose proxy is none."""

    def __init__(self, open_connection: Callable[[], Awaitable[str]]) -> None:
        super().__init__(app_token="", logger=_silent, ping_interval=PING_SECONDS)
        self.proxy = None
        self._open_connection = open_connection

    async def issue_new_wss_url(self) -> str:
        return await self._open_connection()


async def listen(
    api: Api, react: Callable[[Mapping[str, Any]], Awaitable[None]], connected: Callable[[], Awaitable[None]]
) -> None:
    """Until cancelled. react: given each envelope's payload, once it is acknowledged. connected: called when a
    connection stands; what happened while there was none may be lost. Raises Misconfigured when the token is refused,
    and what ``react`` and ``connected`` raise."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open_connection() -> str:
        while True:
            try:
                return str((await api.call("apps.connections.open"))["url"])
            except Deferred as error:
                await asyncio.sleep(error.retry_after or 30.0)
            except Retryable as error:
                log.warning("slack_socket_waits", source=api.name, error=str(error))
                await asyncio.sleep(error.retry_after or PING_SECONDS)
            except Misconfigured as error:
                _end(ended, error)
                raise

    async def on_request(client: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
        await client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
        if request.type != "events_api":
            return
        await guarded(react(request.payload))

    async def on_message(_: AsyncBaseSocketModeClient, message: Mapping[str, Any], __: str | None = None) -> None:
        if message.get("type") == "hello":
            await guarded(connected())

    async def guarded(work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 # raised where listen is awaited; the library would only log it
            _end(ended, error)

    client = _Client(open_connection)
    client.message_listeners.append(on_message)
    client.socket_mode_request_listeners.append(on_request)
    connecting = asyncio.create_task(client.connect())  # type: ignore[no-untyped-call]
    try:
        await ended
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        tasks = [client.message_processor, client.current_session_monitor, client.message_receiver]
        await client.close()  # type: ignore[no-untyped-call]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _end(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)
