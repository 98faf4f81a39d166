"""Has files read by an extraction service (``PENSTOCK_EXTRACTION_URL``). Its responses are validated, not trusted.

A failure of the service is never the document's: if it is unreachable, slow, overloaded or another program, the job
raises Deferred, and the document is read later.
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
LATER, NOW = "later", "now"
"""Values of the parameter ``ocr``: a scanned PDF is to be refused (``needs_ocr``), so that it holds no thread in which
files are read, or OCR is to process it. Without the parameter, the service does one after the other."""
PATIENCE_SECONDS = 20.0
"""How long an unreachable service is retried here, which covers its restart; afterwards the caller retries. A busy one
is retried for as long as a document may take."""
CONNECT_SECONDS = 5.0
STATUS_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 10.0
"""Longest time between two attempts, even if the service's Retry-After is longer."""
MAX_STATUS_BYTES = 16 * 1024
MAX_NAME_CHARACTERS = 255
"""A longer file name loses its beginning: readers need its ending."""
_PIECE_BYTES = 256 * 1024
_MODES = frozenset({"confined", "refused", "unconfined"})


class _Unreachable(Deferred):
    """The service did not respond; another attempt may succeed soon."""


class _Busy(_Unreachable):
    """The service responded that it is busy, perhaps after the file had waited for a free reader."""


@dataclass(slots=True)
class RemoteJob:
    """Reads one document. ``run`` is called once, in a thread without an event loop."""

    file: IO[bytes]
    name: str
    media_type: str | None
    settings: ExtractionSettings
    recognises: bool = False
    """Whether the service is to recognise its text by OCR."""
    _killed: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _task: asyncio.Task[Extracted] | None = None

    def kill(self) -> None:
        """End ``run`` soon. May be called from any thread."""
        self._killed.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._task.cancel)

    def run(self) -> Extracted:
        """Have the document read. Raises Unreadable if the service says so, and Deferred."""
        try:
            return asyncio.run(self._read_with_retries())
        except asyncio.CancelledError as error:
            raise Deferred("the extraction of a file was cancelled") from error

    async def _read_with_retries(self) -> Extracted:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        attempt, began, unreachable_since = 0, time.monotonic(), None
        while not self._killed.is_set():
            try:
                return await self._attempt()
            except _Unreachable as error:
                retry_after, now = error.retry_after, time.monotonic()
                if isinstance(error, _Busy):
                    unreachable_since, deadline = None, began + self.settings.response_seconds
                else:
                    unreachable_since = now if unreachable_since is None else unreachable_since
                    deadline = unreachable_since + PATIENCE_SECONDS
                wait = backoff(
                    attempt,
                    base=0.5,
                    cap=LONGEST_PAUSE_SECONDS,
                    random=random.random(),  # noqa: S311 # jitter
                    retry_after=None if retry_after is None else min(retry_after, LONGEST_PAUSE_SECONDS),
                )
                if now + wait > deadline:
                    raise
            attempt += 1
            await asyncio.sleep(wait)
        raise asyncio.CancelledError

    async def _attempt(self) -> Extracted:
        self.file.seek(0)
        parameters = {
            "name": _sendable(self.name[-MAX_NAME_CHARACTERS:]),
            "media_type": _sendable((self.media_type or "")[:MAX_NAME_CHARACTERS]),
        }
        if self.settings.ocr:
            parameters["ocr"] = NOW if self.recognises else LATER
        headers = {"content-type": "application/octet-stream"}
        async with _request(
            self.settings,
            "POST",
            PATH,
            self.settings.response_seconds,
            params=parameters,
            content=self._bytes(),
            headers=headers,
        ) as response:
            body = await _body(response, answer.MAX_BYTES, self.settings)
        try:
            result = answer.read(body)
        except answer.Malformed as error:
            raise _invalid_response(self.settings, str(error)) from error
        if isinstance(result, str):
            raise _invalid_response(self.settings, "it holds no text")
        return result

    async def _bytes(self) -> AsyncIterator[bytes]:
        while piece := self.file.read(_PIECE_BYTES):  # a file on a local disk: it blocks only briefly
            yield piece


