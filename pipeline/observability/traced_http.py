"""Requests that this process answers: one span each, within the caller's trace where it names one."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.observability import tracing
from pipeline.observability.tracing import HEADER

TRACE_ID = "trace-id"
"""The response header with the id of the request's trace, which a person can quote."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Traced:
    """The outermost ASGI middleware. Spans have the declared path, because the values in a path are ids."""

    def __init__(self, app: ASGIApp, *, quiet: Collection[str] = ()) -> None:
        """quiet: paths that machines request every few seconds, which get no span."""
        self._app = app
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not tracing.on() or scope["type"] != "http" or scope["path"] in self._quiet:
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        with tracing.begin(
            method,
            "server",
            parent=Headers(scope=scope).get(HEADER, ""),
            attributes={"http.request.method": method, "url.scheme": scope.get("scheme", "http")},
        ) as span:

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.note({"http.response.status_code": status})
                    if status >= 500:
                        span.failed(str(status))
                    MutableHeaders(scope=message)[TRACE_ID] = span.trace_id or ""
                await send(message)

            try:
                await self._app(scope, receive, sending)
            finally:
                if route := getattr(scope.get("route"), "path", None):
                    span.rename(f"{method} {route}")
                    span.note({"http.route": route})
                if tenant := getattr(scope.get("state", {}).get("identity"), "tenant", None):
                    span.note({"penstock.tenant": tenant})
