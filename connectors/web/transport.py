"""Connections to the addresses that were judged, and to no others."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable

import httpcore
import httpx

from connectors.web.addresses import Hosts, Resolver
from pipeline.core.errors import Misconfigured

LOCATION = "location"
"""The extension of a response that holds the header of this name, which is not among its headers."""


class _Pinned(httpcore.AsyncNetworkBackend):
    """Resolves a name once, judges every address, and connects to one of these very addresses: an answer of the DNS
    that changes in between changes nothing. TLS and ``Host`` still name the host, because the pool above does."""

    def __init__(self, hosts: Hosts, resolve: Resolver) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._resolve(host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("the name did not resolve in time") from error
        except OSError as error:
            raise httpcore.ConnectError("the name does not resolve") from error
        for address in addresses:
            self._hosts.check_address(host, port, address)
        failure: httpcore.ConnectError | httpcore.ConnectTimeout = httpcore.ConnectError("the name has no address")
        for tried, address in enumerate(addresses):
            share = None if deadline is None else (deadline - time.monotonic()) / (len(addresses) - tried)
            try:
                return await self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Guarded(httpx.AsyncBaseTransport):
    """Judges every request again, also those that an ``httpx.Auth`` makes by itself. No proxy: behind one, nobody
    could tell which address is asked."""

    def __init__(self, hosts: Hosts, resolve: Resolver, ssl_context: ssl.SSLContext, connections: int) -> None:
        self._hosts = hosts
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=15.0,
            network_backend=_Pinned(hosts, resolve),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises Forbidden, Misconfigured (a header that HTTP cannot carry) and httpx.TransportError."""
        self._hosts.check(request.url)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = httpcore.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        asked = httpcore.Request(
            request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except httpcore.LocalProtocolError:
            answer = None  # its text quotes the header: not even a chained exception may hold it
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise translated(error) from error
        if answer is None:
            raise Misconfigured("a header cannot be sent: is there a line end or a foreign letter in the credential?")
        # httpx would make the next request out of a Location by itself, and quote it when it cannot.
        headers = [(name, value) for name, value in answer.headers if name.lower() != b"location"]
        found = [value for name, value in answer.headers if name.lower() == b"location"]
        extensions = {**answer.extensions, LOCATION: found[0].decode("latin-1")} if found else answer.extensions
        return httpx.Response(answer.status, headers=headers, stream=_Stream(answer), extensions=extensions)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Stream(httpx.AsyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.aiter_stream():
                yield part
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise translated(error) from error

    async def aclose(self) -> None:
        await self._answer.aclose()


def translated(error: Exception) -> httpx.TransportError:
    """In httpx's words; the text is ours where the library's quotes what came over the wire."""
    if isinstance(error, httpcore.TimeoutException):
        return httpx.TimeoutException("it took too long")
    if isinstance(error, httpcore.ConnectError):
        return httpx.ConnectError(str(error) or "no connection")
    if isinstance(error, httpcore.NetworkError):
        return httpx.NetworkError("the connection broke")
    return httpx.RemoteProtocolError("the answer was cut off, or is no HTTP")
