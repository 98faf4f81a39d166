"""A fake Confluence: Cloud (REST v2, and v1 for what v2 lacks) or Data Center (REST v1).

``async with served(fake) as address``; the base address is then ``address + fake.context``. It follows the published
API and the limits that its users report: search lags behind (``index_delay``) and knows times by the minute, and a page
shows only its own restrictions.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import anyio
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from connectors.fakes import confluence_v1, confluence_v2
from connectors.fakes.atlassian_limits import RateLimits
from connectors.fakes.confluence_state import Event, Item, Refusal, State, User
from connectors.source import Request

Flavour = Literal["cloud", "data-center"]


@dataclass
class Credential:
    user: User
    scopes: set[str] | None = None
    """Cloud: the scopes of a scoped token or an OAuth app; None: everything that the user may do."""


@dataclass
class Faults:
    """Faults of the server. Numbers count down with each faulty response; the rest stays until changed."""

    throttled: int = 0
    retry_after: str | None = "1"
    failing: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every response, such as X-RateLimit-Remaining."""
    truncated: bool = False
    """Listings of content end in the middle of their first page, without a next link."""
    seconds: float = 0.0
    """The delay of every response."""
    denied: set[str] = field(default_factory=set)
    """Paths that contain one of these respond with 403."""
    broken: set[str] = field(default_factory=set)
    """Paths that contain one of these respond with 500."""
    unanswered: set[str] = field(default_factory=set)
    """Requests whose path contains one of these get no response."""
    moved_to: str | None = None
    """The address to which downloads are redirected; None: this server."""
    largest: int | None = None
    """Requests for more content than this at once respond with 500."""
    searchable: int | None = None
    """Searches return so many results, and respond with 400 to a request for more."""
    anonymous_apart: bool = False
    """Whether the permissions of a space lack those of anonymous visitors, which have a resource of their own."""
    lose_restrictions: bool = False
    """Whether expanded restrictions are left out of responses, as they are for accounts that may not see them."""