def _sendable(text: str) -> str:
    """Return a text as UTF-8 can express it: a name in a source's JSON may have half of a character."""
    return text.encode("utf-8", "replace").decode()


async def condition(settings: ExtractionSettings | None = None) -> dict[str, str]:
    """Describe how files are read (``files``: confined, refused, unconfined; unreachable: the service does not
    respond), and what the kernel of the machine that reads them offers (``kernel``). Raises Misconfigured."""
    settings = settings or from_environment()
    if settings.url is None:
        return confinement()
    try:
        async with _request(settings, "GET", "/status", STATUS_SECONDS) as response:
            body = await _body(response, MAX_STATUS_BYTES, settings)
        files, kernel = _mode(json.loads(body))
    except Deferred as error:
        return {"files": "unreachable", "kernel": str(error)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"files": "unreachable", "kernel": str(_invalid_response(settings, "its status has another format"))}
    return {"files": files, "kernel": f"{kernel}, at {_netloc(settings)}"}


def _mode(status: dict[str, str]) -> tuple[str, str]:
    """Validate a status, which may have any shape. Raises ValueError, KeyError and TypeError."""
    files, kernel = status["files"], tidy(str(status["kernel"])) or "?"
    if files not in _MODES:
        raise ValueError("unknown mode")
    return files, kernel[:100]


@asynccontextmanager
async def _request(
    settings: ExtractionSettings, method: str, path: str, seconds: float, **request: object
) -> AsyncIterator[httpx.Response]:
    """Yield a response with status 200, its body unread. Proxies and redirects are not followed: either would take
    documents elsewhere. Each request has its own client, so that no cookie or connection outlives a document. Raises
    _Unreachable and Deferred."""
    address = _netloc(settings)
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(
                base_url=settings.url or "",
                trust_env=False,
                follow_redirects=False,
                verify=_tls_context(settings.ca_certs),
                timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
                headers={"user-agent": "penstock", "accept-encoding": "identity"},
            ) as client,
            client.stream(method, path, **request) as response,  # type: ignore[arg-type]
        ):
            if response.status_code == 429 or response.status_code >= 500:
                retry_after = retry_after_seconds(response.headers, now=datetime.now(UTC))
                raise (_Unreachable if retry_after is None else _Busy)(
                    f"the extraction service {address} is busy or not ready (status {response.status_code})",
                    retry_after=None if retry_after is None else min(retry_after, LONGEST_PAUSE_SECONDS),
                )
            if response.status_code != 200:
                raise _invalid_response(settings, f"status {response.status_code}")
            yield response
    except TimeoutError as error:
        raise Deferred(
            f"the extraction service {address} did not answer within {seconds:g} s: check that it has the same"
            " PENSTOCK_EXTRACTION_… settings"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        raise _Unreachable(f"the extraction service {address} cannot be reached ({type(error).__name__})") from error


async def _body(response: httpx.Response, most: int, settings: ExtractionSettings) -> bytes:
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _invalid_response(settings, "it is compressed")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most:
            raise _invalid_response(settings, f"it has more than {most:,} bytes")
    return bytes(body)


def _invalid_response(settings: ExtractionSettings, reason: str) -> Deferred:
    return Deferred(
        f"the extraction service {_netloc(settings)} gave an invalid answer ({reason}): check that"
        " PENSTOCK_EXTRACTION_URL names a service of this version; files wait until it does"
    )


def _netloc(settings: ExtractionSettings) -> str:
    return urlsplit(settings.url or "").netloc


@cache
def _tls_context(ca_certs: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_certs) if ca_certs else httpx.create_ssl_context(trust_env=False)
    except OSError as error:
        raise Misconfigured(
            f"PENSTOCK_EXTRACTION_CA_CERTS: {ca_certs} cannot be read as certificates ({error.strerror or error})"
        ) from error
