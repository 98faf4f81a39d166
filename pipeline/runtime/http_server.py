"""Serves an ASGI application in this process and its event loop. This is the only module that opens HTTP ports, and it
limits the resources that a client may use before it is authenticated (ADR 50)."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache, partial
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, Literal, cast

import h11
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.observability.metrics import PortMetrics, PortRefusal
from pipeline.runtime.settings import PortSettings

INVALID = "Invalid HTTP request received."
"""The server's log message for each malformed request. It is suppressed, because strangers could fill the log with it;
the metric counts them."""
logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() != INVALID)
STOP_SECONDS = 5
IDLE_SECONDS = 5
"""How long an idle connection stays open between two requests."""
MAX_HEAD_BYTES = 24 * 1024
"""The largest request line with its headers: a token may have 16 KiB."""
PIECE_BYTES = 4 * 1024
"""The bytes that are parsed before they are measured: a hundred thousand tiny chunks in one read blocked the event loop
for seconds."""
CHUNK_SLACK_BYTES = 4 * 1024
"""The bytes that the frames of a chunked body may have beyond an eighth of it: reading a frame costs as much as reading
4 KiB."""
READS_A_TURN = 2
"""How many reads of one address are handled in a turn of the event loop. Each may begin a request: those of 128
connections in one turn kept everybody else waiting for 0.1 s at every step."""
ACCEPTS_A_TURN = 8
"""How many connections are accepted in a turn of the event loop. asyncio accepts as many as may wait for it, which kept
everybody else waiting for half a second at every step."""
WAITING_CONNECTIONS = 2048
"""How many connections the kernel keeps until they are accepted."""
READ_BYTES = 64 * 1024
"""The most that is read of a connection without TLS at once, which stays in memory while its address waits for a turn.
With TLS, asyncio reads up to 256 KiB into a buffer whose size it does not let us choose."""
PROBES = frozenset({"/livez", "/readyz"})
"""Paths that are also answered when no more connections are accepted."""
RESERVED, RESERVED_PER_ADDRESS = 128, 32
"""Connections beyond the limit, on which a health check may come. Of more, the oldest is closed, and one of the same
address if that has its share, so that an address which opens many connections closes nobody else's."""
RESERVED_SECONDS = 2.0
"""How long a reserved connection waits for its request."""
LINGER_SECONDS = 2.0
LINGER_BYTES = 1024 * 1024
"""The bytes of a refused body that are still read and discarded: a client whose connection is reset while it sends
never reads the response."""
MAX_UNREAD_BYTES, MAX_UNREAD_BYTES_PER_ADDRESS = 128 * 1024 * 1024, 64 * 1024 * 1024
"""The memory for what clients have not read yet of their responses. Each may take its time, as long as these are not
exceeded: then the response that began first is cut off, of all those of the address that has most."""
UNCOUNTED_BODY_BYTES = 32 * 1024
"""The beginning of each body, which takes nothing of the memory for bodies: most bodies are no longer, so that a few
callers with large, slow ones keep nobody else out. The number of connections bounds these bytes."""
RETRY_SECONDS = 2
ENDED = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined] # it is documented
"""A client's states after its request: the second, if that proposed another protocol (``Upgrade``, CONNECT)."""
TWO_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
"""A proxy that goes by the other one takes the end of such a request for the next one, which may be somebody else's
(RFC 9112, section 6.1)."""


class KeyedLimit:
    """A limit on the total of something, and on the amount of each key. Belongs to one event loop."""

    def __init__(self, total: int, each: int) -> None:
        self.total, self.each = total, each
        self.taken = 0
        self._by_key: Counts[str] = Counts()

    def lacks(self, key: str | None, amount: int = 1) -> Literal["connections", "address"] | None:
        """The exceeded limit; None: the amount can be taken. A key that is None has no limit of its own."""
        if key is not None and self._by_key[key] + amount > self.each:
            return "address"
        return "connections" if self.taken + amount > self.total else None

    def take(self, key: str | None, amount: int = 1) -> None:
        self.taken += amount
        if key is not None:
            self._by_key[key] += amount

    def give(self, key: str | None, amount: int = 1) -> None:
        self.taken -= amount
        if key is not None:
            self._by_key[key] -= amount
            if not self._by_key[key]:
                del self._by_key[key]


