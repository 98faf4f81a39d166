"""Access tokens that are requested when needed and renewed before they expire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import httpx

TOKEN_MARGIN_SECONDS = 120
"""A token is renewed so long before it expires."""


class RenewedToken(httpx.Auth):
    """Adds an access token to every request, and renews it shortly before it expires or when it is refused."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._expires_at = 0.0

    async def request_token(self) -> tuple[str, float]:
        """Request a new token. Returns it with its lifetime in seconds. Raises Misconfigured when none is issued."""
        raise NotImplementedError

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = await self.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401:
            request.headers["Authorization"] = f"Bearer {await self.token(refused=token)}"
            yield request

    async def token(self, refused: str | None = None) -> str:
        """Return the token. refused: a token that must not be returned again."""
        async with self._lock:
            if (
                self._token is None
                or self._token == refused
                or time.monotonic() > self._expires_at - TOKEN_MARGIN_SECONDS
            ):
                self._token = None
                requested_at = time.monotonic()
                token, lifetime_seconds = await self.request_token()
                self._token, self._expires_at = token, requested_at + lifetime_seconds
            return self._token
