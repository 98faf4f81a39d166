"""The token endpoint: a service account's signed assertion for an access token.

https://developers.google.com/identity/protocols/oauth2/service-account#httprest
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from connectors.fakes.google_drive_corpus import Corpus
from connectors.fakes.google_drive_errors import OAuthError, bad_credentials

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
GOOGLES = "https://oauth2.googleapis.com/token"
"""The audience that Google's own libraries always name."""
LIFE_SECONDS = 3599
MAX_ASSERTION_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Token:
    account: str
    """Whose eyes it sees with: the service account's own, or of the one it acts for."""
    scopes: frozenset[str]
    ends: float
    """Unix time."""


@cache
def _key_pair() -> rsa.RSAPrivateKey:
    """Made once a process: it takes a while."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Tokens:
    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._private = _key_pair()
        self.delegated: dict[str, set[str]] = {}
        """Service account → scopes that it may use on behalf of the domain's users."""
        self.issued: dict[str, Token] = {}

    def key(self, account: str, url: str) -> str:
        """The JSON key file of a service account; url: this server's."""
        pem = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps(
            {
                "type": "service_account",
                "project_id": "penstock-test",
                "private_key_id": "k1",
                "private_key": pem.decode(),
                "client_email": account,
                "client_id": "100000000000000000001",
                "auth_uri": f"{url}/auth",
                "token_uri": f"{url}/token",
            }
        )

    def grant(self, form: Mapping[str, str], url: str) -> dict[str, Any]:
        if form.get("grant_type") != JWT_BEARER:
            raise OAuthError(400, "unsupported_grant_type", f"Invalid grant_type: {form.get('grant_type', '')}")
        claims = self._verified(form.get("assertion", ""), url)
        issuer, subject = claims["iss"], claims.get("sub") or claims["iss"]
        scopes = frozenset(str(claims.get("scope", "")).split())
        if not scopes:
            raise OAuthError(400, "invalid_scope", "Invalid OAuth scope or ID token audience provided.")
        if subject != issuer:
            if not scopes <= self.delegated.get(issuer, set()):
                raise OAuthError(
                    401, "unauthorized_client",
                    "Client is unauthorized to retrieve access tokens using this method, or client not authorized for"
                    " any of the scopes requested.",
                )  # fmt: skip
            if self._corpus.users.get(subject, True):
                raise OAuthError(400, "invalid_grant", "Invalid email or User ID")
        name = f"ya29.{secrets.token_urlsafe(24)}"
        self.issued[name] = Token(subject, scopes, self._corpus.now().timestamp() + LIFE_SECONDS)
        return {"access_token": name, "expires_in": LIFE_SECONDS, "token_type": "Bearer"}

    def _verified(self, assertion: str, url: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                assertion, self._private.public_key(), algorithms=["RS256"], audience=[f"{url}/token", GOOGLES],
                options={"verify_exp": False, "verify_iat": False, "require": ["iss", "aud", "exp", "iat"]},
            )  # fmt: skip
        except jwt.InvalidAudienceError:
            raise OAuthError(400, "invalid_grant", "Invalid JWT: Failed audience check.") from None
        except jwt.PyJWTError:
            raise OAuthError(400, "invalid_grant", "Invalid JWT Signature.") from None
        now = self._corpus.now().timestamp()
        if claims["exp"] < now or claims["exp"] - claims["iat"] > MAX_ASSERTION_SECONDS or claims["iat"] > now + 300:
            raise OAuthError(
                400, "invalid_grant",
                "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. Check your"
                " iat and exp values in the JWT claim.",
            )  # fmt: skip
        if claims["iss"] not in self._corpus.users:
            raise OAuthError(400, "invalid_grant", "Invalid grant: account not found")
        return claims

    def bearer(self, authorization: str, accepted: Collection[str]) -> Token | None:
        """The token, or None when it lacks every accepted scope. Raises ApiError for one that is none (any more)."""
        scheme, _, name = authorization.partition(" ")
        token = self.issued.get(name)
        if scheme != "Bearer" or token is None or token.ends <= self._corpus.now().timestamp():
            raise bad_credentials()
        return token if token.scopes & set(accepted) else None
