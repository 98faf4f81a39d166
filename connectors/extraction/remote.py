"""Files read by an extraction service (``PENSTOCK_EXTRACTION_URL``), of which nothing is believed but a text.

What it does not do is never a document's fault: a service that is away, slow, overloaded or another program raises
Deferred, and the document is read later.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import IO
from urllib.parse import urlsplit

import httpx

from connectors.extraction import answer
from connectors.extraction.result import Extracted
from connectors.extraction.settings import ExtractionSettings, confinement, from_environment
from connectors.extraction.titles import tidy
from pipeline.core.errors import Deferred, Misconfigured
from pipeline.core.retry import backoff, retry_after_seconds

PATH = "/v1/extract"
PATIENCE_SECONDS = 20.0
"""So long a service that is away is asked again here, over its restart; then by who asked for the document. One that is
busy: for as long as a document may take."""
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 10.0
"""Whatever the service asks for."""
MAX_STATUS_BYTES = 16 * 1024
NAME_CHARACTERS = 255
"""Of a file's name the end counts."""
_PIECE = 256 * 1024
_MODES = frozenset({"confined", "refused", "unconfined"})


class _Away(Deferred):
    """Worth another attempt at once."""


class _Busy(_Away):
    """It is there, and asks us to come again: it may have kept the file waiting for a place before it said so."""


@dataclass(slots=True)
class RemoteJob:
    """One document. ``run`` is called once, in a thread without an event loop."""

    file: IO[bytes]
    name: str
    media_type: str | None
    settings: ExtractionSettings
    _killed: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _task: asyncio.Task[Extracted] | None = None

    def kill(self) -> None:
        """From any thread: ``run`` ends soon."""
        self._killed.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._task.cancel)

    def run(self) -> Extracted:
        """Raises Unreadable, as the service says, and Deferred."""
        try:
            return asyncio.run(self._patiently())
        except asyncio.CancelledError as error:
            raise Deferred("reading a file was given up") from error

    async def _patiently(self) -> Extracted:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        attempt, began, away_since = 0, time.monotonic(), None
        while not self._killed.is_set():
            try:
                return await self._once()
            except _Away as error:
                asked, now = error.retry_after, time.monotonic()
                if isinstance(error, _Busy):
                    away_since, deadline = None, began + self.settings.response_seconds
                else:
                    away_since = now if away_since is None else away_since
                    deadline = away_since + PATIENCE_SECONDS
                wait = backoff(
                    attempt,
                    base=0.5,
                    cap=LONGEST_PAUSE_SECONDS,
                    random=random.random(),  # noqa: S311 # jitter
                    retry_after=None if asked is None else min(asked, LONGEST_PAUSE_SECONDS),
                )
                if now + wait > deadline:
                    raise
            attempt += 1
            await asyncio.sleep(wait)
        raise asyncio.CancelledError

    async def _once(self) -> Extracted:
        self.file.seek(0)
        words = {"name": self.name[-NAME_CHARACTERS:], "media_type": (self.media_type or "")[:NAME_CHARACTERS]}
        headers = {"content-type": "application/octet-stream"}
        async with _asking(
            self.settings,
            "POST",
            PATH,
            self.settings.response_seconds,
            params=words,
            content=self._bytes(),
            headers=headers,
        ) as response:
            told = await _body(response, answer.MAX_BYTES, self.settings)
        try:
            found = answer.read(told)
        except answer.Malformed as error:
            raise _strange(self.settings, str(error)) from error
        if isinstance(found, str):
            raise _strange(self.settings, "it holds no text")
        return found

    async def _bytes(self) -> AsyncIterator[bytes]:
        while piece := self.file.read(_PIECE):  # of a file on this machine's disk
            yield piece


async def condition(settings: ExtractionSettings | None = None) -> dict[str, str]:
    """For people: how files are read (``files``: confined, refused, unconfined; unreachable: the service does not
    answer), and what the kernel offers that does it. Raises Misconfigured."""
    settings = settings or from_environment()
    if settings.url is None:
        return confinement()
    try:
        async with _asking(settings, "GET", "/status", LOOK_SECONDS) as response:
            told = await _body(response, MAX_STATUS_BYTES, settings)
        files, kernel = _mode(json.loads(told))
    except Deferred as error:
        return {"files": "unreachable", "kernel": str(error)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"files": "unreachable", "kernel": str(_strange(settings, "its status is not one"))}
    return {"files": files, "kernel": f"{kernel}, at {_shown(settings)}"}


def _mode(status: dict[str, str]) -> tuple[str, str]:
    """Raises ValueError, KeyError and TypeError: it may be anything."""
    files, kernel = status["files"], tidy(str(status["kernel"])) or "?"
    if files not in _MODES:
        raise ValueError("no word of ours")
    return files, kernel[:100]


@asynccontextmanager
async def _asking(
    settings: ExtractionSettings, method: str, path: str, seconds: float, **request: object
) -> AsyncIterator[httpx.Response]:
    """An answer with status 200, its body unread. No proxy and no redirect: either would take documents elsewhere. A
    client for each: no cookie and no connection outlives a document. Raises _Away and Deferred."""
    where = _shown(settings)
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(
                base_url=settings.url or "",
                trust_env=False,
                follow_redirects=False,
                verify=_trusted(settings.ca_certs),
                timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
                headers={"user-agent": "penstock", "accept-encoding": "identity"},
            ) as client,
            client.stream(method, path, **request) as response,  # type: ignore[arg-type]
        ):
            if response.status_code == 429 or response.status_code >= 500:
                asked = retry_after_seconds(response.headers, now=datetime.now(UTC))
                raise (_Away if asked is None else _Busy)(
                    f"the extraction service {where} is busy, or not there yet (status {response.status_code})",
                    retry_after=None if asked is None else min(asked, LONGEST_PAUSE_SECONDS),
                )
            if response.status_code != 200:
                raise _strange(settings, f"status {response.status_code}")
            yield response
    except TimeoutError as error:
        raise Deferred(
            f"the extraction service {where} did not answer within {seconds:g} s: has it the same PENSTOCK_EXTRACTION_…"
            " settings?"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        raise _Away(f"the extraction service {where} cannot be reached ({type(error).__name__})") from error


async def _body(response: httpx.Response, most: int, settings: ExtractionSettings) -> bytes:
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _strange(settings, "it is compressed")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most:
            raise _strange(settings, f"it has more than {most:,} bytes")
    return bytes(body)


def _strange(settings: ExtractionSettings, what: str) -> Deferred:
    return Deferred(
        f"the extraction service {_shown(settings)} answers what no extraction service of this version does ({what}):"
        " does PENSTOCK_EXTRACTION_URL name it? Nothing is read until it does"
    )


def _shown(settings: ExtractionSettings) -> str:
    return urlsplit(settings.url or "").netloc


@cache
def _trusted(ca_certs: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_certs) if ca_certs else httpx.create_ssl_context(trust_env=False)
    except OSError as error:
        raise Misconfigured(
            f"PENSTOCK_EXTRACTION_CA_CERTS: {ca_certs} cannot be read as certificates ({error.strerror or error})"
        ) from error
