"""A TCP proxy between the workers and a service: it cuts, delays, swallows, or refuses, as networks do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


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
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                await self.open.wait()
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
        self.open.set()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def wired(host: str, port: int) -> AsyncIterator[Wire]:
    wire = Wire(host, port)
    wire.heal()
    server = await asyncio.start_server(wire._accept, "127.0.0.1", 0)
    wire.listening = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        await wire.close()
