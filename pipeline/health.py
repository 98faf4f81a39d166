"""/livez, /readyz, /status and /metrics of a worker."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pipeline.core.errors import Misconfigured
from pipeline.settings import StreamSettings


class Measured(Protocol):
    @property
    def registry(self) -> CollectorRegistry: ...


@asynccontextmanager
async def health(
    settings: StreamSettings, metrics: Measured, is_ready: Callable[[], bool], report: Callable[[], Any]
) -> AsyncIterator[None]:
    """Serves them on settings.health_host. report: a JSON object. Raises Misconfigured when the port is taken."""

    async def live(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        up = is_ready()
        return web.Response(text="ready\n" if up else "starting\n", status=200 if up else 503)

    async def status(_: web.Request) -> web.Response:
        return web.json_response(report())

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain", charset="utf-8")

    app = web.Application()
    routes = {"/livez": live, "/readyz": ready, "/status": status, "/metrics": scrape}
    app.add_routes([web.get(path, handler) for path, handler in routes.items()])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.health_host, settings.health_port)
        await site.start()
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Misconfigured(
                f"port {settings.health_port} is taken: set PENSTOCK_STREAM_HEALTH_PORT to another (0: any)"
            ) from error
        raise
    finally:
        await runner.cleanup()
