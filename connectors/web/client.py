"""The HTTP client for sources: requests, redirects, retries, and bodies that are decoded up to a limit of size."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import random
import re
import secrets
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, TypeVar

import httpx

from connectors.errors import Denied, Forbidden, Missing, Rejected, ServerFailed, TooLarge
from connectors.json_values import MAX_VALUES, has_too_many_values
from connectors.web.limits import (
    SECONDARY_LIMIT,
    SECONDARY_SECONDS,
    THROTTLE_CODES,
    Gate,
    Limits,
    Pace,
    budget_pause,
    limits_bucket,
    throttled,
)
from connectors.web.transport import LOCATION, Guarded, Hosts, Resolver, default_ssl_context, origin, system_resolver
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.retry import backoff, retry_after_seconds
from pipeline.observability.tracing import trace_source_request

ACCEPT_ENCODING = "gzip"
"""The only encoding that is requested and decoded, in steps of bounded size."""
ERROR_BYTES = 64 * 1024
_STEP = 256 * 1024
_PIECE = 4 * 1024
"""So much of a packed body is decoded at once: what follows the end of a member is copied."""
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,63}")
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_HALF = re.compile(rf"(?:[^\\\ud800-\udfff]++|\\(?:[^u]|u(?![dD][89a-fA-F]))|{_PAIR})*+")
"""Text of JSON up to half of a character, or up to an escape of it without the other half."""
_ESCAPE_OR_HALF = re.compile(rf"({_PAIR}|\\(?!u[dD][89a-fA-F]).)|\\u[0-9a-fA-F]{{4}}|[\ud800-\udfff]", re.DOTALL)
"""The group: whatever is not half of a character."""
_STRUCTURE = re.compile(r'[\[\]{}]|"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
"""The brackets of JSON, and its texts as a whole."""
MAX_NESTED = 300
"""Values that are nested deeper are not read, where Python does not read JSON as it is (about a thousand levels)."""
MAX_DIGITS = 1_000
_TEXTUAL = re.compile(r"text/.*|application/(.*\+)?(json|xml)|application/(javascript|x-ndjson|csv|yaml|x-yaml)")


async def parts(response: httpx.Response, where: str, limit: int) -> AsyncIterator[bytes]:
    """Yield the decoded body. Raises TooLarge as soon as it is certain, or when a packed body is itself longer than the
    limit, Retryable for a body that was cut off, and ServerFailed for one that does not decode."""
    length = response.headers.get("content-length", "")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise ServerFailed(f"{where} responded in an encoding that was not requested")
    if encoding == "identity" and length.isdecimal() and int(length) > limit:
        raise too_large(where, limit)
    gunzip = Gunzip() if encoding == "gzip" else None
    total = received = 0
    try:
        async for raw in response.aiter_raw():
            received += len(raw)
            if received > limit + limit // 100 + 1024:  # gzip adds a little to what cannot be packed
                raise too_large(where, limit)
            for part in gunzip.feed(raw) if gunzip else (raw,):
                total += len(part)
                if total > limit:
                    raise too_large(where, limit)
                yield part
                if len(part) == _STEP:  # a body that was packed to a thousandth takes a turn for each step
                    await asyncio.sleep(0)
    except zlib.error as error:
        raise ServerFailed(f"{where} answered with a body that does not decode: a proxy may have damaged it") from error
    if gunzip and not gunzip.complete:
        raise Retryable(f"{where} answered with a body that was cut off")


def too_large(where: str, limit: int) -> TooLarge:
    return TooLarge(f"{where} answered with more than {limit:,} bytes: not read further", limit=limit)


class Gunzip:
    """Decodes gzip in steps of at most ``_STEP`` bytes, whatever the ratio of compression."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._fed = False

    @property
    def complete(self) -> bool:
        """Whether the end of the gzip stream was read. An empty body is complete, too."""
        return self._decoder.eof or not self._fed

    def feed(self, raw: bytes) -> Iterator[bytes]:
        for start in range(0, len(raw), _PIECE):
            yield from self._feed(raw[start : start + _PIECE])

    def _feed(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            if self._decoder.eof:  # a further member: gzip files may be put one after another
                self._decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
            self._fed = True
            if part := self._decoder.decompress(piece, _STEP):
                yield part
            piece = self._decoder.unconsumed_tail or self._decoder.unused_data
        while not self._decoder.eof and (part := self._decoder.decompress(b"", _STEP)):
            yield part


async def read(response: httpx.Response, where: str, limit: int) -> bytes:
    return b"".join([part async for part in parts(response, where, limit)])


def media_type(response: httpx.Response) -> str:
    """Return the media type in lower case, without parameters; empty if the response has none."""
    value: str = response.headers.get("content-type", "")
    return value.partition(";")[0].strip().lower()


async def read_json(response: httpx.Response, where: str, limit: int) -> Any:
    """Return the JSON of a response, or None for a 204. Raises Retryable for anything but JSON, and TooLarge."""
    if response.status_code == 204:
        return None
    kind = media_type(response)
    if kind and kind != "application/json" and not kind.endswith("+json") and kind != "text/json":
        raise Retryable(
            f"{where} answered with {_printable(kind)} instead of JSON: check whether it is a login page or a proxy"
        )
    data = await read(response, where, limit)
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if (whole := _NO_HALF.match(text)) is not None and whole.end() < len(text):
            text = await asyncio.to_thread(_without_halves, text)
        is_long = len(text) > _STEP
        if await asyncio.to_thread(has_too_many_values, text) if is_long else has_too_many_values(text):
            raise TooLarge(f"{where} answered with JSON of more than {MAX_VALUES:,} values: not read", limit=limit)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError):
            return await asyncio.to_thread(_loads_unreadable, text)
    except (ValueError, RecursionError):
        pass  # the error's text and its chain would hold the body
    raise Retryable(f"{where} answered with something that is not JSON, or was cut off")


