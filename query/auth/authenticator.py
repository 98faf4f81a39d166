"""Authentication by a token or an API key. In development mode, on this machine only, the local user may choose any
identity."""

from __future__ import annotations

import getpass
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

import httpx
import structlog
from starlette.datastructures import Headers

from pipeline.core.errors import Misconfigured
from pipeline.runtime.home import DEVELOPMENT_FILE, development_token, home, made_development_token
from query.auth import tokens
from query.auth.api_keys import Delegation, Entry, KeyFile, OneKey
from query.auth.identity import Identity
from query.auth.jwks import KeySet
from query.auth.tokens import PublicKeys, Untrusted
from query.problems import Problem
from query.settings import AuthSettings, ServeSettings

log = structlog.get_logger()

AS, TENANT = "x-penstock-as", "x-penstock-tenant"
"""Headers by which a caller chooses its identity in development mode."""
DEVELOPMENT_CREDENTIALS = (
    "development mode requires Authorization: Bearer TOKEN with the token from the file development-token in"
    " PENSTOCK_HOME; `penstock status` in a terminal prints the page's address with it"
)
API_KEY = "x-api-key"
ON_BEHALF_OF = "x-penstock-on-behalf-of"
"""The header with the token by which a service's issuer vouches for the person for whom the service asks."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-forwarded-port",
    "x-forwarded-server",
    "x-forwarded-prefix",
    "x-original-host",
    "x-original-url",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
    "fastly-client-ip",
    "x-envoy-external-address",
    "x-amzn-trace-id",
    "x-cloud-trace-context",
    "x-arr-log-id",
)
"""Headers that reverse proxies and load balancers add (RFC 7239, RFC 9110 section 7.6.3, and the vendors' own)."""


class Authenticator:
    """Authenticates requests by their headers. Safe to share between tasks."""

    def __init__(
        self,
        settings: AuthSettings,
        *,
        keys: KeySet | None,
        key_file: KeyFile | None,
        development: Path | None,
        key_set: Callable[[str], KeySet] | None = None,
    ):
        """development: the file of the token that development mode requires; None: the mode is off. key_set: the keys
        that a service's own issuer publishes at an address; None: such services are not served."""
        self._settings = settings
        self._key_set = key_set or _no_key_set
        self._key_sets: dict[str, KeySet] = {}
        self._keys = keys
        self._key_file = key_file
        self._development = development

    @property
    def next_key_expiry(self) -> float:
        """When the next API key expires, in seconds since the epoch; 0: no valid key."""
        return self._key_file.next_expiry if self._key_file is not None else 0.0

    @property
    def development(self) -> bool:
        return self._development is not None

    async def authenticate(self, headers: Headers) -> Identity:
        """The caller's identity. Raises Problem (401, or 403 for development mode behind a proxy), Retryable when the
        issuer's keys are not available, and Misconfigured when the key file cannot be read."""
        for name in ("authorization", API_KEY, ON_BEHALF_OF):
            if len(headers.getlist(name)) > 1:  # a proxy may have checked the other one
                raise _unauthorized(f"send the header {name} once")
        if "authorization" in headers and API_KEY in headers:
            raise _unauthorized("send either a token or an API key, not both")
        credential, is_token = self._credential(headers)
        try:
            if is_token:
                return await self._by_token(credential, headers)
            if self._is_development_token(credential):
                return _development_identity(headers)
            match = self._key_file.entry(credential) if self._key_file is not None else None
            if match is None:
                detail = "unknown or expired token or API key"
                raise _unauthorized(detail if self._development is None else f"{detail}: {DEVELOPMENT_CREDENTIALS}")
            return await self._by_key(*match, headers.get(ON_BEHALF_OF))
        except Untrusted as error:
            raise _unauthorized(str(error)) from error

    def is_in_force(self, headers: Headers, identity: Identity) -> bool:
        """Whether the API key by which a request was authenticated is in force now, and gives the same identity. A
        token, whose time may end during its request, counts for all of it. Raises Misconfigured when the key file
        cannot be read."""
        if identity.key is None or self._key_file is None:
            return True
        credential, is_token = self._credential(headers)
        return self._key_file.permits(identity, None if is_token else credential)

    def _credential(self, headers: Headers) -> tuple[str, bool]:
        """The API key or the token that a request carries, and whether it is a token. Raises Problem where it carries
        neither."""
        if (key := headers.get(API_KEY)) is not None:
            return key, False
        authorization = headers.get("authorization")
        if authorization is None:
            if self._development is not None:
                raise _unauthorized(DEVELOPMENT_CREDENTIALS, error=None)
            raise _unauthorized("send Authorization: Bearer TOKEN, or X-Api-Key: KEY", error=None)
        scheme, _, credential = authorization.partition(" ")
        credential = credential.strip()
        if scheme.lower() != "bearer" or not credential:
            raise _unauthorized("send Authorization: Bearer TOKEN")
        return credential, self._keys is not None and credential.count(".") == 2  # a key has no dots

    async def _by_token(self, token: str, headers: Headers) -> Identity:
        """The person of a token, or the person for whom the issuer's token exchange lets a service ask. Raises
        Untrusted."""
        if ON_BEHALF_OF in headers:
            raise Untrusted(f"{ON_BEHALF_OF} goes with an API key, not with a token")
        assert self._keys is not None
        identity, actor = await tokens.identify(token, self._keys, self._settings)
        if actor is None:
            return identity
        match = self._key_file.actor(actor) if self._key_file is not None else None
        if match is None or identity.principal is None:
            raise Untrusted("the token was exchanged for a service (act) that has no entry in PENSTOCK_AUTH_KEYS_FILE")
        return match[1].on_behalf(match[0], identity.tenant, identity.principal)

    async def _by_key(self, name: str, entry: Entry, assertion: str | None) -> Identity:
        """The service of an API key, or the person whom its issuer vouches for. Raises Untrusted."""
        if assertion is None:
            if not entry.has_own_access:
                raise Untrusted(f"this key asks on behalf of people only: send {ON_BEHALF_OF}")
            return entry.identity(name)
        checks = entry.acts_for
        if checks is None:
            raise Untrusted("this key may not ask on behalf of people")
        claims = await tokens.verify(assertion.strip(), self._keys_of(checks), checks)
        tenant = tokens.claim_of(claims, "tenant") if "tenant" in claims else entry.tenant
        if checks.principal_claim == "email":
            tokens.require_verified(claims)
        return entry.on_behalf(name, tenant, tokens.claim_of(claims, checks.principal_claim))

    def _keys_of(self, checks: Delegation) -> PublicKeys:
        if checks.public_key is not None:
            return OneKey(checks.public_key)
        assert checks.jwks_url is not None
        if checks.jwks_url not in self._key_sets:
            self._key_sets[checks.jwks_url] = self._key_set(checks.jwks_url)
        return self._key_sets[checks.jwks_url]

    async def aclose(self) -> None:
        for keys in self._key_sets.values():
            await keys.aclose()

    def _is_development_token(self, key: str) -> bool:
        """Whether the key is the development token. Its file is read each time, so that deleting the file revokes the
        token. Raises Misconfigured."""
        if self._development is None:
            return False
        try:
            token = development_token(self._development)
        except FileNotFoundError:
            return False
        return compare_digest(key.encode("utf-8", "replace"), token.encode())


def _no_key_set(url: str) -> KeySet:
    raise Misconfigured(f"the keys of {url} cannot be fetched here")


def _unauthorized(detail: str, *, error: str | None = "invalid_token") -> Problem:
    challenge = 'Bearer realm="penstock"'
    if error is not None:
        challenge += f', error="{error}", error_description="{detail}"'
    return Problem("unauthorized", detail, headers={"WWW-Authenticate": challenge})


def _development_identity(headers: Headers) -> Identity:
    """The identity in development mode: the local user, unless the request names another. A request through a proxy is
    not local and is refused."""
    if any(name in headers for name in PROXY_HEADERS):
        raise Problem("forbidden", "development mode serves this machine only, and this request came through a proxy")
    named, tenant = _header_text(headers.get(AS)), _header_text(headers.get(TENANT)) or "default"
    principal = named or local_user()
    return Identity("development", tenant, principal, caller_class="extended", operator=named is None)


def _header_text(value: str | None) -> str | None:
    """A header's bytes as text: Starlette reads them as Latin-1."""
    return value.encode("latin-1").decode("utf-8", "replace").strip() if value else None


_AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:@/\[\]\s]+))(?::\d*)?")
"""A Host header's value."""


