"""A request's body, streamed to disk: a form with one file (RFC 7578), or the file itself, its words in the query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from connectors.uploads.store import Incoming, TooLarge
from connectors.uploads.words import Invalid, Part

MAX_FIELD_BYTES = 128 * 1024
"""Metadata of 64 KiB, escaped."""
MAX_PARTS = 3_000
"""Every tag may come as a field of its own."""
MAX_DRAINED_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 5.0
MAX_FORM_BYTES = 1024 * 1024
"""What the form may add to the file."""


@dataclass(slots=True)
class Body:
    """``file`` has its bytes if ``part`` is not None."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    part: Part | None = None


async def received(request: Request, file: Incoming) -> Body:
    """Raises Invalid; TooLarge, OSError of the file."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > file.max_bytes + MAX_FORM_BYTES):
        raise TooLarge  # before any of it is stored
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        boundary = options.get(b"boundary")
        if not boundary:
            raise Invalid("Content-Type: multipart/form-data without a boundary")
        return await _form(request.stream(), boundary, file)
    if kind == b"application/x-www-form-urlencoded":  # words without a file, as `curl -d` sends them
        return await _words_alone(request.stream())
    body = Body()
    for name, value in request.query_params.multi_items():
        body.fields.setdefault(name, []).append(value)
    async for chunk in request.stream():
        file.write(chunk)
    if file.size:
        media_type = kind.decode("latin-1")[:200] or None
        body.part = Part(media_type=None if media_type == "application/octet-stream" else media_type)
    return body


async def _words_alone(stream: AsyncIterator[bytes]) -> Body:
    raw = bytearray()
    async for chunk in stream:
        raw += chunk
        if len(raw) > MAX_FORM_BYTES:
            raise Invalid(f"body: its fields are longer than {MAX_FORM_BYTES} bytes")
    body = Body()
    try:
        for name, value in parse_qsl(raw.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARTS):
            body.fields.setdefault(name, []).append(value)
    except ValueError as error:
        raise Invalid("body: is not a form of UTF-8 text") from error
    return body


async def _form(stream: AsyncIterator[bytes], boundary: bytes, file: Incoming) -> Body:
    form = _Form(file)
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.begin, "on_part_data": form.data, "on_part_end": form.end,
            "on_header_field": form.header_name, "on_header_value": form.header_value, "on_header_end": form.header_end,
            "on_headers_finished": form.headers_end, "on_end": form.finish,
        },
    )  # fmt: skip
    try:
        async for chunk in stream:
            parser.write(chunk)
            if form.trouble is not None:
                raise form.trouble
        parser.finalize()
    except FormParserError as error:
        raise Invalid("body: is not a complete multipart/form-data form") from error
    if not form.complete:
        raise Invalid("body: ends in the middle of the form")
    return form.body


async def drained(request: Request) -> None:
    """What is left of a refused body, if it is not much: a client that is still sending when the connection is closed
    does not see the answer."""
    left = MAX_DRAINED_BYTES
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: it was read to its end
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in request.stream():
                left -= len(chunk)
                if left < 0:
                    return


class _Form:
    """What the parser finds. What is wrong waits in ``trouble``: nothing is raised through the parser."""

    def __init__(self, file: Incoming) -> None:
        self.body = Body()
        self.complete = False
        self.trouble: Exception | None = None
        self._file = file
        self._parts = self._form_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._field = ""
        self._is_file = False
        self._data = bytearray()

    def begin(self) -> None:
        self._headers, self._name, self._value = {}, b"", b""
        self._data = bytearray()
        self._parts += 1
        if self._parts > MAX_PARTS:
            self._refuse(f"body: more than {MAX_PARTS} fields")

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._count(end - start)

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._count(end - start)

    def header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if not self._is_file:
            return
        if self.body.part is not None:
            self._refuse("body: holds more than one file: send one request for each")
        kind = parse_options_header(self._headers.get(b"content-type"))[0].decode("latin-1")[:200]
        self.body.part = Part(
            options[b"filename"].decode("utf-8", "replace"), None if kind in ("", "application/octet-stream") else kind
        )

    def data(self, data: bytes, start: int, end: int) -> None:
        if self.trouble is not None:
            return
        if not self._is_file:
            self._count(end - start)
            self._data += data[start:end]
            if len(self._data) > MAX_FIELD_BYTES:
                self._refuse(f"{self._field[:50]}: is longer than {MAX_FIELD_BYTES} bytes")
            return
        try:
            self._file.write(data[start:end])
        except Exception as error:  # noqa: BLE001 # TooLarge or a full disk: raised outside of the parser
            self.trouble = error

    def end(self) -> None:
        if self._is_file:
            return
        try:
            self.body.fields.setdefault(self._field, []).append(self._data.decode())
        except UnicodeDecodeError:
            self._refuse(f"{self._field[:50]}: is not UTF-8")

    def finish(self) -> None:
        self.complete = True

    def _count(self, size: int) -> None:
        self._form_bytes += size
        if self._form_bytes > MAX_FORM_BYTES:
            self._refuse(f"body: its fields are longer than {MAX_FORM_BYTES} bytes")

    def _refuse(self, why: str) -> None:
        self.trouble = self.trouble or Invalid(why)