class BodyShare:
    """The share of one request's body in the memory for all bodies: its bytes beyond the first UNCOUNTED_BODY_BYTES."""

    def __init__(self, bodies: KeyedLimit, key: str) -> None:
        self._bodies, self._key = bodies, key
        self._taken_bytes = 0

    def grow(self, total_bytes: int) -> Literal["connections", "address"] | None:
        """Take what a body of so many bytes needs. Returns the exceeded limit, if nothing was taken."""
        amount = max(0, total_bytes - UNCOUNTED_BODY_BYTES) - self._taken_bytes
        if (lacking := self._bodies.lacks(self._key, amount)) is None:
            self._bodies.take(self._key, amount)
            self._taken_bytes += amount
        return lacking

    def release(self) -> None:
        self._bodies.give(self._key, self._taken_bytes)
        self._taken_bytes = 0


@lru_cache(maxsize=4096)
def address_key(host: str) -> str:
    """The key of a client's address. An IPv6 address stands for its /64 network, which one client may own."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host[:100]
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ip_network((address, 64), strict=False))
    return str(address)


class _Turns:
    """Law: in a turn of the event loop, at most READS_A_TURN reads of one address are handled; the others wait for the
    next turns, first come, first served. Belongs to one event loop."""

    def __init__(self) -> None:
        self._handled: Counts[str] = Counts()
        """By address, the reads that were handled in this turn."""
        self._waiting: dict[str, dict[_Connection, None]] = {}
        """By address, the connections that wait, the first ones first."""
        self._is_next_due = False

    def take(self, connection: _Connection, address: str | None) -> bool:
        """Whether a read may be handled now; otherwise the connection's ``take_turn`` is called later. address: None
        for one without a limit."""
        if address is None:
            return True
        if not self._is_next_due:
            self._is_next_due = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._handled[address] >= READS_A_TURN:
            self._waiting.setdefault(address, {})[connection] = None
            return False
        self._handled[address] += 1
        return True

    def leave(self, connection: _Connection, address: str | None) -> None:
        """Let a connection wait no longer, because it is closed."""
        if address is not None and (connections := self._waiting.get(address)) is not None:
            connections.pop(connection, None)
            if not connections:
                del self._waiting[address]

    def _next(self) -> None:
        self._is_next_due = False
        self._handled.clear()
        for address, connections in list(self._waiting.items()):
            for connection in list(connections)[:READS_A_TURN]:
                self.leave(connection, address)
                if not self.take(connection, address):
                    continue
                try:
                    connection.take_turn()
                except Exception as error:  # noqa: BLE001 — as asyncio does with what it calls itself
                    connection.fail(error)


class _Server(uvicorn.Server):
    """A server that leaves signals to the process."""

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
    bounds: PortSettings | None = None,
    metrics: PortMetrics | None = None,
    name: str = "http",
) -> AsyncIterator[str]:
    """Serve the application. Yields the address, ``http://host:port``; port 0 finds a free one. tls: files of a
    certificate and its key, for https. bounds: the settings' by default. name: the name of the port in metrics. Raises
    OSError when the port is taken."""
    bounds = bounds or PortSettings()
    metrics = metrics or PortMetrics(CollectorRegistry())
    door = _Door(bounds, metrics, name)
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        # Inherited by what is accepted. asyncio sets it only where a socket names its protocol, as this one does not:
        # a body would wait 40 ms for the client's acknowledgement of its head.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _limit_unread(listening, bounds.body_seconds)
        config = uvicorn.Config(
            _Requests(app, door),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=STOP_SECONDS,
            timeout_keep_alive=IDLE_SECONDS,
            server_header=False,
            ws="none",
            backlog=ACCEPTS_A_TURN,
            ssl_certfile=tls and tls[0],
            ssl_keyfile=tls and tls[1],
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            proxy_headers=bool(bounds.trusted_proxies),
            forwarded_allow_ips=list(bounds.trusted_proxies),
            http=cast("type[asyncio.Protocol]", partial(_Connection, door)),
        )
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            while not server.started:
                if running.done():
                    await running
                    raise OSError("the application did not start: see its log")
                await asyncio.sleep(0.005)
            listening.listen(WAITING_CONNECTIONS)  # asyncio has taken the number of a turn for this one, too
            shown = f"[{host}]" if ":" in host else host
            yield f"{'https' if tls else 'http'}://{shown}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _limit_unread(listening: socket.socket, seconds: float) -> None:
    """Let the kernel close connections whose client does not read its response: otherwise it would wait in the
    transport without end. Accepted connections inherit the option, which not every system has."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


