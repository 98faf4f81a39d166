"""The form of a reader, and a server that answers with a payload."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.web import Limits
from pipeline.runtime.http_server import served
from tests.contract.payloads.sources import Payload

IMPATIENT = Limits(patience_seconds=0)
NOTHING_MORE = {"results": [], "files": [], "drives": [], "value": [], "members": [], "channels": [], "messages": []}
"""The answer to a request for the next page of any listing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a payload."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Its fields; which of them must equal which parts of the payload is written in ``sources.toml``."""
    lost: Collection[str] = ()
    """The parts of the payload that people read and that the result lacks without a reason."""


Reader: TypeAlias = Callable[[Payload], Awaitable[Outcome]]


@dataclass
class Replay:
    """A vendor's server that answers with one payload: token requests succeed, the first other request is answered by
    the payload, and later ones by a page without anything."""

    url: str = ""
    body: bytes = b""
    status: int = 200
    requests: int = 0
    """The number of requests since ``load``."""

    def load(self, payload: Payload, body: bytes | None = None) -> None:
        self.body, self.status, self.requests = payload.body if body is None else body, payload.status, 0

    async def answer(self, request: Request) -> Response:
        if request.url.path.endswith("/token"):
            return JSONResponse({"access_token": "token", "expires_in": 3600})
        self.requests += 1
        if self.requests > 1:
            return JSONResponse({"ok": True, **NOTHING_MORE})
        return Response(self.body, self.status, media_type="application/json")


@asynccontextmanager
async def replay() -> AsyncIterator[Replay]:
    server = Replay()
    app = Starlette(routes=[Route("/{path:path}", server.answer, methods=["GET", "POST"])])
    async with served(app) as server.url:
        yield server