class FakeConfluence:
    def __init__(self, flavour: Flavour = "cloud") -> None:
        self.cloud = flavour == "cloud"
        self.context = "/wiki" if self.cloud else "/confluence"
        self.state = State()
        self.faults = Faults()
        self.limits: RateLimits | None = None
        """The rate limits; None: every request is answered."""
        self.index_delay = timedelta()
        self.credentials: dict[str, Credential] = {}
        self.requests: list[str] = []
        """``GET /rest/api/…?…`` for every request, in order."""
        self.base = ""
        self.webhook_secret = secrets.token_hex(16)
        self.epoch = secrets.token_hex(4)
        """A part of every cursor. When it changes, earlier cursors are no longer known."""
        routes = [*confluence_v1.routes(self)]
        if self.cloud:
            routes += confluence_v2.routes(self)
        self._inner = Starlette(
            routes=[Mount(self.context, routes=routes)], exception_handlers={Refusal: self._refused}
        )

    def token_for(self, user: User, *, scopes: set[str] | None = None) -> str:
        token = f"ATATT-{secrets.token_hex(12)}"
        self.credentials[token] = Credential(user, scopes)
        return token

    def expire_cursors(self) -> None:
        self.epoch = secrets.token_hex(4)

    def cursor(self, position: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps({"epoch": self.epoch, **position}).encode()).decode()

    def position(self, cursor: str) -> dict[str, object]:
        """Decode a cursor. Raises Refusal for one that is unknown or has expired."""
        try:
            position = json.loads(base64.urlsafe_b64decode(cursor))
        except ValueError:
            position = {}
        if not isinstance(position, dict) or position.get("epoch") != self.epoch:
            raise Refusal(400, "INVALID_REQUEST_PARAMETER", "The cursor is invalid or has expired")
        return position

    def caller(self, request: HttpRequest, scope: str) -> User:
        """Return the user whose token the request carries. A scoped Cloud token needs ``scope``. Raises Refusal."""
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        email = None
        if kind.lower() == "basic" and self.cloud:
            email, _, value = base64.b64decode(value).decode().partition(":")
        elif kind.lower() != "bearer":
            raise Refusal(401, "Unauthorized", "Client must be authenticated to access this resource.")
        credential = self.credentials.get(value)
        if credential is None or (email is not None and email.lower() != credential.user.email.lower()):
            raise Refusal(401, "Unauthorized", "Client must be authenticated to access this resource.")
        if credential.scopes is not None and scope not in credential.scopes:
            raise Refusal(401, "Unauthorized", "Unauthorized; scope does not match")
        return credential.user

    async def _refused(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return JSONResponse(error.body(v2="/api/v2/" in request.url.path), status_code=error.status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request = HttpRequest(scope)
        self.base = f"{request.url.scheme}://{request.url.netloc}{self.context}"
        line = f"{request.method} {request.url.path.removeprefix(self.context)}?{request.url.query}"
        self.requests.append(line)
        faults = self.faults
        if faults.seconds:
            await anyio.sleep(faults.seconds)
        if any(part in line for part in faults.unanswered):
            await anyio.sleep_forever()
        fault_response: Response | None = None
        if faults.throttled > 0:
            faults.throttled -= 1
            headers = {} if faults.retry_after is None else {"Retry-After": faults.retry_after}
            fault_response = JSONResponse({"message": "Rate limit exceeded"}, status_code=429, headers=headers)
        elif faults.failing > 0 or any(part in line for part in faults.broken):
            faults.failing = max(0, faults.failing - 1)
            fault_response = JSONResponse({"statusCode": 500, "message": "Internal Server Error"}, status_code=500)
        elif faults.largest and "/content?" in line and int(request.query_params.get("limit", 0)) > faults.largest:
            fault_response = JSONResponse({"statusCode": 500, "message": "Internal Server Error"}, status_code=500)
        elif any(part in line for part in faults.denied):
            fault_response = JSONResponse({"statusCode": 403, "message": "Forbidden"}, status_code=403)
        elif self.limits and (refusal := self.limits.take(request.method, request.url.path)) is not None:
            fault_response = JSONResponse({"message": "Rate limit exceeded"}, status_code=429, headers=refusal)

        headers = dict(faults.headers)
        start: Message = {}

        async def send_with_headers(message: Message) -> None:
            """Hold the start of a response until its body is known, which says what it costs."""
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start:
                if self.limits and not fault_response:
                    headers.update(self.limits.charge(request.url.path, message.get("body", b"")))
                more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                await send({**start, "headers": [*start["headers"], *more]})
                start = {}
            await send(message)

        await (fault_response or self._inner)(scope, receive, send_with_headers)


@asynccontextmanager
async def confluence(flavour: Flavour = "cloud") -> AsyncIterator[tuple[FakeConfluence, str]]:
    """Serve a fake; yields it and its base address."""
    from pipeline.runtime.http_server import served

    fake = FakeConfluence(flavour)
    async with served(fake) as address:
        fake.base = address + fake.context
        yield fake, fake.base


FORGE = {"blog": "blogpost", "page": "page", "comment": "comment", "attachment": "attachment"}
VERBS = {"removed": "deleted"}


def requests(events: Sequence[Event], secret: str, *, cloud: bool) -> list[Request]:
    shape = _forge if cloud else _webhook
    return [signed(shape(event), secret) for event in events]


def signed(body: dict[str, Any], secret: str) -> Request:
    raw = json.dumps(body).encode()
    digest = hmac.new(secret.encode(), raw, hashlib.sha256).hexdigest()
    headers = {"content-type": "application/json", "x-hub-signature": f"sha256={digest}"}
    return Request(headers, {}, raw)


def _webhook(event: Event) -> dict[str, Any]:
    item, name = event.item, event.name
    subject_name = "content" if name.startswith("content_") else name.partition("_")[0]
    subject: dict[str, Any] = {
        "id": item.number,
        "idAsString": item.id,
        "title": item.title,
        "spaceKey": item.space,
        "contentType": item.kind,
        "version": item.version_number,
        "creationDate": _millis(item.versions[0]),
        "modificationDate": _millis(item.versions[-1]),
        "self": f"/pages/viewpage.action?pageId={item.id}",
    }
    if item.container:
        subject["parent"] = {"id": int(item.container), "contentType": "page"}
    return {"timestamp": _millis(event.at), "event": name, "userKey": item.author, subject_name: subject}


def _forge(event: Event) -> dict[str, Any]:
    item, name = event.item, event.name
    noun, _, verb = name.partition("_")
    noun = FORGE.get(noun, item.kind)
    subject: dict[str, Any] = {
        "id": item.id,
        "type": item.kind,
        "status": item.status,
        "title": item.title,
        "space": {"key": item.space, "status": "current"},
    }
    if item.container:
        subject["container"] = {"id": item.container, "type": "page"}
    return {
        "eventType": f"avi:confluence:{VERBS.get(verb, verb)}:{noun}",
        "atlassianId": item.author,
        "eventCreatedDate": event.at.isoformat(),
        ("attachment" if _is_file(item) else "content"): subject,
    }


def _is_file(item: Item) -> bool:
    return item.kind == "attachment"


def _millis(at: Any) -> int:
    return int(at.timestamp() * 1000)
