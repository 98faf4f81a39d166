"""The bytes of an answer, decoded, and never more than were allowed."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from connectors.web.errors import TooLarge
from pipeline.core.errors import Retryable

ACCEPT_ENCODING = "gzip"
"""The only one that we ask for and decode: with a bound on what one step may unfold."""
ERROR_BYTES = 64 * 1024
_STEP = 256 * 1024
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,63}")
_TEXTUAL = re.compile(r"text/.*|application/(.*\+)?(json|xml)|application/(javascript|x-ndjson|csv|yaml|x-yaml)")


async def parts(response: httpx.Response, where: str, limit: int) -> AsyncIterator[bytes]:
    """Raises TooLarge as soon as it is certain, Retryable for a body that was cut or does not decode."""
    length = response.headers.get("content-length", "")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise Retryable(f"{where} answered in an encoding that was not asked for")
    if encoding == "identity" and length.isdecimal() and int(length) > limit:
        raise too_large(where, limit)
    gunzip = Gunzip() if encoding == "gzip" else None
    total = 0
    try:
        async for raw in response.aiter_raw():
            for part in gunzip.feed(raw) if gunzip else (raw,):
                total += len(part)
                if total > limit:
                    raise too_large(where, limit)
                yield part
    except zlib.error as error:
        raise Retryable(f"{where} answered with a body that does not decode: a proxy may have damaged it") from error
    if gunzip and not gunzip.complete:
        raise Retryable(f"{where} answered with a body that was cut off")


def too_large(where: str, limit: int) -> TooLarge:
    return TooLarge(f"{where} answered with more than {limit:,} bytes: not read further", limit=limit)


class Gunzip:
    """Decodes in steps of at most ``_STEP`` bytes, however much a piece unfolds to."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._fed = False

    @property
    def complete(self) -> bool:
        """Whether the end that gzip writes was seen. An empty body is one, too."""
        return self._decoder.eof or not self._fed

    def feed(self, raw: bytes) -> Iterator[bytes]:
        while raw:
            if self._decoder.eof:  # a further member: gzip files may be put one after another
                self._decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
            self._fed = True
            if part := self._decoder.decompress(raw, _STEP):
                yield part
            raw = self._decoder.unconsumed_tail or self._decoder.unused_data
        while not self._decoder.eof and (part := self._decoder.decompress(b"", _STEP)):
            yield part


async def read(response: httpx.Response, where: str, limit: int) -> bytes:
    return b"".join([part async for part in parts(response, where, limit)])


def media_type(response: httpx.Response) -> str:
    """In lower case, without parameters; empty where there is none."""
    value: str = response.headers.get("content-type", "")
    return value.partition(";")[0].strip().lower()


async def read_json(response: httpx.Response, where: str, limit: int) -> Any:
    """None for an empty 204. Raises Retryable for anything but JSON."""
    if response.status_code == 204:
        return None
    kind = media_type(response)
    if kind and kind != "application/json" and not kind.endswith("+json") and kind != "text/json":
        raise Retryable(f"{where} answered with {_shown(kind)} instead of JSON: is there a login page or a proxy?")
    data = await read(response, where, limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        pass  # its text and its chain would hold the body
    raise Retryable(f"{where} answered with something that is not JSON, or was cut off")


async def read_text(response: httpx.Response, where: str, limit: int) -> str:
    kind = media_type(response)
    if kind and not _TEXTUAL.fullmatch(kind):
        raise Retryable(f"{where} answered with {_shown(kind)} instead of text")
    data = await read(response, where, limit)
    try:
        return data.decode(response.charset_encoding or "utf-8", "replace")
    except LookupError:
        return data.decode("utf-8", "replace")


def _shown(kind: str) -> str:
    return kind if re.fullmatch(r"[a-z0-9.+\-]{1,40}/[a-z0-9.+\-]{1,80}", kind) else "an unknown type"


async def error_code(response: httpx.Response) -> str | None:
    """The vendor's short word in an error's body, wherever the usual vendors put it. Never one that we sent."""
    try:
        found = _code_in(json.loads(await read(response, "", ERROR_BYTES)))
    except (ValueError, RecursionError, TooLarge, Retryable, httpx.HTTPError):
        return None
    sent = str(response.request.url) + " ".join(response.request.headers.values())
    return None if found is None or found in sent else found


def _code_in(answer: Any) -> str | None:
    """Google: error.errors[0].reason, error.status. Atlassian: errors[0].code, code. Slack and OAuth: error. Others:
    errorCode, code, type."""
    if not isinstance(answer, dict):
        return None
    inner = answer.get("error")
    first: Any = None
    for holder in (inner, answer):
        if isinstance(holder, dict) and isinstance(holder.get("errors"), list) and holder["errors"]:
            first = first or holder["errors"][0]
    places = [first.get(name) for name in ("reason", "code")] if isinstance(first, dict) else []
    if isinstance(inner, dict):
        places += [inner.get("status"), inner.get("code"), inner.get("type")]
    places += [inner, answer.get("errorCode"), answer.get("code"), answer.get("type")]
    return next((place for place in places if isinstance(place, str) and _CODE.fullmatch(place)), None)
