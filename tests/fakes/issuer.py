"""An OpenID provider: publishes its keys as a JWK Set over HTTP and mints tokens, good ones and any kind of bad one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import FastAPI, Request
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from starlette.responses import Response

from pipeline.runtime.http_server import served

AUDIENCE = "penstock-test"


@dataclass
class Key:
    kid: str | None
    algorithm: str
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

    @classmethod
    def rsa(cls, kid: str | None, algorithm: str = "RS256") -> Key:
        return cls(kid, algorithm, rsa.generate_private_key(public_exponent=65537, key_size=2048))

    @classmethod
    def ec(cls, kid: str) -> Key:
        return cls(kid, "ES256", ec.generate_private_key(ec.SECP256R1()))

    @property
    def pem(self) -> bytes:
        """The public key in PEM, with which an attacker could sign HS256 tokens."""
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def jwk(self) -> dict[str, Any]:
        public = self.private.public_key()
        if isinstance(public, rsa.RSAPublicKey):
            made = RSAAlgorithm.to_jwk(public, as_dict=True)
        else:
            made = ECAlgorithm.to_jwk(public, as_dict=True)
        return {**made, "alg": self.algorithm, "use": "sig"} | ({} if self.kid is None else {"kid": self.kid})


@cache
def _first_key() -> Key:
    """One a process: making it takes a quarter of a second."""
    return Key.rsa("k1")


@dataclass
class Issuer:
    url: str = ""
    keys: list[Key] = field(default_factory=lambda: [_first_key()])
    extra: list[dict[str, Any]] = field(default_factory=list)
    """Other members of the published set."""
    fetches: int = 0
    status: int = 200
    """The status of a response with the key set; 0: no response is sent."""

    @property
    def jwks_url(self) -> str:
        return f"{self.url}/keys"

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of AuthSettings that trust this issuer."""
        return {"jwks_url": self.jwks_url, "issuer": self.url, "audience": AUDIENCE} | changes

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a valid token with these changes; None removes a claim."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "iat": now,
            "exp": now + 600,
            "tenant": "acme",
            "email": "ann",
            "sub": "0001",
            "email_verified": True,
        }
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(self, *, key: Key | None = None, kid: str | None = None, typ: str | None = "JWT", **changes: Any) -> str:
        key = key or self.keys[-1]
        named = kid or key.kid
        headers = {"typ": typ} | ({"kid": named} if named else {})
        return jwt.encode(self.claims(**changes), key.private, key.algorithm, headers=headers)

    def unsigned(self, **changes: Any) -> str:
        """alg=none, as any library would make it."""
        return jwt.encode(self.claims(**changes), None, "none", headers={"kid": self.keys[-1].kid})

    def with_the_public_key_as_secret(self, **changes: Any) -> str:
        """HS256 over the published key. Libraries refuse to make it; a forger's does not."""
        key = self.keys[-1]
        signed = ".".join(
            _base64(json.dumps(part).encode())
            for part in (
                {"alg": "HS256", "typ": "JWT", "kid": key.kid},
                self.claims(**changes),
            )
        )
        return f"{signed}.{_base64(hmac.digest(key.pem, signed.encode(), hashlib.sha256))}"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    app = FastAPI(openapi_url=None)

    @app.get("/keys")
    async def keys(request: Request) -> Response:
        issuer.fetches += 1
        while issuer.status == 0 and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        document = {"keys": [*(key.jwk() for key in issuer.keys), *issuer.extra]}
        return Response(json.dumps(document), issuer.status or 503, media_type="application/json")

    async with served(app) as address:
        issuer.url = address
        yield issuer
