"""A proxy before a real Elasticsearch that answers some requests itself, as an overloaded server or a proxy would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, web

Fault = Callable[[str, bytes], web.Response | None]
"""(path, body) → the answer to give instead of the server's, or None."""
ELASTIC = {"x-elastic-product": "Elasticsearch"}


def answer(status: int, body: object, **headers: str) -> web.Response:
    return web.json_response(body, status=status, headers=ELASTIC | headers)


def api_error(status: int, kind: str, reason: str = "") -> web.Response:
    return answer(status, {"error": {"type": kind, "reason": reason}, "status": status})


@dataclass
class Proxy:
    upstream: str
    url: str = ""
    fault: Fault = lambda path, body: None
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """The path and the body of each request that arrived."""
    put_off: int = 0
    """So many items of the next bulk requests are not sent on but answered by 429."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.path, body))
        if (own := self.fault(request.path, body)) is not None:
            return own
        if self.put_off and request.path == "/_bulk":
            return await self._partly(request, body)
        status, text = await self._forward(request, body)
        return web.Response(status=status, body=text, content_type="application/json", headers=ELASTIC)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept")}
        async with (
            ClientSession() as session,
            session.request(request.method, self.upstream + str(request.rel_url), data=body, headers=headers) as got,
        ):
            return got.status, await got.read()

    async def _partly(self, request: web.Request, body: bytes) -> web.Response:
        """Every second item is put off, as a full write queue of one shard does it."""
        lines = body.decode().splitlines()
        groups: list[list[str]] = []
        while lines:
            groups.append([lines.pop(0)])
            if "index" in json.loads(groups[-1][0]):
                groups[-1].append(lines.pop(0))
        off = set(range(0, len(groups), 2)[: self.put_off])
        self.put_off -= len(off)
        rest = [line for n, group in enumerate(groups) if n not in off for line in group]
        items: list[object] = []
        if rest:
            _, text = await self._forward(request, ("\n".join(rest) + "\n").encode())
            items = json.loads(text)["items"]
        late = {"index": {"status": 429, "error": {"type": "es_rejected_execution_exception", "reason": "queue full"}}}
        merged = [late if n in off else items.pop(0) for n in range(len(groups))]
        return answer(200, {"errors": True, "took": 1, "items": merged})


@asynccontextmanager
async def proxied(upstream: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(upstream)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    proxy.url = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        await runner.cleanup()
