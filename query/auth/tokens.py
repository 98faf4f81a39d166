"""Authentication by a JSON Web Token. Issuer, audience, times and algorithm are checked. Tags and groups in a token are
ignored, because the ledger has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jwt
from jwt import PyJWK
from jwt.exceptions import (
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAlgorithmError,
    InvalidAudienceError,
    InvalidIssuerError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from pipeline.core.addresses import is_https_or_local
from pipeline.core.errors import Misconfigured
from query.auth.identity import Identity
from query.settings import AuthSettings

MAX_CHARACTERS = 16_384
TOKEN_TYPES = ("jwt", "at+jwt")
"""Accepted values of the header ``typ`` (RFC 7519, RFC 9068); a token without one counts as a JWT. A logout token or a
DPoP proof of the same issuer is therefore refused (RFC 8725, section 3.11)."""

_NAME = re.compile("[^\\0\ud800-\udfff]*")
"""Neither U+0000 nor half of a pair of surrogates, which Postgres would refuse."""


class Untrusted(Exception):
    """The token is not valid; the message gives the reason and may be sent to the client."""


REASONS: tuple[tuple[type[PyJWTError], str], ...] = (
    (ExpiredSignatureError, "the token has expired"),
    (ImmatureSignatureError, "the token is not valid yet"),
    (InvalidAudienceError, "the token is for another audience"),
    (InvalidIssuerError, "the token is from another issuer"),
    (InvalidAlgorithmError, "the token's algorithm is not accepted"),
    (InvalidSignatureError, "the token's signature is invalid"),
    (MissingRequiredClaimError, "the token lacks one of exp, iat, iss, aud and sub"),
)


def require(settings: AuthSettings) -> None:
    """Raises Misconfigured when the settings do not check tokens strictly enough."""
    if settings.jwks_url is None:
        return
    for name in ("issuer", "audience"):
        if not getattr(settings, name):
            raise Misconfigured(
                f"PENSTOCK_AUTH_JWKS_URL is set without PENSTOCK_AUTH_{name.upper()}: any token of that issuer, for any"
                " purpose, would be accepted"
            )
    if not settings.algorithms:
        raise Misconfigured('PENSTOCK_AUTH_ALGORITHMS is empty: list the issuer\'s algorithms, for example ["RS256"]')
    if not is_https_or_local(settings.jwks_url):
        raise Misconfigured("PENSTOCK_AUTH_JWKS_URL must begin with https:// (http only on this machine)")


class Checks(Protocol):
    """The requirements of a token: AuthSettings, or the checks of a service's own issuer."""

    @property
    def issuer(self) -> str | None: ...
    @property
    def audience(self) -> str | None: ...
    @property
    def algorithms(self) -> Sequence[str]: ...
    @property
    def leeway_seconds(self) -> float: ...
    @property
    def max_token_hours(self) -> float: ...


class PublicKeys(Protocol):
    async def key(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key with this ``kid`` for this algorithm; None: there is none. Raises Retryable."""
        ...


async def identify(token: str, keys: PublicKeys, settings: AuthSettings) -> tuple[Identity, str | None]:
    """The identity that a token proves, and the actor to which its issuer delegated that person's access (the claim
    ``act``, RFC 8693), if any. Raises Untrusted, and Retryable when the issuer's keys are not available."""
    claims = await verify(token, keys, settings)
    tenant = settings.tenant or claim_of(claims, settings.tenant_claim)
    principal = claim_of(claims, settings.principal_claim)
    if settings.principal_claim == "email" and settings.unverified_email == "refuse":
        require_verified(claims)
    roles = claims.get(settings.roles_claim)
    names = {role for role in (roles if isinstance(roles, list) else [roles]) if isinstance(role, str)}
    identity = Identity(
        "token",
        tenant,
        principal,
        caller_class="extended" if settings.extended_role in names else "standard",
        operator=settings.operator_role in names,
    )
    if "act" not in claims:
        return identity, None
    actor = claims["act"]
    return identity, claim_of(actor if isinstance(actor, dict) else {}, "sub", of="actor (act)")


def require_verified(claims: Mapping[str, Any]) -> None:
    """Raises Untrusted unless the issuer verified the email address."""
    if claims.get("email_verified") not in (True, "true"):
        raise Untrusted("the token's email address is not verified (email_verified)")


async def verify(token: str, keys: PublicKeys, settings: Checks) -> Mapping[str, Any]:
    """The claims of a valid token. Raises Untrusted or Retryable."""
    if len(token) > MAX_CHARACTERS:
        raise Untrusted(f"the token has more than {MAX_CHARACTERS} characters")
    try:
        header = jwt.get_unverified_header(token)
    except PyJWTError as error:
        raise Untrusted("the token is not a JSON Web Token") from error
    algorithm, kid = str(header.get("alg")), header.get("kid")
    if str(header.get("typ", "JWT")).lower().removeprefix("application/") not in TOKEN_TYPES:
        raise Untrusted("the token has an unsupported type (header typ)")
    if algorithm not in settings.algorithms:  # before a key is looked up: rejects `none` and HS256
        raise Untrusted("the token's algorithm is not accepted")
    key = await keys.key(kid, algorithm)
    if key is None:
        raise Untrusted("the token is signed with an unknown key")
    try:
        claims = jwt.decode(
            token,
            key,
            algorithms=list(settings.algorithms),
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=settings.leeway_seconds,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
    except PyJWTError as error:
        reason = next((words for kind, words in REASONS if isinstance(error, kind)), "the token is not valid")
        raise Untrusted(reason) from error
    if not all(isinstance(claims[name], int | float) for name in ("exp", "iat")):  # the library takes digits in text
        raise Untrusted("the token's times exp and iat are not numbers")
    if claims["exp"] - claims["iat"] > settings.max_token_hours * 3600:
        hours = settings.max_token_hours
        limit = f"{hours:g} hours" if hours >= 1 else f"{hours * 60:g} minutes"
        raise Untrusted(f"the token is valid for more than {limit}")
    if "events" in claims:
        raise Untrusted("the token reports an event, such as a logout, and does not authenticate a caller")
    return claims


def claim_of(claims: Mapping[str, Any], claim: str, *, of: str = "token") -> str:
    """A claim that is a name. Raises Untrusted."""
    value = claims.get(claim)
    if not isinstance(value, str) or not value.strip():
        raise Untrusted(f"the {of} lacks the claim {claim}")
    if not _NAME.fullmatch(value):
        raise Untrusted(f"the {of}'s claim {claim} holds a character that no name has")
    return value
