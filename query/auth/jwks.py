"""The issuer's public keys, cached and fetched in the background. Unknown keys in tokens cause at most one fetch in
REFRESH_SECONDS."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import httpx
import structlog
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from pipeline.core.errors import Retryable

log = structlog.get_logger()

FETCH_SECONDS = 5.0
FRESH_SECONDS = 600.0
"""The age up to which keys are used without fetching them again."""
WAIT_SECONDS = 1.0
"""How long a request waits for a fetch if the cached keys are older: an issuer that responds may revoke a key, and an
outage does not block callers with valid tokens."""
REFRESH_SECONDS = 30.0
"""The shortest interval between two fetches: tokens with an unknown ``kid`` cost the issuer at most two requests a
minute."""
MAX_BYTES = 256 * 1024

Keys = Mapping[str | None, Mapping[str, Any]]
"""Signature keys (JWKs) by their ``kid``; the only key of an issuer that uses no ``kid`` has None."""


class KeySet:
    """The keys of one issuer. Safe to share between tasks of one event loop."""

    def __init__(
        self, url: str, *, keep_seconds: float, client: httpx.AsyncClient, clock: Callable[[], float] = monotonic
    ) -> None:
        """keep_seconds: how long cached keys stay valid while the issuer is unavailable. client: is not closed here."""
        self._url = url
        self._keep_seconds = keep_seconds
        self._client = client
        self._clock = clock
        self._keys: Keys = {}
        self._fetched_at: float | None = None
        self._attempted_at: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key with this ``kid`` for this algorithm; None: the issuer has none. Raises Retryable when the cached
        keys are too old or missing and the issuer cannot be reached."""
        if (self._age() > FRESH_SECONDS or self._find(kid) is None) and self._may_fetch():
            self._fetching = asyncio.create_task(self._fetch(), name="fetch JWKS")
        if self._fetching is not None and self._age() > FRESH_SECONDS:
            await asyncio.wait({self._fetching}, timeout=WAIT_SECONDS)
        if self._fetching is not None and (self._find(kid) is None or self._age() > self._keep_seconds):
            await asyncio.shield(self._fetching)  # one fetch for all waiting requests
        if self._age() > self._keep_seconds:
            raise Retryable(f"the issuer's keys cannot be fetched from {self._url}", retry_after=REFRESH_SECONDS)
        jwk = self._find(kid)
        if jwk is None or jwk.get("alg", algorithm) != algorithm:
            return None
        try:
            return PyJWK(dict(jwk), algorithm)
        except PyJWTError:
            return None  # a key of another kind than the token's algorithm

    async def aclose(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    def _find(self, kid: str | None) -> Mapping[str, Any] | None:
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(kid)

    def _may_fetch(self) -> bool:
        if self._fetching is not None and not self._fetching.done():
            return False
        return self._attempted_at is None or self._clock() - self._attempted_at >= REFRESH_SECONDS

    async def _fetch(self) -> None:
        """Replace all keys, so that a key that the issuer no longer publishes becomes invalid; on an error keep all."""
        self._attempted_at = self._clock()
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                self._client.stream("GET", self._url, headers={"Accept": "application/json"}) as answer,
            ):
                answer.raise_for_status()
                self._keys = usable(json.loads(await _capped(answer)))
        except (httpx.HTTPError, ssl.SSLError, TimeoutError, ValueError, RecursionError) as error:
            log.warning("jwks_unreachable", url=self._url, error=f"{type(error).__name__}: {error}"[:200])
            return
        self._fetched_at = self._clock()


async def _capped(answer: httpx.Response) -> bytes:
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
    return bytes(body)


def usable(document: Any) -> Keys:
    """The public signature keys of a JWK Set. Raises ValueError if there is none."""
    listed = document.get("keys") if isinstance(document, dict) else None
    keys = {
        key.get("kid"): key
        for key in (listed if isinstance(listed, list) else [])
        if isinstance(key, dict)
        and isinstance(key.get("kid"), str | None)
        and key.get("kty") in ("RSA", "EC", "OKP")  # public keys only: a published secret proves nothing
        and key.get("use", "sig") == "sig"
    }
    if not keys:
        raise ValueError("the key set contains no public signature key")
    return keys
