"""A Confluence that can be played with: Cloud (REST v2, and v1 for what v2 lacks) or Data Center (REST v1).

``async with served(fake) as address``; the base address is then ``address + fake.context``. It keeps what the
published API says, and the limits known from its users: search lags behind (``index_delay``) and knows times by the
minute, and a page shows only its own restrictions.
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
from connectors.fakes.confluence_state import Happening, Item, Refusal, State, User
from connectors.source import Request

Flavour = Literal["cloud", "data-center"]


@dataclass
class Credential:
    user: User
    scopes: set[str] | None = None
    """Cloud: of a scoped token or an OAuth app; None: all that the user may."""


@dataclass
class Faults:
    """What goes wrong. Numbers count down as requests are spoilt; the rest stays until changed."""

    throttled: int = 0
    retry_after: str | None = "1"
    failing: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Upon every answer, such as X-RateLimit-Remaining."""
    truncated: bool = False
    """Listings of content end in the middle of their first page, without a next link."""
    seconds: float = 0.0
    """Before every answer."""
    denied: set[str] = field(default_factory=set)
    """Paths that contain one of these answer 403."""
    moved_to: str | None = None
    """Where downloads are redirected to, instead of this server."""
    lose_restrictions: bool = False
    """Expanded restrictions are left out of answers, as they are for who may not see them."""


class FakeConfluence:
    def __init__(self, flavour: Flavour = "cloud") -> None:
        self.cloud = flavour == "cloud"
        self.context = "/wiki" if self.cloud else "/confluence"
        self.state = State()
        self.faults = Faults()
        self.index_delay = timedelta()
        self.credentials: dict[str, Credential] = {}
        self.requests: list[str] = []
        """``GET /rest/api/…?…`` of everything that was asked, in order."""
        self.base = ""
        self.webhook_secret = secrets.token_hex(16)
        self.epoch = secrets.token_hex(4)
        """Of the cursors given: another one, and they are no longer known."""
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
        """Raises Refusal for a cursor that is not ours (any more)."""
        try:
            found = json.loads(base64.urlsafe_b64decode(cursor))
        except ValueError:
            found = {}
        if not isinstance(found, dict) or found.get("epoch") != self.epoch:
            raise Refusal(400, "INVALID_REQUEST_PARAMETER", "The cursor is invalid or has expired")
        return found

    def caller(self, request: HttpRequest, scope: str) -> User:
        """Who asks; scope: what a scoped Cloud token needs for this. Raises Refusal."""
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
        shown = f"{request.method} {request.url.path.removeprefix(self.context)}?{request.url.query}"
        self.requests.append(shown)
        faults = self.faults
        if faults.seconds:
            await anyio.sleep(faults.seconds)
        spoilt: Response | None = None
        if faults.throttled > 0:
            faults.throttled -= 1
            headers = {} if faults.retry_after is None else {"Retry-After": faults.retry_after}
            spoilt = JSONResponse({"message": "Rate limit exceeded"}, status_code=429, headers=headers)
        elif faults.failing > 0:
            faults.failing -= 1
            spoilt = JSONResponse({"statusCode": 500, "message": "Internal Server Error"}, status_code=500)
        elif any(part in shown for part in faults.denied):
            spoilt = JSONResponse({"statusCode": 403, "message": "Forbidden"}, status_code=403)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.lower().encode(), v.encode()) for k, v in faults.headers.items()),
                ]
            await send(message)

        await (spoilt or self._inner)(scope, receive, sending)


@asynccontextmanager
async def confluence(flavour: Flavour = "cloud") -> AsyncIterator[tuple[FakeConfluence, str]]:
    """One that is served: (fake, base address)."""
    from pipeline.runtime.http_server import served

    fake = FakeConfluence(flavour)
    async with served(fake) as address:
        fake.base = address + fake.context
        yield fake, fake.base


FORGE = {"blog": "blogpost", "page": "page", "comment": "comment", "attachment": "attachment"}
VERBS = {"removed": "deleted"}


def requests(happened: Sequence[Happening], secret: str, *, cloud: bool) -> list[Request]:
    shape = _forge if cloud else _webhook
    return [signed(shape(one), secret) for one in happened]


def signed(body: dict[str, Any], secret: str) -> Request:
    raw = json.dumps(body).encode()
    digest = hmac.new(secret.encode(), raw, hashlib.sha256).hexdigest()
    headers = {"content-type": "application/json", "x-hub-signature": f"sha256={digest}"}
    return Request(headers, {}, raw)


def _webhook(happening: Happening) -> dict[str, Any]:
    item, name = happening.item, happening.name
    what = "content" if name.startswith("content_") else name.partition("_")[0]
    subject: dict[str, Any] = {
        "id": int(item.id.removeprefix("att")),
        "idAsString": item.id,
        "title": item.title,
        "spaceKey": item.space,
        "contentType": item.kind,
        "version": item.number,
        "creationDate": _millis(item.versions[0]),
        "modificationDate": _millis(item.versions[-1]),
        "self": f"/pages/viewpage.action?pageId={item.id}",
    }
    if item.container:
        subject["parent"] = {"id": int(item.container), "contentType": "page"}
    return {"timestamp": _millis(happening.at), "event": name, "userKey": item.author, what: subject}


def _forge(happening: Happening) -> dict[str, Any]:
    item, name = happening.item, happening.name
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
        "eventCreatedDate": happening.at.isoformat(),
        ("attachment" if _is_file(item) else "content"): subject,
    }


def _is_file(item: Item) -> bool:
    return item.kind == "attachment"


def _millis(at: Any) -> int:
    return int(at.timestamp() * 1000)