def host_name(headers: Headers) -> str:
    """The host of the Host header without the port; "" if the header is invalid."""
    match = _AUTHORITY.fullmatch(headers.get("host", "").lower())
    return (match["address"] or match["name"]) if match else ""


def local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container often has no name
        return "local"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require(auth: AuthSettings, serve: ServeSettings) -> None:
    """Raises Misconfigured when no authentication is configured or when anybody could choose an identity."""
    tokens.require(auth)
    if serve.development and not is_loopback(serve.host):
        raise Misconfigured(
            f"PENSTOCK_SERVE_DEVELOPMENT lets the user choose any identity, so it serves on loopback only, not on"
            f" {serve.host}: unset it and set PENSTOCK_AUTH_JWKS_URL or PENSTOCK_AUTH_KEYS_FILE"
        )
    if not serve.development and auth.jwks_url is None and auth.keys_file is None:
        raise Misconfigured(
            "no authentication is configured: set PENSTOCK_AUTH_JWKS_URL (with _ISSUER and _AUDIENCE) or"
            " PENSTOCK_AUTH_KEYS_FILE, or on your own machine PENSTOCK_SERVE_DEVELOPMENT=true"
        )


@asynccontextmanager
async def open_authenticator(auth: AuthSettings, serve: ServeSettings) -> AsyncIterator[Authenticator]:
    """Open an authenticator from the settings. Raises Misconfigured."""
    require(auth, serve)
    key_file = KeyFile(auth.keys_file) if auth.keys_file is not None else None
    development = None
    if serve.development:
        development = serve.development_token_file or home() / DEVELOPMENT_FILE
        made_development_token(development)
        development_token(development)
        log.warning(
            "development_mode_enabled", says="a client with the token may choose any identity; served on loopback only"
        )
    async with httpx.AsyncClient(follow_redirects=False, trust_env=True) as client:

        def key_set(url: str) -> KeySet:
            return KeySet(url, keep_seconds=auth.jwks_keep_seconds, client=client)

        keys = key_set(auth.jwks_url) if auth.jwks_url is not None else None
        authenticator = Authenticator(auth, keys=keys, key_file=key_file, development=development, key_set=key_set)
        try:
            yield authenticator
        finally:
            await authenticator.aclose()
            if keys is not None:
                await keys.aclose()
