"""Connections to permitted addresses only: rules over names, ports and IP addresses, applied to each connection."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import httpcore
import httpx

from connectors.errors import Forbidden, NotPublic
from pipeline.core.errors import Misconfigured

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves (host, port) to IP addresses, in the order to try them. Raises OSError when the name does not resolve."""

PORTS = {"http": 80, "https": 443}

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        # IANA's special-purpose registries, v4 then v6. Only 2000::/3 is given out to hosts at all, so that mapped
        # (::ffff:0:0/96) and local NAT64 (64:ff9b:1::/48) forms, unique local and link-local ones are outside.
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""How a host of IPv4 is called in a network that has IPv6 alone (RFC 6052): its address is the last 32 bits."""


_LOOKUPS_AT_ONCE = 32
_LOOKING_UP = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="resolver")
"""Threads of their own: a look-up cannot be ended, and its name server may be anybody's. In the threads that everything
else shares, eight of one source would keep all others from theirs."""
_lookups: dict[tuple[str, int], Future[list[str]]] = {}
"""The look-ups that have not ended: whoever asks for the same name meanwhile waits for the same one."""


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve a name as the operating system does."""
    if (lookup := _lookups.get((host, port))) is None:
        lookup = _lookups[host, port] = Future()
        lookup.set_running_or_notify_cancel()  # so that nobody who gives up ends it for the others
        _LOOKING_UP.submit(_look_up, host, port, lookup)
    return await asyncio.wrap_future(lookup)


def _look_up(host: str, port: int, lookup: Future[list[str]]) -> None:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in infos))
    except BaseException as error:  # noqa: BLE001 — whoever waits for it gets it
        _lookups.pop((host, port), None)
        lookup.set_exception(error)
    else:
        _lookups.pop((host, port), None)
        lookup.set_result(addresses)


