"""An ASGI application served by this process, in its own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

STOP_SECONDS = 5


class _Server(uvicorn.Server):
    """Signals are the process's business, not the server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: tuple[Path, Path] | None = None,
    patience_seconds: float | None = None,
) -> AsyncIterator[str]:
    """Yields the address, ``http://host:port``; port 0 finds a free one. tls: files of a certificate and its key, for
    https. patience_seconds: who takes so long to send a request's head, or takes nothing of what it is sent for so
    long, is cut off. Raises OSError when the port is taken."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        # Inherited by what is accepted. asyncio sets it only where a socket names its protocol, as this one does not:
        # a body would wait 40 ms for the client's acknowledgement of its head.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if patience_seconds is not None:
            _limit_unread(listening, patience_seconds)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False, ssl_certfile=tls and tls[0], ssl_keyfile=tls and tls[1],
            http=H11Protocol if patience_seconds is None else _impatient(patience_seconds),
        )  # fmt: skip
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            while not server.started:
                if running.done():
                    await running
                    raise OSError("the application did not start: its log says why")
                await asyncio.sleep(0.005)
            shown = f"[{host}]" if ":" in host else host
            yield f"{'https' if tls else 'http'}://{shown}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _limit_unread(listening: socket.socket, seconds: float) -> None:
    """An answer that the application has handed over waits in the transport for as long as its reader likes, and so
    does the connection: only the kernel can end that. Connections inherit it. Not every system has it."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def _impatient(seconds: float) -> type[asyncio.Protocol]:
    """The server's own protocol waits for a request's head for ever, whoever it is that sends it byte by byte."""

    class Impatient(H11Protocol):
        _giving_up: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()  # a request has arrived, and the time that its body takes is the application's business
            elif self._giving_up is None:
                self._giving_up = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

        def _stop(self) -> None:
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None

    return Impatient
