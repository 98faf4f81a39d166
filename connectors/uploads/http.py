"""The HTTP API: POST, PUT, GET and DELETE /v1/uploads.

A request's body is streamed to disk: a form with one file (RFC 7578), or the file itself with its properties in the
query.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from connectors.runner.compare import MAX_ID_BYTES
from connectors.uploads.intake import Busy, Intake, Invalid, NoUpload, Part, Status, properties_of, single
from connectors.uploads.store import Incoming, Properties, QuotaReached, Removed, TooLarge, Upload
from pipeline.core.errors import Retryable

MAX_FIELD_BYTES = 128 * 1024
"""Enough for metadata of 64 KiB, escaped."""
MAX_PARTS = 3_000
"""Every tag may be a field of its own."""
MAX_DRAINED_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 5.0
ARRIVAL_SECONDS, LEAST_BYTES_PER_SECOND = 60.0, 32 * 1024
"""How long a body may take: this time, and that of the largest file at this speed. A few clients that send as slowly as
the port accepts would else hold all places for hours."""
MAX_FORM_BYTES = 1024 * 1024
"""Largest size of a form without its file."""


@dataclass(slots=True)
class Body:
    """A request's fields, and its file's name and type. ``part`` is None if there is no file."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    part: Part | None = None


async def receive(request: Request, file: Incoming) -> Body:
    """Read a request's body; the file's bytes are written to ``file``. Raises Invalid, and TooLarge and OSError of the
    file."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > file.max_bytes + MAX_FORM_BYTES):
        raise TooLarge  # before any of it is stored
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"multipart/form-data":
        boundary = options.get(b"boundary")
        if not boundary:
            raise Invalid("Content-Type: multipart/form-data without a boundary")
        return await _form(request.stream(), boundary, file)
    if kind == b"application/x-www-form-urlencoded":  # properties without a file, as `curl -d` sends them
        return await _fields_only(request.stream())
    body = Body()
    for name, value in request.query_params.multi_items():
        body.fields.setdefault(name, []).append(value)
    async for chunk in request.stream():
        file.write(chunk)
    if file.size:
        media_type = kind.decode("latin-1")[:200] or None
        body.part = Part(media_type=None if media_type == "application/octet-stream" else media_type)
    return body


async def _fields_only(stream: AsyncIterator[bytes]) -> Body:
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
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.begin,
                "on_part_data": form.data,
                "on_part_end": form.end,
                "on_header_field": form.header_name,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_headers_finished": form.headers_end,
                "on_end": form.finish,
            },
        )
        received = delimiters = 0
        async for chunk in stream:
            received += len(chunk)
            if received > file.size + len(chunk) + 2 * MAX_FORM_BYTES:  # or what follows the form would never end
                raise Invalid("body: is longer than its fields and its file")
            delimiters += chunk.count(b"\r\n--" + boundary)
            if delimiters > MAX_PARTS + 1:  # the parser looks at each, also within a file, where none may be
                raise Invalid(f"body: more than {MAX_PARTS} fields, or its boundary is in its file")
            parser.write(chunk)
            if form.problem is not None:
                raise form.problem
        parser.finalize()
    except FormParserError as error:
        raise Invalid("body: is not a complete multipart/form-data form") from error
    if not form.complete:
        raise Invalid("body: ends in the middle of the form")
    return form.body


async def drain(request: Request) -> None:
    """Read the rest of a refused body, unless it is long: a client that is still sending when the connection is closed
    does not see the response."""
    remaining = MAX_DRAINED_BYTES
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: it was read to its end
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in request.stream():
                remaining -= len(chunk)
                if remaining < 0:
                    return


class _Form:
    """Collects what the parser finds. A problem is stored in ``problem``, because the parser must not raise it."""

    def __init__(self, file: Incoming) -> None:
        self.body = Body()
        self.complete = False
        self.problem: Exception | None = None
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
        if self.problem is not None:
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
            self.problem = error

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

    def _refuse(self, reason: str) -> None:
        self.problem = self.problem or Invalid(reason)


PROBLEM = "application/problem+json"
PATH = "/v1/uploads"
RETRY_AFTER_SECONDS = 5
NOT_STORED = "Postgres does not answer: send the same request again"
DELETED = "No such upload", "this upload was deleted: upload the file again"
NOT_RUNNING = "Not running", "this connector is not running here: send the same request again later"
_CLOSE = {"Connection": "close"}
_HEADERS = {503: {"Retry-After": str(RETRY_AFTER_SECONDS)}, 408: _CLOSE, 413: _CLOSE}
"""Headers by status. After a body that is too large or slow the connection is closed, because the rest may be long."""

OnRefused = Callable[[str, Literal["quota", "busy"]], None]
"""Called with the source and the reason for a refusal."""
Intakes = Callable[[str], Mapping[str, Intake | None]]
"""Returns a tenant's intakes by the instance's name; None: declared, but not running in this process."""


class Refusal(Exception):
    """A request is refused with this response."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail

    def response(self) -> JSONResponse:
        """Return the response in the format of RFC 9457."""
        content = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        return JSONResponse(content, self.status, _HEADERS.get(self.status), PROBLEM)


