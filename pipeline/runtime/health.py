"""/livez, /readyz, /status and /metrics of a worker."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipeline.core.errors import Misconfigured
from pipeline.observability.metrics import PortMetrics
from pipeline.runtime.http_server import served
from pipeline.runtime.settings import Settings


class Measured(Protocol):
    @property
    def registry(self) -> CollectorRegistry: ...
    @property
    def ports(self) -> PortMetrics: ...


@asynccontextmanager
async def health(
    settings: Settings, metrics: Measured, is_ready: Callable[[], bool], report: Callable[[], Any]
) -> AsyncIterator[None]:
    """Serve the endpoints on settings.stream.health_host. report: returns the JSON object of /status. Raises
    Misconfigured when the port is taken."""

    async def live(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        up = is_ready()
        return PlainTextResponse("ready\n" if up else "starting\n", 200 if up else 503)

    async def status(_: Request) -> Response:
        return JSONResponse(report())

    async def scrape(_: Request) -> Response:
        return PlainTextResponse(generate_latest(metrics.registry))

    routes = {"/livez": live, "/readyz": ready, "/status": status, "/metrics": scrape}
    app = Starlette(routes=[Route(path, answer) for path, answer in routes.items()])
    host, port = settings.stream.health_host, settings.stream.health_port
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(
                served(app, host, port, bounds=settings.ports, metrics=metrics.ports, name="health")
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Misconfigured(
                    f"port {port} is taken: set PENSTOCK_STREAM_HEALTH_PORT to another (0: any)"
                ) from error
            raise
        yield
