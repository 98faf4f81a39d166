"""Bodies of requests that are read whole: each of a size, in a time, and all of them together of a size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Request

from pipeline.serving import KeyedLimit

RETRY_AFTER_SECONDS = 5


class BodyRefused(Exception):
    """``status`` (408, 413, 503) and one line."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}


class Bodies:
    """Law: what is held of bodies never exceeds the shares, whatever their requests declared. Of one event loop."""

    def __init__(self, shares: KeyedLimit, on_full: Callable[[], None]) -> None:
        """shares: bytes in all and for each key. on_full: called for each request that is turned away by them."""
        self._shares, self._on_full = shares, on_full

    @asynccontextmanager
    async def read(self, request: Request, *, most: int, seconds: float, key: str) -> AsyncIterator[bytes]:
        """Its room is given back at the end: leave when nothing of it is needed. key: whose share it is counted in.
        Raises BodyRefused, and ClientDisconnect when its sender leaves."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
            raise BodyRefused(413, f"a request has at most {most} bytes")
        body = bytearray()
        taken = 0
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for part in request.stream():
                        if len(body) + len(part) > most:
                            raise BodyRefused(413, f"a request has at most {most} bytes")
                        if self._shares.lacks(key, len(part)) is not None:
                            self._on_full()
                            raise BodyRefused(503, "too much is being sent at once: send it again in a moment")
                        self._shares.take(key, len(part))
                        taken += len(part)
                        body += part
            except TimeoutError as error:
                raise BodyRefused(408, f"the whole request has to arrive within {seconds:g} s") from error
            yield bytes(body)
        finally:
            self._shares.give(key, taken)
