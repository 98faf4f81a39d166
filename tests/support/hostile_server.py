"""A server that answers each request with bytes of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def sending(sent: bytes, *, beneath: tuple[Path, Path] | None = None) -> AsyncIterator[int]:
    """Send the bytes after the first part of a request has arrived, and close the connection; the port. beneath: a
    certificate and its key: the request arrives over TLS, and the bytes are sent outside of TLS on the same
    connection, as anybody on the network can do."""
    context = None
    if beneath is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*beneath)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(65_536)
            if context is None:
                writer.write(sent)
                await writer.drain()
            else:
                with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as plain:
                    plain.send(sent)
                await reader.read()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
