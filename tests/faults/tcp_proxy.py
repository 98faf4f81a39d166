"""A TCP proxy between the workers and a service, which cuts, delays, drops or refuses connections on demand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from deploy.local.kafka import Kafka
from deploy.local.service import HOST, Place, free_port
from deploy.local.stack import Stack


@dataclass
class TcpProxy:
    """A proxy that forwards bytes while ``open`` is set, ``delay_seconds`` late."""

    host: str
    port: int
    """The port that new connections are forwarded to."""
    listening: int = 0
    delay_seconds: float = 0.0
    refusing: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    requests_open: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, requests do not arrive; responses still do."""
    responses_open: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, requests arrive, and no response comes back."""
    returned_bytes: int = 0
    """Bytes of responses that have been passed on."""
    _ends: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, far_writer}
        for source, sink, way in (
            (reader, far_writer, self.requests_open),
            (far_reader, writer, self.responses_open),
        ):
            task = asyncio.create_task(self._pump(source, sink, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: asyncio.Event) -> None:
        passing = self.open
        with suppress(OSError):
            while data := await source.read(65536):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                await passing.wait()
                await way.wait()
                sink.write(data)
                await sink.drain()
                if way is self.responses_open:
                    self.returned_bytes += len(data)
        with suppress(OSError, RuntimeError):
            sink.close()
        self._ends.discard(sink)

    def strand(self) -> None:
        """Pass nothing on any more between the ends of today's connections, and leave them open; new ones work."""
        self.open.clear()
        self.open = asyncio.Event()
        self.open.set()

    def cut(self) -> int:
        """Break every connection. Returns the number of their ends."""
        ends, self._ends = self._ends, set()
        for end in ends:
            end.transport.abort()
        return len(ends)

    def clear_faults(self) -> None:
        self.delay_seconds, self.refusing = 0.0, False
        for way in (self.open, self.requests_open, self.responses_open):
            way.set()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def tcp_proxy(host: str, port: int, *, listening: int = 0) -> AsyncIterator[TcpProxy]:
    """Serve a proxy to that address. listening: the port that it listens on; 0 takes a free one."""
    proxy = TcpProxy(host, port)
    proxy.clear_faults()
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", listening)
    proxy.listening = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


BROKER_PORT = "kafka-proxied"


class ProxiedKafka(Kafka):
    """Kafka with a second listener, which it advertises under another port than it listens on: there a test puts its
    proxy. Clients of that listener learn no other address, so all of their connections go through the proxy.

    The stack does not know the advertised port: it would give a restarted broker another one, because the proxy
    already listens on it.
    """

    def __init__(self, advertised: int | None = None) -> None:
        self.advertised = advertised or free_port()

    def ports(self) -> tuple[str, ...]:
        return (*super().ports(), BROKER_PORT)

    def more_properties(self, place: Place, ports: Mapping[str, int]) -> dict[str, object]:
        client, controller = f"{HOST}:{ports['kafka']}", f"{HOST}:{ports['kafka-controller']}"
        return {
            "listeners": f"PLAINTEXT://{client},WIRED://{HOST}:{ports[BROKER_PORT]},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{client},WIRED://{HOST}:{self.advertised}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,WIRED:PLAINTEXT,CONTROLLER:PLAINTEXT",
        }


def proxy_ports(stack: Stack) -> tuple[int, int] | None:
    """Return the port that the broker listens on and the port that a proxy must listen on; None for a stack whose Kafka
    has no such listener, because ``penstock up`` started it."""
    try:
        properties = (stack.home / "run" / "kafka.d" / "server.properties").read_text()
    except FileNotFoundError:
        return None
    listening, advertised = (
        re.search(rf"^{name}=.*WIRED://[^:]+:(\d+)", properties, re.MULTILINE)
        for name in ("listeners", r"advertised\.listeners")
    )
    return (int(listening[1]), int(advertised[1])) if listening and advertised else None
