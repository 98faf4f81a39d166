"""The MCP endpoint of the query service, behind its gate. The protocol's library is imported at the first request,
because the import takes a second, as long as all other imports together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from query.problems import Problem
from query.service import Service

PATH = "/mcp"


class _Endpoint:
    """A stateless endpoint with one JSON response for each request. Any of several processes may handle the next
    request, the gate authenticates each one, and no data of a caller outlives its request."""

    path = PATH

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requested = asyncio.Event()
        self._stop = asyncio.Event()
        self._handler: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # for the gate's metrics
        if scope["method"] != "POST":  # GET would wait forever and occupy a slot of the caller
            problem = Problem("method-not-allowed", "only POST is supported", headers={"Allow": "POST"})
            await problem.response()(scope, receive, send)
            return
        assert self._handler is not None, "the application is not running"
        self._requested.set()
        handle = await asyncio.shield(self._handler)
        await handle(scope, receive, send)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Handle requests inside the context; the first one waits for the import. The exit waits for running ones."""
        self._handler = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(self._run(self._handler), name="mcp")
        try:
            yield
        finally:
            self._stop.set()
            self._requested.set()
            await running

    async def _run(self, handler: asyncio.Future[ASGIApp]) -> None:
        await self._requested.wait()
        if self._stop.is_set():
            return
        try:
            transports = await asyncio.to_thread(import_module, "query.mcp.transports")
            async with transports.sessions(self._service) as handle:
                handler.set_result(handle)
                await self._stop.wait()
        except Exception as error:
            if not handler.done():  # raise it in the waiting requests
                handler.set_exception(error)
            raise


def mount(app: FastAPI, service: Service) -> None:
    """Add the endpoint at PATH to an application behind ``query.http.gate``, for the application's lifetime."""
    endpoint = _Endpoint(service)
    app.router.routes.append(Route(PATH, endpoint=endpoint, include_in_schema=False))
    inner_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        async with inner_lifespan(application) as state, endpoint.open():
            yield state or {}

    app.router.lifespan_context = lifespan
