"""The token of a client: where it comes from, and when it is renewed."""

from __future__ import annotations

import base64
import inspect
import json
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import anyio
import httpx

from penstock.client.errors import TokenUnavailable

Token = str | Path | Callable[[], str]
"""A token or API key; a file that contains one, or a header line with one; or a function that returns one."""
AsyncToken = Token | Callable[[], Awaitable[str]]
RENEW_BEFORE_SECONDS = 60
"""A token is renewed this long before it expires, for clocks that differ."""
PREFIX = "Authorization: Bearer "


class BearerToken(httpx.Auth):
    """Authenticates requests. A token from a file or a function is read again shortly before the time in its claim
    ``exp``, and after a response with 401; the request is then repeated once if the token is another one."""

    def __init__(self, source: AsyncToken) -> None:
        """Raises ValueError if the token is the name of a file."""
        if isinstance(source, str) and os.path.isfile(source):
            raise ValueError("the token is the name of a file: give it as a pathlib.Path")
        self._source = source
        self._token: str | None = None
        self._lock = threading.Lock()
        self._async_lock = anyio.Lock()

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        with self._lock:
            token = self._current() or self._store(self._read())
        response = yield _with(request, token)
        if response.status_code == 401 and not isinstance(self._source, str):
            with self._lock:
                renewed = self._newer(token) or self._store(self._read())
            if renewed != token:
                yield _with(request, renewed)

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        async with self._async_lock:
            token = self._current() or self._store(await self._aread())
        response = yield _with(request, token)
        if response.status_code == 401 and not isinstance(self._source, str):
            async with self._async_lock:
                renewed = self._newer(token) or self._store(await self._aread())
            if renewed != token:
                yield _with(request, renewed)

    def _current(self) -> str | None:
        """The token, unless it must be renewed."""
        if self._token is None:
            return None
        expires = None if isinstance(self._source, str) else expiry(self._token)
        return None if expires is not None and expires - RENEW_BEFORE_SECONDS <= time.time() else self._token

    def _newer(self, refused: str) -> str | None:
        """The token, if another request has renewed it in the meantime."""
        return self._token if self._token != refused else None

    def _store(self, token: str) -> str:
        """Raises TokenUnavailable for one that no header can hold, which the library would quote."""
        if not re.fullmatch(r"[!-~]+", token):
            raise TokenUnavailable("the token is empty, or holds a space, a line end or a letter that is not ASCII")
        self._token = token
        return token

    def _read(self) -> str:
        token = self._value()
        if inspect.iscoroutine(token):
            token.close()
        if not isinstance(token, str):
            raise TypeError("the function that returns the token is asynchronous: use AsyncClient")
        return token

    async def _aread(self) -> str:
        token = self._value()
        return str(await token if inspect.isawaitable(token) else token)

    def _value(self) -> Any:
        if isinstance(self._source, Path):
            return _from_file(self._source)
        return self._source if isinstance(self._source, str) else self._source()


def expiry(token: str) -> float | None:
    """The time in the claim ``exp`` in seconds since 1970, not verified. None: the token has none, or is no JSON Web
    Token."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _from_file(path: Path) -> str:
    try:
        token = path.read_text().strip().removeprefix(PREFIX)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenUnavailable(f"cannot read the token in {path}: {getattr(error, 'strerror', 'not text')}") from error
    if not token:
        raise TokenUnavailable(f"{path} contains no token")
    return token


def _with(request: httpx.Request, token: str) -> httpx.Request:
    request.headers["Authorization"] = f"Bearer {token}"
    return request
