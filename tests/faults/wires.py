"""A TCP proxy between the workers and a service: it cuts, delays, swallows, or refuses, as networks do."""

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
class Wire:
    """Bytes go through while ``open`` is set, ``delay_seconds`` late."""

    host: str
    port: int
    """Where new connections lead."""
    listening: int = 0
    delay_seconds: float = 0.0
    refusing: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    requests_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: what clients send does not arrive; answers still do."""
    answers_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: what clients send arrives, and no answer comes back."""
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
            (far_reader, writer, self.answers_open),
        ):
            task = asyncio.create_task(self._pump(source, sink, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                await self.open.wait()
                await way.wait()
                sink.write(data)
                await sink.drain()
        with suppress(OSError, RuntimeError):
            sink.close()
        self._ends.discard(sink)

    def cut(self) -> int:
        """Break every connection. Returns how many ends that were."""
        ends, self._ends = self._ends, set()
        for end in ends:
            end.transport.abort()
        return len(ends)

    def heal(self) -> None:
        self.delay_seconds, self.refusing = 0.0, False
        for way in (self.open, self.requests_open, self.answers_open):
            way.set()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def wired(host: str, port: int, *, listening: int = 0) -> AsyncIterator[Wire]:
    """A wire to that address. ``listening`` is the port that it listens on; 0 takes a free one."""
    wire = Wire(host, port)
    wire.heal()
    server = await asyncio.start_server(wire._accept, "127.0.0.1", listening)
    wire.listening = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        await wire.close()


BROKER_PORT = "kafka-wired"


class WiredKafka(Kafka):
    """Kafka with a second listener, which it advertises under another port than it listens on: there a test puts its
    wire. Clients that come in by it are told of no other way, so a wire holds all of their connections.

    The stack does not know the advertised port: it would give a broker that is started again another one, because
    the wire has it.
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


def wire_ports(stack: Stack) -> tuple[int, int] | None:
    """(where the broker listens, where a wire must listen); None for a stack whose Kafka has no such listener, which is
    one that ``penstock up`` started."""
    try:
        properties = (stack.home / "run" / "kafka.d" / "server.properties").read_text()
    except FileNotFoundError:
        return None
    listening, advertised = (
        re.search(rf"^{name}=.*WIRED://[^:]+:(\d+)", properties, re.MULTILINE)
        for name in ("listeners", r"advertised\.listeners")
    )
    return (int(listening[1]), int(advertised[1])) if listening and advertised else None
