"""A fake Google Drive (v3) and the part of the Admin SDK that lists the members of groups, over HTTP, with faults.

Tests compare its responses with Google's discovery documents and with Google's own client library. It follows
https://developers.google.com/workspace/drive/api/reference/rest/v3, and the API's error messages for the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.fakes.google_drive_corpus import FOLDER, Corpus, Item
from connectors.fakes.google_drive_responses import (
    CHANGE,
    DRIVE,
    FILE,
    GOOGLE,
    PERMISSION,
    ApiError,
    Faults,
    Mask,
    OAuthError,
    Pages,
    answer_error,
    body_of,
    change,
    drive,
    file,
    flag,
    insufficient_scopes,
    matching,
    missing,
    not_enabled,
    parse,
    partial,
    permission,
    unknown_drive,
    unknown_file,
)
from connectors.fakes.google_drive_services import AUTH, Channels, Directory, Tokens

DRIVE_SCOPES = (f"{AUTH}drive", f"{AUTH}drive.readonly")

EXPORT_BYTES = 10 * 1024 * 1024
"""https://developers.google.com/workspace/drive/api/reference/rest/v3/files/export"""

FILE_DEFAULT = parse("kind,id,name,mimeType,driveId,teamDriveId")
PERMISSION_DEFAULT = parse("kind,id,type,role")
DRIVE_DEFAULT = parse("kind,id,name")


