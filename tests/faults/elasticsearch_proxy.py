"""A proxy between one worker and Elasticsearch, which holds, cuts, rejects or delays bulk requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import ClientError, web

from tests.support.pipeline.es_proxy import ELASTIC, Proxy, api_error

Bulk = Literal["pass", "hold", "cut", "landed", "late", "throttle", "items", "broken"]
"""The fate of a bulk request. hold: it is forwarded and answered after ``release``. cut: it never arrives, without
a response. landed: it arrives, without a response. late: it arrives at ``release``, without a response. throttle: 429
for the request. items: 429 for some items. broken: 503."""
BULKS: tuple[Bulk, ...] = ("hold", "cut", "landed", "late", "throttle", "items", "broken")


@dataclass
class ElasticsearchProxy(Proxy):
    """The proxy of one worker. ``next_bulk`` applies to one bulk; ``bad_refreshes`` refreshes fail."""

    next_bulk: Bulk = "pass"
    bad_refreshes: int = 0
    held: list[asyncio.Event] = field(default_factory=list)
    """Events of the requests that wait for ``release``."""
    late: list[tuple[web.Request, bytes]] = field(default_factory=list)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a client waits for a response that is held."""
    fired: list[str] = field(default_factory=list)
    unanswered: bytes | None = None
    """The body of the request that was cut. aiohttp sends a PUT again by itself if a reused connection breaks; that one
    is cut as well."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.clear()
        if request.path.endswith("/_refresh") and self.bad_refreshes:
            self.bad_refreshes -= 1
            self.fired.append("refresh failed")
            return api_error(503, "unavailable_shards_exception")
        if request.path != "/_bulk":
            return await super().handle(request)
        if self.unanswered is not None and self.unanswered == await request.read():
            return self._cut(request)
        mode, self.next_bulk = self.next_bulk, "pass"
        if mode != "pass":
            self.fired.append(f"bulk {mode}")
        match mode:
            case "hold":
                released = asyncio.Event()
                self.held.append(released)
                body = await request.read()
                self.holding.set()
                await released.wait()
                status, text = await self._forward(request, body)
                return web.Response(status=status, body=text, content_type="application/json", headers=ELASTIC)
            case "throttle":
                return api_error(429, "es_rejected_execution_exception")
            case "broken":
                return api_error(503, "cluster_block_exception")
            case "items":
                self.put_off = 2
                return await super().handle(request)
            case "pass":
                return await super().handle(request)
        self.unanswered = await request.read()
        if mode == "landed":
            await self._forward(request, self.unanswered)
        elif mode == "late":
            self.late.append((request, self.unanswered))
        return self._cut(request)

    @staticmethod
    def _cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)

    async def release(self) -> int:
        """Let all held and late requests arrive. Returns their number."""
        late, self.late = self.late, []
        held, self.held = self.held, []
        self.holding.clear()
        for request, body in late:
            await self._forward(request, body)
        for event in held:
            event.set()
        return len(late) + len(held)


@asynccontextmanager
async def elasticsearch_proxy(upstream: str) -> AsyncIterator[ElasticsearchProxy]:
    es_proxy = ElasticsearchProxy(upstream)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", es_proxy.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    es_proxy.url = f"http://{host}:{port}"
    try:
        yield es_proxy
    finally:
        with suppress(ClientError, OSError):
            await es_proxy.release()
        await runner.cleanup()
