"""A fake of Atlassian's authorization server, for apps with rotating refresh tokens.

https://developer.atlassian.com/cloud/oauth/getting-started/refresh-tokens/, and for the ten minutes
https://community.developer.atlassian.com/t/the-old-access-token-will-be-revoked-during-the-refresh-token-exchange/83103
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

ACCESS_SECONDS = 3600
GRACE_SECONDS = 600
"""For so long an exchanged refresh token, and its access token, stay valid."""
CLIENT_ID, CLIENT_SECRET = "client-of-the-app", "secret-of-the-app"  # opens nothing else


@dataclass(slots=True)
class Pair:
    access: str
    exchanged_at: float | None = None
    """When its refresh token was exchanged for the first time."""


class FakeAtlassianOAuth:
    """An ASGI application with one app that one account has authorized."""

    def __init__(
        self, issue: Callable[[], str], revoke: Callable[[str], None], *, clock: Callable[[], float] = time.time
    ) -> None:
        """issue: returns a new access token that the service accepts, until ``revoke`` is called with it."""
        self._issue, self._revoke, self._clock = issue, revoke, clock
        self.pairs: dict[str, Pair] = {}
        """The pairs by their refresh token."""
        self.exchanges = 0
        self.omits_refresh_token = False
        self._app = Starlette(routes=[Route("/oauth/token", self._token, methods=["POST"])])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def authorize(self) -> str:
        """Return the first refresh token."""
        refresh = secrets.token_urlsafe(24)
        self.pairs[refresh] = Pair(self._issue())
        return refresh

    def elapse(self) -> None:
        """Revoke what was exchanged more than the time of grace ago."""
        for refresh, pair in list(self.pairs.items()):
            if pair.exchanged_at is not None and self._clock() > pair.exchanged_at + GRACE_SECONDS:
                self._revoke(pair.access)
                del self.pairs[refresh]

    async def _token(self, request: Request) -> Response:
        body = await request.json()
        self.elapse()
        if (body.get("client_id"), body.get("client_secret")) != (CLIENT_ID, CLIENT_SECRET):
            return JSONResponse({"error": "access_denied", "error_description": "Unauthorized"}, 401)
        pair = self.pairs.get(str(body.get("refresh_token")))
        if body.get("grant_type") != "refresh_token" or pair is None:
            error = {"error": "invalid_grant", "error_description": "Unknown or invalid refresh token."}
            return JSONResponse(error, 403)
        self.exchanges += 1
        pair.exchanged_at = pair.exchanged_at or self._clock()
        answer = {"access_token": self._issue(), "expires_in": ACCESS_SECONDS, "token_type": "Bearer", "scope": "read"}
        if self.omits_refresh_token:
            pair.exchanged_at = None
            return JSONResponse(answer)
        refresh = secrets.token_urlsafe(24)
        self.pairs[refresh] = Pair(str(answer["access_token"]))
        return JSONResponse({**answer, "refresh_token": refresh})
