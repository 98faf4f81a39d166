"""Access tokens of an OAuth 2.0 app of Atlassian (3LO), by rotating refresh tokens.

https://developer.atlassian.com/cloud/oauth/getting-started/refresh-tokens/. A refresh token that was exchanged stays
valid for ten minutes (community.developer.atlassian.com/t/83103), so that a repeated request does no harm.
"""

from __future__ import annotations

import time

from connectors.rotating_token import Grant, RotatingToken, Unaccepted
from connectors.source import Memory
from connectors.web import Answered, Limits, Web
from pipeline.core.errors import Misconfigured, Retryable

DEFAULT_LIFETIME_SECONDS = 3600


class AtlassianToken(RotatingToken):
    def __init__(
        self,
        memory: Memory,
        *,
        url: str,
        client_id: str,
        client_secret: str,
        refresh_token: str,
        name: str,
        limits: Limits,
    ) -> None:
        """url: the address of Atlassian's authorization server. name: the connector's."""
        super().__init__(memory, refresh_token, client_secret, self._request)
        self._client = {"client_id": client_id, "client_secret": client_secret}
        self._web = Web(url, name=name, limits=limits)

    async def close(self) -> None:
        await self._web.close()

    async def _request(self, refresh: str) -> Grant:
        body = {"grant_type": "refresh_token", **self._client, "refresh_token": refresh}
        requested_at = time.time()
        try:
            answer = await self._web.json("POST", "/oauth/token", json=body)
        except Answered as error:
            if error.code == "invalid_grant":
                raise Unaccepted from error
            raise Misconfigured(
                f"Atlassian issues no access token ({error.status}, {error.code or 'no code'}): check client_id and"
                " client_secret"
            ) from error
        if not isinstance(answer, dict) or not answer.get("access_token"):
            raise Retryable("Atlassian's token endpoint answered without a token")
        lifetime = float(answer.get("expires_in", DEFAULT_LIFETIME_SECONDS))
        # Now and then an answer has no new refresh token: the old one then stays valid.
        return Grant(str(answer["access_token"]), str(answer.get("refresh_token") or refresh), requested_at + lifetime)
