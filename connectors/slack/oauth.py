"""Expiring bot tokens, by token rotation (docs.slack.dev/authentication/using-token-rotation)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import httpx

from connectors.rotating_token import Grant, RotatingToken, Unaccepted
from connectors.source import Memory
from connectors.web import Answered, Limits, Web
from pipeline.core.errors import Misconfigured, Retryable

DEFAULT_LIFETIME_SECONDS = 43_200
EXPIRED = frozenset({"token_expired", "token_revoked", "invalid_auth"})
"""Errors, with status 200, after which another token may be accepted."""
_UNACCEPTED = frozenset({"invalid_refresh_token", "token_revoked", "token_expired", "invalid_grant"})
_WRONG_CLIENT = frozenset({"invalid_client_id", "bad_client_secret"})


class SlackToken(RotatingToken):
    """It records the token's scopes, which each response names in ``x-oauth-scopes``."""

    def __init__(
        self,
        memory: Memory,
        *,
        base_url: str,
        client_id: str,
        client_secret: str,
        refresh_token: str,
        name: str,
        limits: Limits,
    ) -> None:
        super().__init__(memory, refresh_token, client_secret, self._request)
        self._client = {"client_id": client_id, "client_secret": client_secret}
        self._web = Web(base_url, name=name, limits=limits)
        self.scopes: frozenset[str] | None = None

    async def close(self) -> None:
        await self._web.close()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        request.headers["Authorization"] = f"Bearer {await self.token()}"
        response = yield request
        if (scopes := response.headers.get("x-oauth-scopes")) is not None:
            self.scopes = frozenset(part.strip() for part in scopes.split(","))

    async def _request(self, refresh: str) -> Grant:
        requested_at = time.time()
        form = {"grant_type": "refresh_token", **self._client, "refresh_token": refresh}
        try:
            answer = await self._web.json("POST", "oauth.v2.access", data=form)
        except Answered as error:
            raise Misconfigured(f"Slack refuses oauth.v2.access ({error.status}): check base_url") from error
        if not isinstance(answer, dict):
            raise Retryable("Slack's response to oauth.v2.access is not a JSON object")
        if answer.get("ok") is not True:
            code = str(answer.get("error"))
            if code in _UNACCEPTED:
                raise Unaccepted
            if code in _WRONG_CLIENT:
                raise Misconfigured(f"Slack issues no token ({code}): check client_id and client_secret")
            raise Retryable("Slack did not answer oauth.v2.access")
        access, following = answer.get("access_token"), answer.get("refresh_token")
        if not access or not following:
            raise Misconfigured("Slack issues a token without end: token rotation is not turned on for the app")
        lifetime = float(answer.get("expires_in", DEFAULT_LIFETIME_SECONDS))
        return Grant(str(access), str(following), requested_at + lifetime)