def is_public(address: str) -> bool:
    """Whether a host on the public Internet may have the address. False for anything but a plain IP address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip in _NAT64 and not ip.scope_id:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in _UNICAST or ip.scope_id):
        return False
    return not any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)


@dataclass(frozen=True, slots=True)
class Origin:
    scheme: str
    host: str
    """In lower case, ASCII (IDNA), without the brackets of an IPv6 address."""
    port: int

    def __str__(self) -> str:
        """Return it without path and query, for people. A name from outside that does not look like a host is not
        shown."""
        if self.scheme not in PORTS or not re.fullmatch(r"[a-z0-9._:\-]{1,100}", self.host):
            return "an invalid https URL"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if PORTS[self.scheme] == self.port else f":{self.port}")


def origin(url: httpx.URL) -> Origin:
    return Origin(url.scheme, url.raw_host.decode("ascii").lower(), url.port or PORTS.get(url.scheme, 0))


class Hosts:
    """The addresses that a client may send requests to: the base address and further hosts.

    Entries of ``also`` are ``files.example.com`` (that host) or ``.example.com`` (the hosts under it), both at the
    scheme's own port and at public addresses, or ``files.corp.example:8443`` and ``127.0.0.1:1234`` (that host and
    port), which may be private because a person has named them exactly.
    """

    def __init__(self, base: httpx.URL, also: Collection[str], *, base_may_be_private: bool = True) -> None:
        """Raises Misconfigured."""
        self.base = origin(base)
        self._base_may_be_private = base_may_be_private
        self._names: set[str] = set()
        self._suffixes: set[str] = set()
        self._exact: set[tuple[str, int]] = set()
        for entry in also:
            self._add(entry)

    def _add(self, entry: str) -> None:
        try:
            parts = urlsplit(f"//{entry.lower()}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        plain = host is not None and entry.lower() in (host, f"{host}:{port}", f"[{host}]:{port}")
        if host is None or not plain or (port is not None and host.startswith(".")) or host.strip(".") == "":
            raise Misconfigured(f"{entry!r} is not a host: write files.example.com, .example.com or host:port")
        if port is not None:
            self._exact.add((host, port))
        else:
            (self._suffixes if host.startswith(".") else self._names).add(host)

    def is_base(self, url: httpx.URL) -> bool:
        """Whether the URL has the base address, to which credentials may be sent."""
        return origin(url) == self.base

    def check(self, url: httpx.URL) -> None:
        """Raise Forbidden unless requests to the URL are permitted. Its IP address is checked when it is known."""
        where = origin(url)
        if url.userinfo:
            raise Forbidden(f"{where}: a URL with a user name or password is not requested")
        if where == self.base:
            return
        if where.scheme not in PORTS or (where.scheme == "http" and self.base.scheme != "http"):
            raise Forbidden(f"{where}: only https is allowed")
        if (where.host, where.port) in self._exact:
            return
        named = where.host in self._names or any(where.host.endswith(suffix) for suffix in self._suffixes)
        if not named or where.port != PORTS[where.scheme]:
            raise Forbidden(f"{where} is neither the configured host nor another host that the connector allows")

    def check_address(self, host: str, port: int, address: str) -> None:
        """Raise Forbidden when ``host``, which resolved to ``address``, must be public and is not."""
        is_base = (host, port) == (self.base.host, self.base.port)
        named = (is_base and self._base_may_be_private) or (host, port) in self._exact
        if not named and not is_public(address):
            raise NotPublic(f"{host[:100]} resolves to an address that is not public: not requested")


LOCATION = "location"
"""The response extension that holds the header of this name, which is removed from the headers."""


SMALL_BYTES, COUNTED_PARTS = 4 * 1024, 100
PARTS_PER_SECOND = 5_000.0
"""Parts of a response that a client reads in a second where they are small, of all its connections: each of them, a
chunk of one byte, an informational response or a record of TLS, takes 15 to 40 µs of the event loop that all sources
share."""
FREE_HEAD_BYTES, HEAD_PIECE_BYTES = 8 * 1024, 4 * 1024
"""The bytes before the end of a head that are read without a pause, and those of a head that are read at once."""
INFORMATIONAL_BYTES = 18
"""The shortest informational response."""


class _TooMuch(httpcore.RemoteProtocolError):
    """The other end has sent more bytes than it may."""


class _Turns:
    """Law: the small parts that servers send take at most a fifth of the event loop, however many they send."""

    def __init__(self) -> None:
        self._read_until = 0.0
        """On time.monotonic(): when the parts so far are paid for."""

    async def wait(self, parts: float) -> None:
        now = time.monotonic()
        self._read_until = max(self._read_until, now) + parts / PARTS_PER_SECOND
        await asyncio.sleep(self._read_until - now)


class _Connection(httpcore.AsyncNetworkStream):
    """A connection whose other end may send so many bytes in response to each request. Everything counts: informational
    responses and the sizes of chunks are read as long as they come. Heads are read at a bounded pace."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, turns: _Turns, most_bytes: int | None) -> None:
        self._inner = inner
        self._turns = turns
        self._most_bytes = most_bytes
        self._received_bytes = 0
        self._is_head = True
        self.reads = 0
        self._small_parts = 0.0
        """Those that were read since the last pause."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._most_bytes is not None:
            max_bytes = min(max_bytes, self._most_bytes - self._received_bytes)
            if max_bytes <= 0:
                raise _TooMuch
        data = await self._inner.read(min(max_bytes, HEAD_PIECE_BYTES) if self._is_head else max_bytes, timeout)
        self._received_bytes += len(data)
        self.reads += 1
        # Records of TLS that have arrived together are read one by one, without a turn for anybody else.
        parts = float(len(data) < SMALL_BYTES)
        if self._is_head and self._received_bytes > FREE_HEAD_BYTES:
            parts = max(parts, len(data) / INFORMATIONAL_BYTES)
        self._small_parts += parts
        if self._small_parts >= COUNTED_PARTS:
            parts, self._small_parts = self._small_parts, 0.0
            await self._turns.wait(parts)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._received_bytes, self._is_head = 0, True
        await self._inner.write(buffer, timeout)

    def end_head(self) -> None:
        """Take what is read from now on, until the next request, for the body of the response."""
        self._is_head = False

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        return _Connection(inner, self._turns, self._most_bytes)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


class _Pinned(httpcore.AsyncNetworkBackend):
    """Resolves a name once, checks every address, and connects to one of the checked addresses, so that a DNS response
    that changes in between has no effect. TLS and ``Host`` still name the host, because the pool above sets them."""

    def __init__(self, hosts: Hosts, resolve: Resolver, turns: _Turns, response_bytes: int | None) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._turns = turns
        self._response_bytes = response_bytes
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
        except (OSError, UnicodeError) as error:  # the latter for an empty label, and for a long one
            raise httpcore.ConnectError("the name does not resolve") from error
        for address in addresses:
            self._hosts.check_address(host, port, address)
        failure: httpcore.ConnectError | httpcore.ConnectTimeout = httpcore.ConnectError("the name has no address")
        for tried, address in enumerate(addresses):
            share = None if deadline is None else (deadline - time.monotonic()) / (len(addresses) - tried)
            try:
                stream = await self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _Connection(stream, self._turns, self._response_bytes)
        raise failure

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@cache
def default_ssl_context() -> ssl.SSLContext:
    """Trusts the authorities of certifi, or those in SSL_CERT_FILE. One for the process: reading them takes 20 ms."""
    return httpx.create_ssl_context()


class Guarded(httpx.AsyncBaseTransport):
    """Checks every request, including those that an ``httpx.Auth`` makes by itself. It uses no proxy: behind one, the
    address of the server would be unknown."""

    def __init__(
        self,
        hosts: Hosts,
        resolve: Resolver,
        ssl_context: ssl.SSLContext,
        connections: int,
        *,
        response_bytes: int | None = None,
    ) -> None:
        """response_bytes: the most that a server may send in response to a request, heads included; None: any number of
        bytes."""
        self._hosts = hosts
        self._turns = _Turns()
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=connections,
            max_keepalive_connections=connections,
            keepalive_expiry=15.0,
            network_backend=_Pinned(hosts, resolve, self._turns, response_bytes),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises Forbidden, Misconfigured (a header that HTTP cannot carry) and httpx.TransportError."""
        self._hosts.check(request.url)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = httpcore.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        sent = httpcore.Request(
            request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
        )
        try:
            response = await self._pool.handle_async_request(sent)
        except httpcore.LocalProtocolError:
            response = None  # its text quotes the header: not even a chained exception may hold it
        except _FAILURES as error:
            raise translated(error) from error
        if response is None:
            raise Misconfigured("a header cannot be sent: check the credential for line ends and non-ASCII letters")
        stream = response.extensions.get("network_stream")
        if (connection := stream if isinstance(stream, _Connection) else None) is not None:
            connection.end_head()
        # httpx would build the next request from a Location by itself, and quote it when it cannot.
        headers = [(name, value) for name, value in response.headers if name.lower() != b"location"]
        targets = [value for name, value in response.headers if name.lower() == b"location"]
        extensions = {**response.extensions, LOCATION: targets[0].decode("latin-1")} if targets else response.extensions
        return httpx.Response(
            response.status,
            headers=headers,
            stream=_Stream(response, self._turns, connection),
            extensions=extensions,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Stream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, turns: _Turns, connection: _Connection | None) -> None:
        self._response = response
        self._turns = turns
        self._connection = connection

    @property
    def _reads(self) -> int:
        return self._connection.reads if self._connection is not None else 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        small_parts, reads = 0, self._reads
        try:
            async for part in self._response.aiter_stream():
                small_parts += len(part) < SMALL_BYTES and reads == self._reads  # else it was counted when it was read
                reads = self._reads
                if small_parts == COUNTED_PARTS:
                    small_parts = 0
                    await self._turns.wait(COUNTED_PARTS)
                yield part
        except _FAILURES as error:
            raise translated(error) from error

    async def aclose(self) -> None:
        await self._response.aclose()


_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError)
"""Errors that a server or the network can cause. httpcore lets an error of TLS after the handshake through."""


def translated(error: Exception) -> httpx.TransportError:
    """Return the matching error of httpx, with a text of ours where the library quotes the response."""
    if isinstance(error, httpcore.TimeoutException):
        return httpx.TimeoutException("it took too long")
    if isinstance(error, _TooMuch):
        return httpx.RemoteProtocolError("it sent without end")
    if isinstance(error, httpcore.ConnectError):
        return httpx.ConnectError(str(error) or "no connection")
    if isinstance(error, httpcore.NetworkError | ssl.SSLError):
        return httpx.NetworkError("the connection was lost")
    return httpx.RemoteProtocolError("the response was cut off, or is not HTTP")