def _without_halves(text: str) -> str:
    """Replace halves of characters, which JSON can express: no other format can, and whoever writes one into a text
    must not stop the reading of all others."""
    return _ESCAPE_OR_HALF.sub(lambda match: match[1] or r"\ufffd", text)


def _loads_unreadable(text: str) -> Any:
    """Return JSON in which infinity stands for what Python does not read: numbers of thousands of digits, and values
    that are nested ever deeper. Infinity is in no other JSON, and fails whatever reads it as something else: the item
    that has it is set aside, and the others are read."""
    return json.loads(_without_depths(text), parse_int=_int_or_infinity)


def _int_or_infinity(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float("inf")


def _without_depths(text: str) -> str:
    parts_read: list[str] = []
    depth = since = 0
    for token in _STRUCTURE.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == MAX_NESTED + 1:
                parts_read.append(text[since : token.start()])
        elif token[0] in "]}":
            if depth == MAX_NESTED + 1:
                parts_read.append("Infinity")
                since = token.end()
            depth -= 1
    return "".join((*parts_read, text[since:])) if depth <= MAX_NESTED else text


async def read_text(response: httpx.Response, where: str, limit: int) -> str:
    kind = media_type(response)
    if kind and not _TEXTUAL.fullmatch(kind):
        raise Retryable(f"{where} answered with {_printable(kind)} instead of text")
    data = await read(response, where, limit)
    try:
        return data.decode(response.charset_encoding or "utf-8", "replace")
    except LookupError:
        return data.decode("utf-8", "replace")


def _printable(kind: str) -> str:
    return kind if re.fullmatch(r"[a-z0-9.+\-]{1,40}/[a-z0-9.+\-]{1,80}", kind) else "an unknown type"


async def error_code(response: httpx.Response) -> str | None:
    """Return the vendor's error code from the body of an error, or None. Never a text that the request itself holds."""
    try:
        code = _code_in(json.loads(await read(response, "", ERROR_BYTES)))
    except (ValueError, RecursionError, TooLarge, Retryable, httpx.HTTPError):
        return None
    sent = str(response.request.url) + " ".join(response.request.headers.values())
    return None if code is None or code in sent else code


def _code_in(body: Any) -> str | None:
    """Find the error code where vendors put it. Google: error.errors[0].reason, error.status. Atlassian:
    errors[0].code, code. Slack and OAuth: error. GitHub, for its secondary limit: the end of documentation_url. Others:
    errorCode, code, type."""
    if not isinstance(body, dict):
        return None
    if str(body.get("documentation_url")).endswith(SECONDARY_LIMIT):
        return SECONDARY_LIMIT
    inner = body.get("error")
    first: Any = None
    for part in (inner, body):
        if isinstance(part, dict) and isinstance(part.get("errors"), list) and part["errors"]:
            first = first or part["errors"][0]
    places = [first.get(name) for name in ("reason", "code")] if isinstance(first, dict) else []
    if isinstance(inner, dict):
        places += [inner.get("status"), inner.get("code"), inner.get("type")]
    places += [inner, body.get("errorCode"), body.get("code"), body.get("type")]
    return next((place for place in places if isinstance(place, str) and _CODE.fullmatch(place)), None)


MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")

# httpx logs every URL at INFO, httpcore every header of a response at DEBUG: addresses and cookies are secrets.
logging.getLogger("httpx").setLevel(logging.WARNING)
logging.getLogger("httpcore").setLevel(logging.INFO)

T = TypeVar("T")
Read = Callable[[httpx.Response, str], Awaitable[T]]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fetched:
    """A response with its whole body."""

    url: str
    """The address that answered, after redirects."""
    status: int
    headers: Mapping[str, str]
    """With names in lower case."""
    media_type: str
    """In lower case, without parameters, or ``""``."""
    body: bytes
    """Empty if it was written to a file."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Request:
    method: str
    url: httpx.URL
    headers: Mapping[str, str]
    json: Any
    data: Mapping[str, Any] | None
    ok: Collection[int]
    gates: Sequence[Gate]
    seconds: float
    failing_seconds: float | None = None
    permits: Callable[[str], Awaitable[bool]] | None = None


class Limited(Deferred):
    """A limit has refused a request: nothing passes ``gate`` until it may be sent again."""

    def __init__(self, message: str, gate: Gate, retry_after: float | None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.gate = gate


class Web:
    """Sends requests to a source and waits out its 429 and 5xx. Tasks may share a client; they then share its pace.

    Every method raises Missing (404, 410), Denied (401, 403), Rejected (another status that is not ``ok``), TooLarge,
    Forbidden (an address that is not permitted), Deferred (429, a spent budget) and Retryable (5xx, no response, a
    response that is cut off or wrong), the last two with ``retry_after`` and after at most ``limits.patience_seconds``
    of attempts. Every request must therefore be safe to repeat.

    Credentials (``headers``, ``auth``) go to the scheme, host and port of ``base_url`` alone.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx.Auth | None = None,
        also: Collection[str] = (),
        name: str,
        limits: Limits = Limits(),  # noqa: B008 — frozen
        resolver: Resolver = system_resolver,
        ssl_context: ssl.SSLContext | None = None,
        on_throttled: Callable[[str, float], None] | None = None,
        base_may_be_private: bool = True,
    ) -> None:
        """base_url: the prefix of all paths; its address may be private, unless ``base_may_be_private`` is False. also:
        further hosts, see ``transport.Hosts``. name: the connector's, for messages and metrics. resolver, ssl_context:
        for tests, and for a company's own certificates. Raises Misconfigured."""
        self.name = name
        self._base = _parsed(base_url)
        if self._base is None or self._base.scheme not in ("http", "https") or not self._base.host:
            raise Misconfigured(f"{name}: base_url is not a URL: write https://host/path")
        if self._base.userinfo or self._base.query or self._base.fragment:
            raise Misconfigured(f"{name}: base_url may hold no user name, password or query: credentials are settings")
        self._hosts = Hosts(self._base, also, base_may_be_private=base_may_be_private)
        self._headers = self._sendable(headers or {})
        self._auth = auth
        self._limits = limits
        self._pace = Pace(parallel=limits.parallel)
        self._on_throttled = on_throttled or throttled.get()
        self._client = httpx.AsyncClient(
            transport=Guarded(self._hosts, resolver, ssl_context or default_ssl_context(), 2 * limits.parallel),
            headers={"user-agent": "penstock", "accept": "*/*", "accept-encoding": ACCEPT_ENCODING},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none: a cookie is a credential
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=None),
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"Web({self.name!r}, {self._hosts.base})"

    def _sendable(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Check the headers here, because the exceptions of the library quote their values."""
        if any(not (text.isascii() and text.isprintable()) for pair in headers.items() for text in pair):
            raise Misconfigured(f"{self.name}: a header holds a letter that HTTP cannot carry: check the credential")
        return dict(headers)

    def with_auth(self, auth: httpx.Auth) -> Web:
        """Return a client with other credentials, which shares the connections and the pace of this one. Only this one
        is closed."""
        other = copy.copy(self)
        other._auth = auth
        return other

    async def close(self) -> None:
        await self._client.aclose()

    async def json(
        self,
        method: str,
        path_or_url: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        data: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        ok: Collection[int] = (200,),
        bucket: str | None = None,
        failing_seconds: float | None = None,
    ) -> Any:
        """Send a request and return its JSON.

        params: merged into the address's own query. data: a form. headers: in addition to the client's, and sent to the
        base address alone. bucket: what the source limits separately (Slack: the method); a 429 there delays only the
        requests of the same bucket, unless it says that it concerns all (limits.limits_bucket). failing_seconds: after
        so many seconds of attempts ServerFailed is raised, for a caller that then requests less; None: after the
        limits' patience, as for every other failure.
        """
        request = self._request(
            method,
            path_or_url,
            params,
            {"accept": "application/json", **(headers or {})},
            json=json,
            data=data,
            ok=ok,
            bucket=bucket,
            seconds=self._limits.request_seconds,
            failing_seconds=failing_seconds,
        )
        return await self._run(request, lambda response, where: read_json(response, where, self._limits.answer_bytes))

    async def text(
        self,
        method: str,
        path_or_url: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        data: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        ok: Collection[int] = (200,),
        bucket: str | None = None,
    ) -> str:
        """Like ``json``, but returns text, decoded by the response's charset or UTF-8; invalid bytes are replaced."""
        request = self._request(
            method,
            path_or_url,
            params,
            headers or {},
            json=json,
            data=data,
            ok=ok,
            bucket=bucket,
            seconds=self._limits.request_seconds,
        )
        return await self._run(request, lambda response, where: read_text(response, where, self._limits.answer_bytes))

    async def fetch(
        self,
        path_or_url: str,
        *,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        ok: Collection[int] = (200,),
        permits: Callable[[str], Awaitable[bool]] | None = None,
        to: Path | None = None,
    ) -> Fetched:
        """Request an address with GET, and return status, headers and body. headers: in addition to the client's, and
        sent to the base address alone. permits: whether a redirect to an address may be followed; Forbidden is raised
        otherwise, before anything is sent there. to: the file that the body is written to, instead of into memory."""
        request = self._request(
            "GET", path_or_url, None, headers or {}, ok=ok, seconds=self._limits.download_seconds, permits=permits
        )

        async def whole(response: httpx.Response, where: str) -> Fetched:
            if to is not None:
                await self._save(response, where, to, max_bytes)
            return Fetched(
                url=str(response.url),
                status=response.status_code,
                headers={name.lower(): value for name, value in response.headers.items()},
                media_type=media_type(response),
                body=await read(response, where, max_bytes) if to is None else b"",
            )

        return await self._run(request, whole)

    async def download(
        self,
        path_or_url: str,
        to: Path,
        *,
        max_bytes: int,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        bucket: str | None = None,
    ) -> str:
        """Write the whole body to the file ``to``, which appears only when it is complete. Returns its media type in
        lower case, or ``""``."""
        request = self._request(
            "GET",
            path_or_url,
            params,
            headers or {},
            ok=(200,),
            bucket=bucket,
            seconds=self._limits.download_seconds,
        )

        async def save(response: httpx.Response, where: str) -> str:
            await self._save(response, where, to, max_bytes)
            return media_type(response)

        return await self._run(request, save)

    async def _save(self, response: httpx.Response, where: str, to: Path, max_bytes: int) -> None:
        part = to.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with part.open("xb") as file:
                waiting = bytearray()
                async for piece in parts(response, where, max_bytes):
                    waiting += piece
                    if len(waiting) >= _STEP:  # the disk may hold up a large file
                        await asyncio.to_thread(file.write, waiting)
                        waiting = bytearray()
                file.write(waiting)
            os.replace(part, to)
        except OSError as error:
            raise Retryable(f"{self.name}: {to.parent}: cannot be written ({error.strerror})") from error
        finally:
            part.unlink(missing_ok=True)

    def _request(
        self,
        method: str,
        path_or_url: str,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        *,
        json: Any = None,
        data: Mapping[str, Any] | None = None,
        ok: Collection[int],
        bucket: str | None = None,
        seconds: float,
        failing_seconds: float | None = None,
        permits: Callable[[str], Awaitable[bool]] | None = None,
    ) -> _Request:
        base = str(self._base).rstrip("/")
        url = _parsed(path_or_url if _ABSOLUTE.match(path_or_url) else f"{base}/{path_or_url.removeprefix('/')}")
        if url is None:
            raise Forbidden(f"{self.name}: the address of a request is not valid: nothing was sent")
        if params:
            url = url.copy_merge_params({key: value for key, value in params.items() if value is not None})
        self._hosts.check(url)
        return _Request(
            method=method.upper(),
            url=url,
            headers=self._sendable(headers),
            json=json,
            data=data,
            ok=ok,
            seconds=seconds,
            failing_seconds=failing_seconds,
            permits=permits,
            gates=self._pace.gates(origin(url).host, bucket),
        )

    async def _run(self, request: _Request, read: Read[T]) -> T:
        """Try until an attempt succeeds or patience ends. Waiting for a place among our own tasks costs no patience."""
        spent, attempt = 0.0, 0
        while True:
            spent += await self._open(request.gates, spent)
            async with self._pace.place(request.gates) as is_open:
                if not is_open:
                    continue
                started = time.monotonic()
                try:
                    return await self._attempt(request, read)
                except Retryable as error:
                    failure = error
                spent += time.monotonic() - started
            wait = backoff(
                attempt,
                base=self._limits.backoff_base_seconds,
                cap=self._limits.backoff_cap_seconds,
                retry_after=failure.retry_after,
                random=random.random(),  # noqa: S311 — jitter, no secret
            )
            if isinstance(failure, Limited):
                self._close(failure.gate, wait, refused=True)
            patience = self._limits.patience_seconds
            if request.failing_seconds is not None and isinstance(failure, ServerFailed):
                patience = min(patience, request.failing_seconds)
            if spent + wait > patience:
                failure.retry_after = wait
                raise failure
            if not isinstance(failure, Deferred):
                await asyncio.sleep(wait)
                spent += wait
            attempt += 1

    async def _open(self, gates: Sequence[Gate], spent: float) -> float:
        """Wait until the gates are open. Returns the seconds slept. Raises Deferred if that would take too long."""
        slept = 0.0
        while (left := max(gate.left() for gate in gates)) > 0:
            if spent + slept + left > self._limits.patience_seconds:
                raise Deferred(f"{self.name}: {self._hosts.base} asked to wait for {left:.0f} s more", retry_after=left)
            await asyncio.sleep(left)
            slept += left
        return slept

    def _close(self, gate: Gate, seconds: float, *, refused: bool) -> None:
        if added := gate.close(min(seconds, self._limits.max_pause_seconds), refused=refused):
            self._on_throttled(self.name, added)

    async def _attempt(self, request: _Request, read: Read[T]) -> T:
        where = f"{self.name}: {origin(request.url)}"
        try:
            async with asyncio.timeout(request.seconds):
                return await self._follow(request, read)
        except TimeoutError as error:
            raise ServerFailed(f"{where} did not answer to the end within {request.seconds:g} s") from error
        except httpx.TransportError as error:
            raise Retryable(f"{where} did not respond: {str(error)[:200]}") from error

    async def _follow(self, request: _Request, read: Read[T]) -> T:
        url, trusted = request.url, True
        for _ in range(MAX_REDIRECTS + 1):
            self._hosts.check(url)
            # After a redirect to another host no credential is sent, not even back to the base address.
            trusted = trusted and self._hosts.is_base(url)
            headers = {**self._headers, **request.headers} if trusted else {}
            outgoing = self._client.build_request(
                request.method, url, headers=headers, json=request.json, data=request.data
            )
            with trace_source_request(self.name, request.method, url.host) as measured:
                measured.sent = len(outgoing.content)
                response = await self._client.send(outgoing, auth=self._auth if trusted else None, stream=True)
                measured.facts["http.response.status_code"] = response.status_code
                try:
                    if response.status_code in REDIRECTS and LOCATION in response.extensions:
                        url = await self._target(request, url, response)
                        continue
                    return await self._answer(request, response, f"{self.name}: {origin(url)}", read)
                finally:
                    measured.received = response.num_bytes_downloaded
                    await response.aclose()
        raise Forbidden(f"{self.name}: {origin(request.url)} redirects more than {MAX_REDIRECTS} times")

    async def _target(self, request: _Request, url: httpx.URL, response: httpx.Response) -> httpx.URL:
        where = f"{self.name}: {origin(url)}"
        if request.method not in ("GET", "HEAD"):
            raise Forbidden(f"{where} redirects a {request.method}: not followed; check base_url")
        target = _parsed(response.extensions[LOCATION], base=url)
        if target is None:
            raise Forbidden(f"{where} redirects to an invalid URL")
        if request.permits is not None and not await request.permits(str(target)):
            raise Forbidden(f"{where} redirects to an address that is not to be read")
        return target

    async def _answer(self, request: _Request, response: httpx.Response, where: str, read: Read[T]) -> T:
        status, now = response.status_code, datetime.now(UTC)
        pause = budget_pause(response.headers, now=now)
        gate = request.gates[-1 if limits_bucket(status, response.headers) else 0]
        if pause:
            self._close(gate, pause, refused=False)
        if status in request.ok:
            for gate in request.gates:
                gate.record_success()
            return await read(response, where)
        code = await error_code(response)
        after = retry_after_seconds(response.headers, now=now)
        if code == SECONDARY_LIMIT and after is None:
            after = SECONDARY_SECONDS
        after = None if after is None else min(after, self._limits.max_pause_seconds)
        summary = f"answered {status}" + (f" ({code})" if code else "")
        if status == 429 or (status == 403 and (code in THROTTLE_CODES or after is not None or pause is not None)):
            pause = None if pause is None else min(pause, self._limits.max_pause_seconds)
            raise Limited(f"{where} {summary}: too many requests", gate, after if after is not None else pause)
        if status == 503 and after is not None:
            self._close(request.gates[-1], after, refused=True)
        else:
            for gate in request.gates:
                gate.record_success()
        if status >= 500 and after is None:
            raise ServerFailed(f"{where} {summary}", status=status)
        if status >= 500 or status in (408, 425):
            raise Retryable(f"{where} {summary}", retry_after=after)
        if status in (404, 410):
            raise Missing(
                f"{where} {summary}: it does not exist, or the credential may not read it", status=status, code=code
            )
        if status in (401, 403):
            raise Denied(f"{where} {summary}: the credential is invalid, or may not do this", status=status, code=code)
        raise Rejected(f"{where} {summary}: it rejects this request", status=status, code=code)


def _parsed(text: str, *, base: httpx.URL | None = None) -> httpx.URL | None:
    """Return the URL, or None if it is not valid; the exception of the library would quote it."""
    try:
        return httpx.URL(text) if base is None else base.join(text).copy_with(fragment=None)
    except (httpx.InvalidURL, ValueError, TypeError):
        return None