class _Door:
    """Admission to one port: counts connections and requests, and refuses those beyond the limits."""

    def __init__(self, bounds: PortSettings, metrics: PortMetrics, name: str) -> None:
        self.bounds = bounds
        self.connections = KeyedLimit(bounds.connections, bounds.connections_per_address)
        self.requests = KeyedLimit(bounds.connections + RESERVED, bounds.connections_per_address)
        self.turns = _Turns()
        self._reserved: dict[str, dict[_Connection, None]] = {}
        """Reserved connections by address, the oldest first."""
        self._unread: dict[_Connection, None] = {}
        """Connections whose responses wait for their clients, the oldest first."""
        self._refused, self._name = metrics.refused, name
        self._proxies = [ip_network(network) for network in bounds.trusted_proxies]
        self.open = metrics.connections.labels(port=name)

    def share_of(self, host: str) -> str | None:
        """The key of a connection's share; None: a proxy, whose clients have a share each."""
        try:
            address = ip_address(host)
        except ValueError:
            return address_key(host)
        return None if any(address in network for network in self._proxies) else address_key(host)

    def reserve(self, connection: _Connection, address: str) -> None:
        mine = self._reserved.setdefault(address, {})
        if len(mine) >= RESERVED_PER_ADDRESS:
            next(iter(mine))._turn_away()
        elif sum(map(len, self._reserved.values())) >= RESERVED:
            fullest = max(self._reserved, key=lambda key: len(self._reserved[key]))
            next(iter(self._reserved[fullest]))._turn_away()
        self._reserved.setdefault(address, mine)[connection] = None

    def unreserve(self, connection: _Connection, address: str) -> None:
        mine = self._reserved.get(address, {})
        mine.pop(connection, None)
        if not mine:
            self._reserved.pop(address, None)

    def hold(self, connection: _Connection) -> None:
        """Note that a response waits for its client, and cut off the oldest ones if too many bytes do."""
        self._unread[connection] = None
        if connection.share is not None:
            mine = [waiting for waiting in self._unread if waiting.share == connection.share]
            while len(mine) > 1 and _unread(mine) > MAX_UNREAD_BYTES_PER_ADDRESS:
                self._cut_off(mine.pop(0))
        while len(self._unread) > 1 and _unread(self._unread) > MAX_UNREAD_BYTES:
            by_share: dict[str | None, list[_Connection]] = {}
            for waiting in self._unread:
                by_share.setdefault(waiting.share, []).append(waiting)
            fullest = max(by_share.values(), key=_unread)
            self._cut_off(next(waiting for waiting in (*fullest, *self._unread) if waiting is not connection))

    def release(self, connection: _Connection) -> None:
        self._unread.pop(connection, None)

    def _cut_off(self, connection: _Connection) -> None:
        self.release(connection)
        connection.cut_off()

    def refused(self, reason: PortRefusal) -> None:
        self._refused.labels(port=self._name, reason=reason).inc()

    def patience(self, size: int) -> float:
        """Seconds in which so many bytes must arrive or be read."""
        return self.bounds.body_seconds + size / self.bounds.bytes_per_second


