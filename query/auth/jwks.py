"""The issuer's public keys: fetched without blocking anybody, remembered, and never fetched because of a stranger more
often than once in REFRESH_SECONDS."""

from __future__ import annotations

import asyncio
import json
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
"""Younger keys are taken as they are; older ones are fetched again first."""
PATIENCE_SECONDS = 1.0
"""For which a request with keys that are older waits: an issuer that answers has the last word, one that is away does
not hold up whoever it vouched for."""
REFRESH_SECONDS = 30.0
"""Between two attempts, whatever tokens name: an unknown ``kid`` costs the issuer at most two requests a minute."""
MAX_BYTES = 256 * 1024

Keys = Mapping[str | None, Mapping[str, Any]]
"""JWKs for signatures by their ``kid``; of an issuer that names none of its keys, the only one, as None."""


class KeySet:
    """Safe to share between tasks of one event loop."""

    def __init__(
        self, url: str, *, keep_seconds: float, client: httpx.AsyncClient, clock: Callable[[], float] = monotonic
    ) -> None:
        """keep_seconds: how long keys go on being believed while the issuer is away. client: not closed by us."""
        self._url = url
        self._keep_seconds = keep_seconds
        self._client = client
        self._clock = clock
        self._keys: Keys = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def key(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key of that name for that algorithm; None: the issuer has none. Raises Retryable when we know no keys, or
        only such as are too old, and the issuer cannot be reached."""
        if (self._age() > FRESH_SECONDS or self._find(kid) is None) and self._may_try():
            self._fetching = asyncio.create_task(self._fetch(), name="fetch JWKS")
        if self._fetching is not None and self._age() > FRESH_SECONDS:
            await asyncio.wait({self._fetching}, timeout=PATIENCE_SECONDS)
        if self._fetching is not None and (self._find(kid) is None or self._age() > self._keep_seconds):
            await asyncio.shield(self._fetching)  # one fetch for all that wait
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

    def _may_try(self) -> bool:
        if self._fetching is not None and not self._fetching.done():
            return False
        return self._tried_at is None or self._clock() - self._tried_at >= REFRESH_SECONDS

    async def _fetch(self) -> None:
        """Replaces all keys, or leaves all as they are: a key that the issuer no longer names is no longer believed."""
        self._tried_at = self._clock()
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                self._client.stream("GET", self._url, headers={"Accept": "application/json"}) as answer,
            ):
                answer.raise_for_status()
                self._keys = usable(json.loads(await _capped(answer)))
        except (httpx.HTTPError, TimeoutError, ValueError, RecursionError) as error:
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
    """The public signature keys of a JWK Set. Raises ValueError when there is none: the issuer is broken."""
    listed = document.get("keys") if isinstance(document, dict) else None
    keys = {
        key.get("kid"): key
        for key in (listed if isinstance(listed, list) else [])
        if isinstance(key, dict)
        and isinstance(key.get("kid"), str | None)
        and key.get("kty") in ("RSA", "EC", "OKP")  # a shared secret in a public document is nobody's proof
        and key.get("use", "sig") == "sig"
    }
    if not keys:
        raise ValueError("no public signature key in it")
    return keys