def router(intakes: Intakes, tenant_of: Callable[..., Any], on_refused: OnRefused = lambda *_: None) -> APIRouter:
    """Make the routes. tenant_of: a FastAPI dependency that returns the tenant of the caller's key, or raises 401 or
    403; it runs before the body is read. A client cannot choose another tenant. on_refused: counts refusals."""
    routes = APIRouter(prefix=PATH, tags=["uploads"])
    api = _Api(intakes, on_refused)
    Tenant = Annotated[str, Depends(tenant_of)]

    @routes.post("", status_code=202)
    @_with_refusals
    async def upload(request: Request, tenant: Tenant) -> JSONResponse:
        """Upload a file: a form with the file and fields, or the file itself with the fields in the query. A known
        external_id makes a new version of that upload. Responds {"id", "external_id", "status_url"}."""
        return await api.take(request, tenant, None)

    @routes.put("/{id_}", status_code=202)
    @_with_refusals
    async def replace(id_: UUID, request: Request, tenant: Tenant) -> JSONResponse:
        """Replace an upload's file, its properties (title, access …) or both; what is not sent stays."""
        return await api.take(request, tenant, id_)

    @routes.get("/{id_}")
    @_with_refusals
    async def status(id_: UUID, tenant: Tenant) -> JSONResponse:
        intake, row = await api.find(tenant, id_)
        return JSONResponse(render((await intake.status([row]))[0]))

    @routes.delete("/{id_}", status_code=202)
    @_with_refusals
    async def delete(id_: UUID, tenant: Tenant) -> JSONResponse:
        intake, _ = await api.find(tenant, id_)
        await intake.delete(id_)
        return JSONResponse({"id": str(id_), "status_url": f"{PATH}/{id_}"}, 202)

    @routes.get("")
    @_with_refusals
    async def uploads(
        tenant: Tenant,
        source: str | None = None,
        before: Annotated[int | None, Query(ge=0)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> JSONResponse:
        """List uploads, the last changed first: {"uploads", "next"}. ``next`` is ``before`` of the next page, or
        null."""
        intake = api.intake(tenant, source)
        rows = await intake.table.newest(before, limit)
        is_last = len(rows) < limit and not (rows and await intake.table.newest(rows[-1].changed, 1))
        next_before = None if is_last else rows[-1].changed
        return JSONResponse({"uploads": [render(status) for status in await intake.status(rows)], "next": next_before})

    return routes


def render(status: Status) -> dict[str, Any]:
    """Return the JSON object of an upload."""
    upload = status.upload
    return {
        "id": str(upload.id),
        "external_id": upload.external_id,
        "state": status.state,
        "reason": status.reason,
        "code": status.code,
        "file_name": upload.file_name,
        "title": upload.title,
        "size": upload.size,
        "acl_tags": upload.acl_tags,
        "required_tags": upload.required_tags,
        "metadata": upload.metadata,
        "received_at": upload.received_at.isoformat(),
        "version": upload.version,
        "token": status.token,
    }


class _Api:
    def __init__(self, intakes: Intakes, on_refused: OnRefused) -> None:
        self._intakes, self._on_refused = intakes, on_refused

    def intake(self, tenant: str, name: str | None) -> Intake:
        """Return the intake of the named instance, or of the only one. Raises Refusal."""
        known = self._intakes(tenant)
        if not known:
            raise Refusal(404, "No uploads", "no connector of the kind uploads is declared for the tenant of this key")
        if name is None and len(known) > 1:
            raise Refusal(422, "Ambiguous source", f"source: name one of {', '.join(sorted(known))}")
        if name is not None and name not in known:
            raise Refusal(404, "No such source", f"source: one of {', '.join(sorted(known))}")
        return _require_running(known[name or next(iter(known))])

    async def find(self, tenant: str, id_: UUID) -> tuple[Intake, Upload]:
        """Find an upload. Raises Refusal; an upload of another tenant is 404."""
        known = self._intakes(tenant)
        for intake in known.values():
            if intake is not None and (upload := await intake.table.get(id_)) is not None:
                return intake, upload
        if known and None in known.values():
            _require_running(None)
        raise Refusal(404, "No such upload", "there is no upload with this id")

    async def take(self, request: Request, tenant: str, id_: UUID | None) -> JSONResponse:
        before: Upload | None = None
        if id_ is not None:
            intake, before = await self.find(tenant, id_)
            if before.deleted_at is not None:
                raise Refusal(404, *DELETED)
        else:
            intake = self.intake(tenant, request.query_params.get("source"))
        try:
            with intake.writing() as file:
                try:
                    async with asyncio.timeout(ARRIVAL_SECONDS + intake.max_bytes / LEAST_BYTES_PER_SECOND) as limit:
                        body = await receive(request, file)
                except TimeoutError as error:
                    if not limit.expired():  # the store's disk
                        raise
                    detail = "the file did not arrive in time: others wait for its place"
                    raise Refusal(408, "Too slow", detail) from error
                upload = await self._store(intake, tenant, body, file, before)
        except TooLarge as error:
            await drain(request)
            detail = f"a file has at most {intake.max_bytes:,} bytes: split it"
            raise Refusal(413, "Too large", detail) from error
        except QuotaReached as error:
            self._on_refused(intake.table.instance[1], "quota")
            raise Refusal(507, "Quota reached", str(error)) from error
        except Busy as error:
            self._on_refused(intake.table.instance[1], "busy")
            raise Refusal(503, "Busy", str(error)) from error
        except NoUpload as error:
            raise Refusal(404, *DELETED) from error
        except Removed as error:
            raise Refusal(503, *NOT_RUNNING) from error
        except ClientDisconnect as error:
            raise Refusal(400, "Not an upload", "the client disconnected") from error
        except Invalid as error:
            await drain(request)
            raise Refusal(422, "Not an upload", str(error)) from error
        except OSError as error:
            raise Refusal(507, "Not stored", f"the file cannot be stored ({error.strerror})") from error
        address = f"{PATH}/{upload.id}"
        content = {"id": str(upload.id), "external_id": upload.external_id, "status_url": address}
        return JSONResponse(content, 202, {"Location": address})

    async def _store(self, intake: Intake, tenant: str, body: Body, file: Incoming, before: Upload | None) -> Upload:
        source = intake.table.instance[1]
        external_id = single(body.fields, "external_id")
        if external_id is not None and "\x00" in external_id:  # Postgres would refuse the query for it
            raise Invalid("external_id: has U+0000 in it")
        if external_id is not None and len(external_id.encode()) > MAX_ID_BYTES:  # Postgres would refuse to index it
            raise Invalid(f"external_id: is longer than {MAX_ID_BYTES} bytes of UTF-8")
        if before is not None and external_id not in (None, before.external_id):
            raise Invalid("external_id: cannot be changed: delete this upload and upload the file again")
        if (stated := single(body.fields, "source")) not in (None, source):
            raise Invalid(
                f"source: {str(stated)[:50]!r} is not this source: name another one in the query, not in the form"
            )

        def properties(current: Upload | None) -> Properties:
            return properties_of(body.fields, body.part, current, tenant=tenant, source=source)

        if before is not None:
            external_id = before.external_id
        if body.part is not None:
            return await intake.add(file, properties, external_id=external_id, replaces=before is not None)
        try:
            if external_id is not None:
                return await intake.change(external_id, properties)
        except NoUpload:
            if before is not None:
                raise
        raise Invalid("file: missing or empty")


def _require_running(intake: Intake | None) -> Intake:
    if intake is None:
        raise Refusal(503, *NOT_RUNNING)
    return intake


def _with_refusals(
    route: Callable[..., Awaitable[JSONResponse]],
) -> Callable[..., Awaitable[JSONResponse]]:
    @wraps(route)
    async def respond(*arguments: Any, **keywords: Any) -> JSONResponse:
        try:
            return await route(*arguments, **keywords)
        except Refusal as refusal:
            return refusal.response()
        except Retryable:
            return Refusal(503, "Not stored", NOT_STORED).response()

    return respond
