"""A service account's access tokens: https://developers.google.com/identity/protocols/oauth2/service-account#httprest"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from connectors.web import Answered, Limits, Web
from pipeline.core.errors import Misconfigured, Retryable

SCOPES = "https://www.googleapis.com/auth/"
DRIVE_SCOPE = f"{SCOPES}drive.readonly"
MEMBER_SCOPE = f"{SCOPES}admin.directory.group.member.readonly"
USER_SCOPE = f"{SCOPES}admin.directory.user.readonly"

GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
ASSERTION_SECONDS = 3600
"""The longest that Google takes."""
SPARE_SECONDS = 120
"""A token this near to its end is not used any more."""


class ServiceAccount:
    """A parsed key. It shows its address and nothing else."""

    def __init__(self, text: str) -> None:
        """text: the JSON, or the path of the file that holds it. Raises Misconfigured, quoting nothing of it."""
        found = _parsed(text)
        self.email = str(found.get("client_email", ""))
        self.token_uri = str(found.get("token_uri", ""))
        where = urlsplit(self.token_uri)
        if where.scheme != "https" and where.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise Misconfigured("the service account key's token_uri is no https address: create a new key")
        self._key_id = found.get("private_key_id")
        key = _private_key(str(found.get("private_key", "")))
        if not self.email or key is None:
            raise Misconfigured("the service account key lacks client_email or private_key, or they are damaged")
        self._key: RSAPrivateKey = key

    def __repr__(self) -> str:
        return f"ServiceAccount({self.email!r})"

    def assertion(self, scopes: str, subject: str | None, now: float) -> str:
        """A signed claim (RS256) to act with these scopes, separated by spaces, as itself or as the subject."""
        claims: dict[str, Any] = {
            "iss": self.email, "scope": scopes, "aud": self.token_uri, "iat": int(now),
            "exp": int(now) + ASSERTION_SECONDS,
        }  # fmt: skip
        if subject:
            claims["sub"] = subject
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": self._key_id} if self._key_id else None)


def _parsed(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text.strip()).expanduser().read_text()
        except (OSError, ValueError):
            raise Misconfigured(
                "service_account_key is neither a JSON key nor the path of a file that can be read"
            ) from None
    try:
        found = json.loads(text)
    except ValueError:
        raise Misconfigured("the service account key is not valid JSON: it may have been cut or quoted") from None
    if not isinstance(found, dict) or found.get("type") != "service_account":
        raise Misconfigured("the key is not that of a service account (its type is another): create one of that kind")
    return found


def _private_key(pem: str) -> RSAPrivateKey | None:
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError):
        return None  # its text could hold the key
    return key if isinstance(key, RSAPrivateKey) else None


class Bearer(httpx.Auth):
    """Puts an access token on every request; asks for a new one shortly before the old one ends, or when it is refused.

    Raises Misconfigured when Google will give none; the text says what has to be granted where.
    """

    def __init__(self, account: ServiceAccount, scope: str, subject: str | None, name: str, limits: Limits) -> None:
        self._account = account
        self._scope = scope
        self._subject = subject
        where = urlsplit(account.token_uri)
        self._path = where.path
        self._web = Web(f"{where.scheme}://{where.netloc}", name=name, limits=limits)
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self._ends = 0.0

    def __repr__(self) -> str:
        return f"Bearer({self._account!r}, {self._scope!r}, {self._subject!r})"

    async def close(self) -> None:
        await self._web.close()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = await self.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401:
            request.headers["Authorization"] = f"Bearer {await self.token(refused=token)}"
            yield request

    async def token(self, refused: str | None = None) -> str:
        async with self._lock:
            if self._token is None or self._token == refused or time.monotonic() > self._ends - SPARE_SECONDS:
                self._token = None
                asked = time.monotonic()
                answer = await self._ask()
                self._token, self._ends = str(answer["access_token"]), asked + float(answer.get("expires_in", 3599))
            return self._token

    async def _ask(self) -> dict[str, Any]:
        assertion = self._account.assertion(self._scope, self._subject, time.time())
        form = {"grant_type": GRANT, "assertion": assertion}
        try:
            answer = await self._web.json("POST", self._path, data=form)
        except Answered as error:
            raise Misconfigured(self._refusal(error)) from None
        if not isinstance(answer, dict) or not answer.get("access_token"):
            raise Retryable("Google's token endpoint answered without a token")
        return answer

    def _refusal(self, error: Answered) -> str:
        who = f"service account {self._account.email}"
        if error.code == "unauthorized_client":
            return (
                f"{who} may not act for {self._subject}: in the Admin console (Security > API controls > Domain-wide"
                f" delegation) add its client id with the scope {self._scope}"
            )
        if error.code == "invalid_grant":
            return f"{who} is refused (invalid_grant): the key was deleted, this machine's clock is wrong" + (
                f", or {self._subject} is no active user" if self._subject else ""
            )
        return f"{who} gets no access token (answer {error.status}, {error.code or 'no code'})"
