"""A JSON Web Token as proof of who asks: issuer, audience, times and algorithm are pinned, the rest is the issuer's
word. What a token says of tags or groups is not read: those are the ledger's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import jwt
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

from pipeline.core.errors import Misconfigured
from query.auth.identity import Who
from query.auth.jwks import KeySet
from query.settings import AuthSettings

MAX_CHARACTERS = 16_384
TOKEN_TYPES = ("jwt", "at+jwt")
"""Accepted values of the header ``typ`` (RFC 7519, RFC 9068); a token without one counts as a JWT. So a logout token or
a DPoP proof of the same issuer opens nothing (RFC 8725, section 3.11)."""


class Untrusted(Exception):
    """Why a token proves nothing, in words that may be told to whoever sent it."""


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
    """Raises Misconfigured when tokens would be believed on too little."""
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
    address = urlsplit(settings.jwks_url)
    if address.scheme != "https" and address.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise Misconfigured("PENSTOCK_AUTH_JWKS_URL must begin with https:// (http only on this machine)")


async def who(token: str, keys: KeySet, settings: AuthSettings) -> Who:
    """The caller that a token proves. Raises Untrusted, and Retryable when the issuer's keys cannot be had."""
    claims = await verified(token, keys, settings)
    tenant = settings.tenant or _named(claims, settings.tenant_claim)
    principal = _named(claims, settings.principal_claim)
    unverified = settings.unverified_email == "refuse" and claims.get("email_verified") not in (True, "true")
    if settings.principal_claim == "email" and unverified:
        raise Untrusted("the token's email address is not verified (email_verified)")
    roles = claims.get(settings.roles_claim)
    held = {role for role in (roles if isinstance(roles, list) else [roles]) if isinstance(role, str)}
    return Who(
        "token",
        tenant,
        principal,
        caller_class="extended" if settings.extended_role in held else "standard",
        operator=settings.operator_role in held,
    )


async def verified(token: str, keys: KeySet, settings: AuthSettings) -> Mapping[str, Any]:
    """The claims of a token that is what it says. Raises Untrusted or Retryable."""
    if len(token) > MAX_CHARACTERS:
        raise Untrusted(f"the token has more than {MAX_CHARACTERS} characters")
    try:
        header = jwt.get_unverified_header(token)
    except PyJWTError as error:
        raise Untrusted("the token is not a JSON Web Token") from error
    algorithm, kid = header.get("alg"), header.get("kid")
    if str(header.get("typ", "JWT")).lower().removeprefix("application/") not in TOKEN_TYPES:
        raise Untrusted("the token has an unsupported type (header typ)")
    if algorithm not in settings.algorithms:  # before a key is looked for: `none` and HS256 never come near one
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
    if claims["exp"] - claims["iat"] > settings.max_token_hours * 3600:
        raise Untrusted(f"the token is valid for more than {settings.max_token_hours:g} hours")
    if "events" in claims:
        raise Untrusted("the token reports an event, such as a logout, and does not authenticate a caller")
    return claims


def _named(claims: Mapping[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or not value.strip():
        raise Untrusted(f"the token has no claim {claim}")
    return value