class FakeGoogleDrive:
    """``async with served(fake) as url``: the API is below ``url``/drive/v3, the directory below
    ``url``/admin/directory/v1, tokens at ``url``/token."""

    KEYLESS: ClassVar[frozenset[str]] = frozenset({"/token", "/sts"})

    def __init__(self) -> None:
        self.corpus = Corpus()
        self.tokens = Tokens(self.corpus)
        self.channels = Channels(self.corpus)
        self.pages = Pages(self.corpus)
        self.faults = Faults()
        self.directory = Directory(self.corpus, self.tokens, self.pages)
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""
        get, post = ["GET"], ["POST"]
        self._app = Starlette(
            routes=[
                Route("/token", self._token, methods=post),
                Route("/sts", self._exchange, methods=post),
                Route("/v1/projects/-/serviceAccounts/{name}", self._impersonate, methods=post),
                Route("/drive/v3/files", self._files, methods=get),
                Route("/drive/v3/files/{id}", self._file, methods=get),
                Route("/drive/v3/files/{id}/export", self._export, methods=get),
                Route("/drive/v3/files/{id}/permissions", self._permissions, methods=get),
                Route("/drive/v3/drives", self._drives, methods=get),
                Route("/drive/v3/drives/{id}", self._drive, methods=get),
                Route("/drive/v3/changes", self._changes, methods=get),
                Route("/drive/v3/changes/startPageToken", self._start, methods=get),
                Route("/drive/v3/changes/watch", self._watch, methods=post),
                Route("/drive/v3/channels/stop", self._stop, methods=post),
                *self.directory.routes,
            ],
            exception_handlers={ApiError: answer_error, OAuthError: answer_error},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests.append((scope["method"], scope["path"]))
            if scope["path"] not in self.KEYLESS and (fault := self.faults.answer()):
                await fault(scope, receive, send)
                return
        await self._app(scope, receive, send)

    # Authentication

    async def _token(self, request: Request) -> Response:
        async with request.form() as form:
            fields = {name: str(value) for name, value in form.items()}
        return JSONResponse(self.tokens.grant(fields, str(request.base_url).rstrip("/")))

    async def _exchange(self, request: Request) -> Response:
        async with request.form() as form:
            return JSONResponse(self.tokens.exchange({name: str(value) for name, value in form.items()}))

    async def _impersonate(self, request: Request) -> Response:
        authorization = request.headers.get("authorization", "")
        return JSONResponse(self.tokens.impersonate(authorization, request.path_params["name"], await request.json()))

    def _account(self, request: Request) -> str:
        token = self.tokens.bearer(request.headers.get("authorization", ""), DRIVE_SCOPES)
        if token is None:
            raise insufficient_scopes()
        if self.faults.disabled:
            raise not_enabled("Google Drive API")
        if token.account in self.faults.without_drive:
            raise ApiError(403, "domainPolicy", "The domain administrators have disabled Drive apps.")
        if token.account in self.faults.refused_users:
            raise ApiError(403, "forbidden", "The user may not be impersonated.")
        return token.account

    def _item(self, request: Request, account: str, *, any_drive: bool = False) -> Item:
        """Return the requested item. ``any_drive`` is for methods without a supportsAllDrives parameter."""
        id_ = request.path_params["id"]
        item = self.corpus.items.get(id_)
        excludes_shared = not any_drive and not flag(request, "supportsAllDrives")
        is_hidden = item is not None and item.drive is not None and excludes_shared
        if item is None or is_hidden or not self.corpus.roles(account, item):
            raise unknown_file(id_)
        return item

    # Files

    async def _files(self, request: Request) -> Response:
        account, query = self._account(request), request.query_params
        corpora, drive_id = query.get("corpora", "user"), query.get("driveId")
        if (corpora == "drive") != (drive_id is not None):
            message = "The driveId parameter must be specified if and only if corpora is set to drive."
            raise ApiError(400, "invalid", message, location="driveId")
        everywhere = flag(request, "includeItemsFromAllDrives")
        if corpora in ("drive", "allDrives") and not (everywhere and flag(request, "supportsAllDrives")):
            raise ApiError(
                403,
                "teamDrivesParametersRequired",
                "The includeItemsFromAllDrives and supportsAllDrives parameters are required with this corpora.",
            )
        if drive_id is not None:
            self._member(drive_id, account)
        matches = matching(query.get("q", ""), self.corpus, account)
        items = [
            item
            for item in self.corpus.items.values()
            if item.id not in self.corpus.drives
            and (item.drive == drive_id if corpora == "drive" else corpora == "allDrives" or item.drive is None)
            and self.corpus.lists(account, item)
            and matches(item)
        ]
        page, next_token = self.pages.files(items, query, truncated=self.faults.truncated)
        response: dict[str, Any] = {
            "kind": "drive#fileList",
            "incompleteSearch": self.faults.incomplete,
            "files": [file(item, self.corpus, account) for item in page],
            **({"nextPageToken": next_token} if next_token else {}),
        }
        known: Mask = {"kind": {}, "incompleteSearch": {}, "nextPageToken": {}, "files": FILE}
        return partial(request, response, known, {**known, "files": FILE_DEFAULT})

    async def _file(self, request: Request) -> Response:
        account = self._account(request)
        item = self._item(request, account)
        if request.query_params.get("alt") != "media":
            return partial(request, file(item, self.corpus, account), FILE, FILE_DEFAULT)
        if item.id in self.faults.broken:
            raise ApiError(500, "internalError", "Internal Error")
        if item.mime_type.startswith(GOOGLE):
            message = "Only files with binary content can be downloaded. Use Export with Docs Editors files."
            raise ApiError(403, "fileNotDownloadable", message, location="alt")
        if not item.download:
            raise ApiError(403, "cannotDownloadFile", "This file cannot be downloaded by the user.")
        if item.abusive and not flag(request, "acknowledgeAbuse"):
            message = "This file has been identified as malware or spam and cannot be downloaded."
            raise ApiError(403, "cannotDownloadAbusiveFile", message)
        return Response(item.content, media_type=item.mime_type)

    async def _export(self, request: Request) -> Response:
        item = self._item(request, self._account(request), any_drive=True)
        if item.id in self.faults.broken:
            raise ApiError(500, "internalError", "Internal Error")
        mime_type = request.query_params.get("mimeType")
        if not mime_type:
            raise missing("mimeType")
        if not item.mime_type.startswith(GOOGLE) or item.mime_type == FOLDER:
            raise ApiError(403, "fileNotExportable", "Export only supports Docs Editors files.")
        if not item.download:
            raise ApiError(403, "cannotExportFile", "This file cannot be exported by the user.")
        if mime_type not in item.exports or (mime_type == "text/markdown" and self.faults.no_markdown):
            raise ApiError(400, "badRequest", "The requested conversion is not supported.", location="convertTo")
        if len(item.exports[mime_type]) > EXPORT_BYTES:
            raise ApiError(403, "exportSizeLimitExceeded", "This file is too large to be exported.")
        return Response(item.exports[mime_type], media_type=mime_type)

    async def _permissions(self, request: Request) -> Response:
        account = self._account(request)
        item = self._item(request, account)
        if item.drive is None and not self.corpus.roles(account, item) & {"owner", "writer"}:
            message = "The user does not have sufficient permissions for this file."
            raise ApiError(403, "insufficientFilePermissions", message)
        permissions = [
            permission(grants, self.corpus, drive=item.drive, of_drive=item.id in self.corpus.drives)
            for grants in self.corpus.permissions(item).values()
        ]
        page, next_token = self.pages.rows(permissions, request.query_params, truncated=False)
        response = {
            "kind": "drive#permissionList",
            "permissions": page,
            **({"nextPageToken": next_token} if next_token else {}),
        }
        known: Mask = {"kind": {}, "nextPageToken": {}, "permissions": PERMISSION}
        return partial(request, response, known, {**known, "permissions": PERMISSION_DEFAULT})

    # Shared drives

    def _member(self, id_: str, account: str) -> None:
        if id_ not in self.corpus.drives or not self.corpus.roles(account, self.corpus.items[id_]):
            raise unknown_drive(id_)

    async def _drives(self, request: Request) -> Response:
        account = self._account(request)
        mine = [id_ for id_ in self.corpus.drives if self.corpus.roles(account, self.corpus.items[id_])]
        drives = [drive(id_, self.corpus, account) for id_ in mine]
        page, next_token = self.pages.rows(drives, request.query_params, maximum=100, default=10)
        response = {"kind": "drive#driveList", "drives": page, **({"nextPageToken": next_token} if next_token else {})}
        known: Mask = {"kind": {}, "nextPageToken": {}, "drives": DRIVE}
        return partial(request, response, known, {**known, "drives": DRIVE_DEFAULT})

    async def _drive(self, request: Request) -> Response:
        account, id_ = self._account(request), request.path_params["id"]
        self._member(id_, account)
        return partial(request, drive(id_, self.corpus, account), DRIVE, DRIVE_DEFAULT)

    # Changes

    def _log(self, request: Request, account: str) -> str | None:
        drive_id = request.query_params.get("driveId")
        if drive_id is not None:
            if not flag(request, "supportsAllDrives"):
                raise ApiError(403, "teamDrivesParametersRequired", "supportsAllDrives is required with driveId.")
            self._member(drive_id, account)
        return drive_id

    async def _start(self, request: Request) -> Response:
        log = self._log(request, self._account(request))
        response = {"kind": "drive#startPageToken", "startPageToken": self.pages.start(log)}
        return partial(request, response, {"kind": {}, "startPageToken": {}})

    async def _changes(self, request: Request) -> Response:
        account = self._account(request)
        log = self._log(request, account)
        visible = [
            entry
            for entry in self.corpus.changes
            if entry.log == log and (log is not None or self._concerns(account, entry.id))
        ]
        page, tokens = self.pages.changes(visible, log, request.query_params)
        response = {
            "kind": "drive#changeList",
            "changes": [change(entry, self.corpus, account) for entry in page],
            **tokens,
        }
        known: Mask = {"kind": {}, "nextPageToken": {}, "newStartPageToken": {}, "changes": CHANGE}
        return partial(request, response, known, {**known, "changes": {**CHANGE, "file": FILE_DEFAULT}})

    def _concerns(self, account: str, id_: str) -> bool:
        item = self.corpus.items.get(id_) or self.corpus.deleted[id_]
        return account in item.seen

    async def _watch(self, request: Request) -> Response:
        log = self._log(request, self._account(request))
        token = request.query_params.get("pageToken")
        if not token:
            raise missing("pageToken")
        self.pages.number(token, log)
        uri = f"https://www.googleapis.com/drive/v3/changes?alt=json&pageToken={token}"
        return JSONResponse(self.channels.watch(await body_of(request), drive=log, uri=uri))

    async def _stop(self, request: Request) -> Response:
        self._account(request)
        self.channels.stop(await body_of(request))
        return Response(status_code=204)
