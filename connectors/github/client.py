"""Client of GitHub: GraphQL for everything that is read, and REST for the tokens of Apps and repositories by id.

GraphQL is used because one request returns a page of documents with their comments, says which comments are hidden,
and costs the same as one REST request for a single comment list (docs.github.com/graphql/overview).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from connectors.github.options import GitHubOptions
from connectors.source import CursorExpired
from connectors.web import Answered, Denied, Limits, Missing, Rejected, ServerFailed, Web
from connectors.web.token import RenewedToken
from pipeline.core.errors import Deferred, Misconfigured, Retryable

Json = Mapping[str, Any]
HEADERS = {"X-GitHub-Api-Version": "2022-11-28"}
ASSERTION_SECONDS = 540
"""The lifetime of an App's signed claim; GitHub accepts ten minutes."""
SKEW_SECONDS = 60
"""How far a claim is dated back, as GitHub advises for clocks that differ."""
TOKEN_SECONDS = 3600.0
"""The lifetime of an installation token."""
LIMITED_SECONDS = 60.0
"""The wait that GitHub asks for after a limit for which it names no time."""
PER_PAGE = 100
MAX_PAGES = 1_000
"""A list with more pages is taken for a server's mistake that would never end."""
FAILING_SECONDS = 5.0
"""Attempts at a query that GitHub fails to answer, before less is requested: it ends a query after ten seconds."""
_TAKEN_AWAY = frozenset({404, 410, 451})


class InstallationToken(RenewedToken):
    """The tokens of an App's installation, which expire after an hour."""

    def __init__(self, options: GitHubOptions, name: str, limits: Limits) -> None:
        """Raises Misconfigured without quoting the key."""
        super().__init__()
        assert options.private_key is not None
        self._key = _private_key(options.private_key.get_secret_value())
        self._app, self._installation = options.app_id, options.installation_id
        self._web = Web(options.api_url, headers=HEADERS, name=name, limits=limits)

    async def close(self) -> None:
        await self._web.close()

    async def request_token(self) -> tuple[str, float]:
        now = int(time.time())
        claim = {"iss": str(self._app), "iat": now - SKEW_SECONDS, "exp": now + ASSERTION_SECONDS}
        headers = {"Authorization": f"Bearer {jwt.encode(claim, self._key, algorithm='RS256')}"}
        path = f"/app/installations/{self._installation}/access_tokens"
        try:
            answer = await self._web.json("POST", path, headers=headers, ok=(201,))
        except Missing as error:
            raise Misconfigured(
                f"the App {self._app} has no installation {self._installation} (404): correct installation_id, or"
                " install the App again"
            ) from error
        except Answered as error:
            raise Misconfigured(
                f"the App {self._app} gets no token ({error.status}): check app_id, private_key and this machine's"
                " clock, and whether the installation is suspended"
            ) from error
        try:
            token, expires = str(answer["token"]), datetime.fromisoformat(answer["expires_at"])
        except (KeyError, TypeError, ValueError) as error:
            raise Retryable("GitHub answered without a token") from error
        left = (expires - datetime.now(UTC)).total_seconds()
        return token, min(max(left, SKEW_SECONDS), TOKEN_SECONDS)


def _private_key(text: str) -> RSAPrivateKey:
    if not text.lstrip().startswith("-----"):
        try:
            text = Path(text.strip()).expanduser().read_text()
        except (OSError, ValueError):
            raise Misconfigured("private_key is neither a PEM key nor the path of a file that can be read") from None
    try:
        key = load_pem_private_key(text.encode(), None)
    except (ValueError, TypeError):
        key = None  # the error's text could hold the key
    if not isinstance(key, RSAPrivateKey):
        raise Misconfigured("private_key is not an RSA key in PEM: create a new one in the App's settings")
    return key


class Api:
    """The requests to GitHub. Every method raises the errors of ``Web``."""

    def __init__(self, options: GitHubOptions, name: str, limits: Limits) -> None:
        """Raises Misconfigured."""
        self._name = name
        self._graphql_url = options.graphql_url
        self._installation: InstallationToken | None = None
        self._token = ""
        headers = dict(HEADERS)
        if options.token is not None:
            self._token = options.token.get_secret_value().strip()
            headers["Authorization"] = f"Bearer {self._token}"
        else:
            self._installation = InstallationToken(options, name, limits)
        self._web = Web(options.api_url, headers=headers, auth=self._installation, name=name, limits=limits)

    async def close(self) -> None:
        await self._web.close()
        if self._installation is not None:
            await self._installation.close()

    async def token(self) -> str:
        """Return the token with which git reads, which is valid for a minute at least."""
        return self._token if self._installation is None else await self._installation.token()

    async def repository(self, id: int) -> Json | None:
        """Return a repository by its number; None: it does not exist, was taken down (451) or is hidden from the
        credential. Redirects in GitHub's own answers name this path."""
        try:
            answer: Json = await self._web.json("GET", f"/repositories/{id}")
        except (Missing, Rejected) as error:
            if error.status in _TAKEN_AWAY:
                return None
            raise
        return answer

    async def collaborators(self, name: str) -> list[str] | None:
        """Return the logins of everybody who may read the repository ``owner/name``; None: the credential may not see
        them."""
        logins: list[str] = []
        for page in range(1, MAX_PAGES + 1):
            params = {"affiliation": "all", "per_page": PER_PAGE, "page": page}
            try:
                rows = await self._web.json("GET", f"/repos/{name}/collaborators", params=params)
            except (Denied, Missing) as error:
                if error.status == 401:
                    raise
                return None
            logins += [str(row["login"]) for row in rows]
            if len(rows) < PER_PAGE:
                break
        return logins

    async def query(
        self, text: str, variables: Json, *, tolerated: Collection[str] = ("NOT_FOUND",)
    ) -> tuple[Json, frozenset[str]]:
        """Return the data of a GraphQL query, and the types of the errors in it, all of which are ``tolerated``: what
        such an error concerns is None in the data. Raises CursorExpired for a cursor that GitHub does not know, and
        ServerFailed where the reason may be how much, or what, was requested."""
        body = {"query": text, "variables": dict(variables)}
        answer = await self._web.json("POST", self._graphql_url, json=body, failing_seconds=FAILING_SECONDS)
        if not isinstance(answer, dict):
            raise Retryable(f"{self._name}: GitHub answered with something that is not an object")
        rows = answer.get("errors") or []
        errors = frozenset(str(row.get("type") or "unknown") for row in rows if isinstance(row, dict))
        if errors & {"RATE_LIMITED", "RATE_LIMIT"}:
            raise Deferred(f"{self._name}: GitHub answered that its limit is reached", retry_after=LIMITED_SECONDS)
        if "INVALID_CURSOR_ARGUMENTS" in errors:
            raise CursorExpired(f"{self._name}: GitHub does not know a cursor")
        data = answer.get("data")
        if (refused := errors & {"FORBIDDEN", "INSUFFICIENT_SCOPES"} - set(tolerated)) and rows:
            code = min(refused)
            raise Denied(f"{self._name}: GitHub answered {code}: the credential may not do this", status=403, code=code)
        if errors - set(tolerated) or not isinstance(data, dict):
            # Its own failures and time-outs have status 200, too.
            raise ServerFailed(
                f"{self._name}: GitHub did not answer a query ({', '.join(sorted(errors)) or 'no data'})"
            )
        return data, errors
