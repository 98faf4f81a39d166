"""POST, PUT, GET and DELETE /v1/uploads."""

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from connectors.uploads.desk import Busy, Desk
from connectors.uploads.receiving import Body, drained, received
from connectors.uploads.status import Status
from connectors.uploads.store import Incoming, TooLarge
from connectors.uploads.table import QuotaReached, Uploaded
from connectors.uploads.words import Invalid, one, words_of
from pipeline.core.errors import Retryable

PROBLEM = "application/problem+json"
PATH = "/v1/uploads"
RETRY_AFTER_SECONDS = 5
NOT_STORED = "Postgres does not answer: send the same again"
_HEADERS = {503: {"Retry-After": str(RETRY_AFTER_SECONDS)}, 413: {"Connection": "close"}}
"""What was not read of a body that is too large is not waited for either."""

OnRefused = Callable[[str, Literal["quota", "busy"]], None]
"""(source, reason)."""
Desks = Callable[[str], Mapping[str, Desk | None]]
"""tenant → its instances by name; None: declared, but not running in this process."""


class Refusal(Exception):
    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail

    def response(self) -> JSONResponse:
        """As RFC 9457 has it."""
        content = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        return JSONResponse(content, self.status, _HEADERS.get(self.status), PROBLEM)


def router(desks: Desks, tenant_of: Callable[..., Any], on_refused: OnRefused = lambda *_: None) -> APIRouter:
    """tenant_of: a FastAPI dependency that returns the tenant of the caller's key, or raises 401 or 403; it runs before
    anything of the body is read. Nothing that a client says chooses another tenant."""
    routes = APIRouter(prefix=PATH, tags=["uploads"])
    api = _Api(desks, on_refused)
    Tenant = Annotated[str, Depends(tenant_of)]

    @routes.post("", status_code=202)
    @_explained
    async def upload(request: Request, tenant: Tenant) -> JSONResponse:
        """A form with the file and fields, or the file itself with the fields in the query → {"id", "status_url"}.
        With an external_id that is known: a new version of it."""
        return await api.take(request, tenant, None)

    @routes.put("/{id_}", status_code=202)
    @_explained
    async def replace(id_: UUID, request: Request, tenant: Tenant) -> JSONResponse:
        """A new version, or without a file other words (title, access …) of the same; what is not said stays."""
        return await api.take(request, tenant, id_)

    @routes.get("/{id_}")
    @_explained
    async def status(id_: UUID, tenant: Tenant) -> JSONResponse:
        desk, found = await api.find(tenant, id_)
        return JSONResponse(shown((await desk.status([found]))[0]))

    @routes.delete("/{id_}", status_code=202)
    @_explained
    async def delete(id_: UUID, tenant: Tenant) -> JSONResponse:
        desk, _ = await api.find(tenant, id_)
        await desk.delete(id_)
        return JSONResponse({"id": str(id_), "status_url": f"{PATH}/{id_}"}, 202)

    @routes.get("")
    @_explained
    async def uploads(
        tenant: Tenant, source: str | None = None, before: Annotated[int | None, Query(ge=0)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> JSONResponse:  # fmt: skip
        """What changed last first → {"uploads", "next"}; ``next`` is ``before`` of the page after, null at the end."""
        desk = api.desk(tenant, source)
        rows = await desk.table.newest(before, limit)
        more = rows[-1].changed if len(rows) == limit else None
        return JSONResponse({"uploads": [shown(one) for one in await desk.status(rows)], "next": more})

    return routes


def shown(status: Status) -> dict[str, Any]:
    found = status.upload
    return {
        "id": str(found.id), "external_id": found.external_id, "state": status.state, "reason": status.reason,
        "code": status.code, "file_name": found.file_name, "title": found.title, "size": found.size,
        "acl_tags": found.acl_tags, "required_tags": found.required_tags, "metadata": found.metadata,
        "received_at": found.received_at.isoformat(), "version": found.version,
    }  # fmt: skip


class _Api:
    def __init__(self, desks: Desks, on_refused: OnRefused) -> None:
        self._desks, self._on_refused = desks, on_refused

    def desk(self, tenant: str, name: str | None) -> Desk:
        """Raises Refusal."""
        found = self._desks(tenant)
        if not found:
            raise Refusal(404, "No uploads", "no connector of the kind uploads is declared for the tenant of this key")
        if name is None and len(found) > 1:
            raise Refusal(422, "Which uploads?", f"source: name one of {', '.join(sorted(found))}")
        if name is not None and name not in found:
            raise Refusal(404, "No such source", f"source: one of {', '.join(sorted(found))}")
        return _running(found[name or next(iter(found))])

    async def find(self, tenant: str, id_: UUID) -> tuple[Desk, Uploaded]:
        """Raises Refusal: 404 for another tenant's too."""
        found = self._desks(tenant)
        for desk in found.values():
            if desk is not None and (upload := await desk.table.get(id_)) is not None:
                return desk, upload
        if found and None in found.values():
            _running(None)
        raise Refusal(404, "No such upload", "there is no upload with this id")

    async def take(self, request: Request, tenant: str, id_: UUID | None) -> JSONResponse:
        before: Uploaded | None = None
        if id_ is not None:
            desk, before = await self.find(tenant, id_)
            if before.deleted_at is not None:
                raise Refusal(404, "No such upload", "this upload was deleted: hand the file in anew")
        else:
            desk = self.desk(tenant, request.query_params.get("source"))
        try:
            with desk.writing() as file:
                body = await received(request, file)
                found = await self._handed_in(desk, tenant, body, file, before)
        except TooLarge as error:
            await drained(request)
            detail = f"a file has at most {desk.max_bytes:,} bytes: split it"
            raise Refusal(413, "Too large", detail) from error
        except QuotaReached as error:
            self._on_refused(desk.table.me[1], "quota")
            raise Refusal(507, "Quota reached", str(error)) from error
        except Busy as error:
            self._on_refused(desk.table.me[1], "busy")
            raise Refusal(503, "Busy", str(error)) from error
        except ClientDisconnect as error:
            raise Refusal(400, "Not an upload", "the client hung up") from error
        except Invalid as error:
            await drained(request)
            raise Refusal(422, "Not an upload", str(error)) from error
        except OSError as error:
            raise Refusal(507, "Not stored", f"the file cannot be stored ({error.strerror})") from error
        address = f"{PATH}/{found.id}"
        content = {"id": str(found.id), "external_id": found.external_id, "status_url": address}
        return JSONResponse(content, 202, {"Location": address})

    async def _handed_in(
        self, desk: Desk, tenant: str, body: Body, file: Incoming, before: Uploaded | None
    ) -> Uploaded:
        source = desk.table.me[1]
        external_id = one(body.fields, "external_id")
        if before is not None and external_id not in (None, before.external_id):
            raise Invalid("external_id: cannot be changed: delete this upload and hand the file in anew")
        if (named := one(body.fields, "source")) not in (None, source):
            raise Invalid(f"source: {str(named)[:50]!r} is none of yours, or belongs into the query")
        if before is None and external_id is not None:
            known = [row for row in await desk.table.named([external_id]) if row.deleted_at is None]
            before = known[0] if known else None
        if body.part is None and before is None:
            raise Invalid("file: missing or empty")
        words = words_of(body.fields, body.part, before, tenant=tenant, source=source)
        external_id = external_id or (before.external_id if before else None)
        if body.part is None and before is not None:
            return await desk.change(before, words)
        return await desk.hand_in(file, words, external_id=external_id)


def _running(desk: Desk | None) -> Desk:
    if desk is None:
        raise Refusal(503, "Not running", "this connector is not running here at the moment: send the same again")
    return desk


def _explained(
    route: Callable[..., Awaitable[JSONResponse]],
) -> Callable[..., Awaitable[JSONResponse]]:
    @wraps(route)
    async def answered(*arguments: Any, **named: Any) -> JSONResponse:
        try:
            return await route(*arguments, **named)
        except Refusal as refusal:
            return refusal.response()
        except Retryable:
            return Refusal(503, "Not stored", NOT_STORED).response()

    return answered