def _unread(connections: Iterable[_Connection]) -> int:
    return sum(connection.unread for connection in connections)


class _Connection(H11Protocol):
    """uvicorn's protocol with limits: the original waits for ever for a request's head that arrives byte by byte, and
    does not count connections."""

    def __init__(self, door: _Door, **server: Any) -> None:
        super().__init__(**server)
        self._door = door
        self.share: str | None = None
        """The key of its address; None: it has no limit of its own."""
        self._is_inside = False
        self._timers: dict[Literal["head", "reader", "linger"], asyncio.TimerHandle] = {}
        self._head_bytes = self._frame_bytes = self._body_bytes = 0
        self._held, self._waits_for_turn = b"", False
        """The bytes that were read and not parsed yet."""
        self._discarded: int | None = None
        """Not None: the response was sent, and the rest of the request is discarded."""

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        door = self._door
        cast(Any, transport).max_size = READ_BYTES  # asyncio reads 256 KiB
        super().connection_made(cast(asyncio.Transport, _Polite(transport, self)))
        door.open.inc()
        self.share = door.share_of(self.client[0] if self.client else "")
        lacking = door.connections.lacks(self.share)
        if lacking is None:
            self._is_inside = True
            door.connections.take(self.share)
            self._limit("head", door.bounds.head_seconds, self._late)
            return
        door.refused(lacking)
        self.app = partial(_probes_alone, self.app)
        self._limit("head", min(RESERVED_SECONDS, door.bounds.head_seconds), self._late)
        door.reserve(self, address_key(self.client[0] if self.client else ""))

    def data_received(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discard(data)
            return
        self._held += data
        self._ask_for_turn()

    def take_turn(self) -> None:
        """Parse what was read, up to the end of a request that has no response yet: what follows waits for that."""
        data, self._held = self._held, b""
        if self._waits_for_turn:
            self._waits_for_turn = False
            if not self.flow.read_paused:
                self._real.resume_reading()
        while data and not self.transport.is_closing() and not self._is_answering():
            before = self.cycle
            size = min(len(data), PIECE_BYTES)
            if self._awaits_head():  # no more of it is parsed than shows that it is too large
                size = min(size, MAX_HEAD_BYTES + 1 - self._head_bytes)
                self._head_bytes += size
            waiting = len(before.body) if before is not None else 0
            piece, data = data[:size], data[size:]
            super().data_received(piece)
            if self.cycle is not before:
                self._head_bytes = self._frame_bytes = self._body_bytes = waiting = 0
                if not self.flow.write_paused:
                    self._unlimit("reader")
            self._measure(size, waiting)
        if data and not self.transport.is_closing():
            self._held = data
            self.flow.pause_reading()
        self._watch()

    def fail(self, error: Exception) -> None:
        """Report an error of ours, and end the connection, whose bytes are lost."""
        message = "Fatal error: a connection's turn failed."
        self.loop.call_exception_handler({"message": message, "exception": error, "protocol": self})
        self._real.abort()

    def eof_received(self) -> None:
        if self._discarded is not None:
            self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._held = b""
        self._door.turns.leave(self, self.share)
        self._door.release(self)
        self._leave_reserve()
        self._door.open.dec()
        if self._is_inside:
            self._is_inside = False
            self._door.connections.give(self.share)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()
        self._door.hold(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unlimit("reader")
        self._door.release(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()
        if self._awaits_head():
            self._head_bytes = len(self.conn.trailing_data[0])
        if self._held:
            self._ask_for_turn()

    # Its request

    def _ask_for_turn(self) -> None:
        self._unset_keepalive_if_required()  # with bytes that wait, it is not idle
        if self._waits_for_turn:
            return
        if self._door.turns.take(self, self.share):
            self.take_turn()
        else:
            self._waits_for_turn = True
            self._real.pause_reading()

    def _is_answering(self) -> bool:
        """Whether a whole request has come, and its response has not been sent."""
        return not self._awaits_head() and self.conn.their_state in ENDED

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "large_head", f"a request's head has at most {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(400, "malformed", "the request is not valid HTTP")

    def _leave_reserve(self) -> None:
        if not self._is_inside:
            self._door.unreserve(self, address_key(self.client[0] if self.client else ""))

    def _should_upgrade(self) -> bool:
        return False  # there are no websockets, and a request for one leaves no line in the log

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._awaits_head():
            self._unlimit("head")  # a request has arrived: _Requests looks after its body
        elif "head" not in self._timers and not self.transport.is_closing():
            self._limit("head", self._door.bounds.head_seconds, self._late)

    def _measure(self, size: int, before: int) -> None:
        """Refuse a body whose chunks are too small. before: bytes of the body that waited to be read before these."""
        if self.cycle is None or not self.cycle.more_body or self.transport.is_closing():
            return
        body = len(self.cycle.body) - before
        self._body_bytes += body
        self._frame_bytes += size - body
        if self._frame_bytes > PIECE_BYTES + CHUNK_SLACK_BYTES + self._body_bytes // 8:
            self._refuse(400, "small_chunks", "the chunks of this body are too small: send larger ones")

    def _late(self) -> None:
        if self._head_bytes or self._held:
            self._refuse(408, "slow_head", "the head of the request did not arrive in time")
        else:
            self._hang_up()  # nothing was asked

    def _turn_away(self) -> None:
        self._leave_reserve()
        if self._awaits_head():
            self._refuse(503, None, "too many connections: retry shortly")
        self._hang_up()

    def _refuse(self, status: int, reason: PortRefusal | None, detail: str) -> None:
        """Respond, if no response has begun, and close."""
        if reason is not None:
            self._door.refused(reason)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self._hang_up()
            return
        headers, body = _problem(status, detail)
        phrase = HTTPStatus(status).phrase.encode()
        head = h11.Response(status_code=status, headers=headers, reason=phrase)
        # An answer to HEAD has the header of a body and no body: one would be a protocol error, which asyncio logs.
        is_to_head = self.conn.our_state is h11.SEND_RESPONSE and self.cycle and self.cycle.scope["method"] == "HEAD"
        for event in (head, *(() if is_to_head else (h11.Data(data=body),)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing more is sent for what the application may be doing
            self.cycle.message_event.set()
        self._linger()

    # Its end

    def is_sending(self) -> bool:
        """Whether the client is in the middle of a request, or of malformed bytes."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def is_lingering(self) -> bool:
        return self._discarded is not None

    def _linger(self) -> None:
        transport = self._real
        if transport.is_closing() or self._discarded is not None:
            return
        if not transport.can_write_eof():
            transport.close()
            return
        self._discarded = 0
        for name in ("head", "reader"):
            self._unlimit(name)
        self._limit("linger", LINGER_SECONDS, self._hang_up)
        try:
            transport.write_eof()
        except OSError:  # the client is gone
            transport.abort()
            return
        transport.resume_reading()

    def _discard(self, data: bytes) -> None:
        assert self._discarded is not None
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection after the rest of the response, for a client that reads it."""
        self._real.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        if waiting := self.unread:
            self._limit("reader", self._door.patience(waiting), self.cut_off)
        else:
            self._unlimit("reader")

    @property
    def unread(self) -> int:
        """The bytes of its response that wait for the client."""
        return self._real.get_write_buffer_size()

    def cut_off(self) -> None:
        """End a response that the client does not read fast enough."""
        if self.unread:
            self._door.refused("slow_reader")
            self._real.abort()

    @property
    def _real(self) -> asyncio.Transport:
        return cast(_Polite, self.transport).transport

    def _limit(self, name: Literal["head", "reader", "linger"], seconds: float, then: Callable[[], None]) -> None:
        self._unlimit(name)

        def over() -> None:
            self._timers.pop(name, None)
            then()

        self._timers[name] = self.loop.call_later(seconds, over)

    def _unlimit(self, name: Literal["head", "reader", "linger"]) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


class _Polite:
    """The connection's transport. Its ``close`` continues to read for a moment when the client is still sending a
    request that was answered: otherwise the kernel would reset the connection, and the response would be lost
    (RFC 9112, section 9.6)."""

    def __init__(self, transport: asyncio.Transport, connection: _Connection) -> None:
        self.transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def is_closing(self) -> bool:
        return self._connection.is_lingering() or self.transport.is_closing()

    def close(self) -> None:
        if self._connection.is_lingering() or not self._connection.is_sending():
            self.transport.close()
        else:
            self._connection._linger()


async def _probes_alone(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond to a connection beyond the limit: health checks are served, all others get 503."""

    async def last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    if scope["path"] in PROBES:
        await app(scope, receive, last)
    else:
        await _answer(send, 503, "too many connections: retry shortly")


class _Requests:
    """ASGI middleware, inside the one that reads the proxies' headers: limits each address's concurrent requests, and
    the time in which the application waits for a body. A slow application cuts nobody off."""

    def __init__(self, app: ASGIApp, door: _Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        door, requests = self._door, self._door.requests
        if TWO_LENGTHS.issubset(name for name, _ in scope["headers"]):
            door.refused("malformed")
            await _answer(send, 400, "a request has either a Content-Length or a Transfer-Encoding")
            return
        address = address_key((scope.get("client") or ("",))[0])
        if scope["path"] not in PROBES and (lacking := requests.lacks(address)) is not None:
            door.refused(lacking)
            await _answer(send, 503, "too many concurrent requests from this address: retry shortly")
            return
        requests.take(address)
        try:
            body = _Body(scope, receive, send, door)
            try:
                await self._app(scope, body.receive, body.send)
            except ClientDisconnect:
                if not body.is_cut_off:
                    raise
        finally:
            requests.give(address)


class _Body:
    """A request's body as it arrives, and the response if it does not arrive in time."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, door: _Door) -> None:
        self._receive, self._send, self._door = receive, send, door
        headers = dict(scope["headers"])
        self._is_arriving = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
        self._waited = 0.0
        self._bytes = 0
        self._has_answer = self._is_late = False
        self.is_cut_off = False

    async def receive(self) -> Message:
        if self.is_cut_off:
            return {"type": "http.disconnect"}
        if not self._is_arriving:
            message = await self._receive()
        else:
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                async with asyncio.timeout(max(0.0, self._door.patience(self._bytes) - self._waited)):
                    message = await self._receive()
            except TimeoutError:
                return await self._late()
            self._waited += loop.time() - began
            self._bytes += len(message.get("body", b""))
            self._is_arriving = message["type"] == "http.request" and message.get("more_body", False)
        self.is_cut_off = message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if self._is_late:
            return  # as the server does when the client has left
        if message["type"] == "http.response.start":
            self._has_answer = True
            if self._is_arriving:  # what was not read of it is not waited for either
                message["headers"] = [
                    *((name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"),
                    (b"connection", b"close"),
                ]
        await self._send(message)

    async def _late(self) -> Message:
        self._door.refused("slow_body")
        self.is_cut_off = True
        if not self._has_answer:
            await _answer(self.send, 408, "the body of the request did not arrive in time")
        self._is_late = True
        return {"type": "http.disconnect"}


def _problem(status: int, detail: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The headers and body of a problem (RFC 9457), for a connection that is closed afterwards."""
    title = HTTPStatus(status).phrase
    body = json.dumps({"type": "about:blank", "title": title, "status": status, "detail": detail}).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    return headers, body


async def _answer(send: Send, status: int, detail: str) -> None:
    headers, body = _problem(status, detail)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
