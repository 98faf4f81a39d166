"""Responses of the fake Drive: items as JSON, as the discovery document describes them (a test compares), searching,
paging, partial responses and errors.

https://developers.google.com/workspace/drive/api/guides/fields-parameter
https://developers.google.com/workspace/drive/api/guides/handle-errors

Page tokens are opaque and mark a position, not a number of results.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, Change, Corpus, EffectiveGrant, Grant, Item


class ApiError(Exception):
    """An error response of a Google API. Programs distinguish errors by ``reason``."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        domain: str = "global",
        location: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        entry: dict[str, Any] = {"message": message, "domain": domain, "reason": reason}
        if location:
            kind = "header" if location == "Authorization" else "parameter"
            entry |= {"location": location, "locationType": kind}
        self.body: dict[str, Any] = {"error": {"code": status, "message": message, "errors": [entry]}}


class OAuthError(Exception):
    """An error response of https://oauth2.googleapis.com/token (RFC 6749, section 5.2)."""

    def __init__(self, status: int, error: str, description: str) -> None:
        super().__init__(description)
        self.status = status
        self.body = {"error": error, "error_description": description}


def unknown_file(id_: str) -> ApiError:
    return ApiError(404, "notFound", f"File not found: {id_}.", location="fileId")


def unknown_drive(id_: str) -> ApiError:
    return ApiError(404, "notFound", f"Shared drive not found: {id_}", location="driveId")


def invalid_value(parameter: str) -> ApiError:
    return ApiError(400, "invalid", "Invalid Value", location=parameter)


def missing(parameter: str) -> ApiError:
    return ApiError(400, "required", f"Required parameter: {parameter}", location=parameter)


def bad_credentials() -> ApiError:
    message = (
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid"
        " authentication credential."
    )
    return ApiError(401, "authError", message, location="Authorization", headers={"WWW-Authenticate": "Bearer"})


def insufficient_scopes() -> ApiError:
    return ApiError(403, "insufficientPermissions", "Request had insufficient authentication scopes.")


def not_enabled(api: str) -> ApiError:
    return ApiError(
        403,
        "accessNotConfigured",
        f"{api} has not been used in project 1 before or it is disabled. Enable it in the console, then retry.",
        domain="usageLimits",
    )


Mask = dict[str, Any]
"""Field name → the mask of its subfields; an empty mask selects all of them."""

_TOKEN = re.compile(r"[\w*]+|[(),/]")


def parse(text: str) -> Mask:
    """Parse a field selection. Raises ApiError, as Google does, for one that is not well formed."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise _invalid_selection(text)
    mask, rest = _parse_fields(tokens, text)
    if rest:
        raise _invalid_selection(text)
    return mask


def _parse_fields(tokens: list[str], text: str) -> tuple[Mask, list[str]]:
    mask: Mask = {}
    while tokens:
        path, tokens = [tokens[0]], tokens[1:]
        while tokens[:1] == ["/"] and len(tokens) > 1:
            path, tokens = [*path, tokens[1]], tokens[2:]
        nested: Mask = {}
        if tokens[:1] == ["("]:
            nested, tokens = _parse_fields(tokens[1:], text)
            if tokens[:1] != [")"]:
                raise _invalid_selection(text)
            tokens = tokens[1:]
        if any(not re.fullmatch(r"[\w*]+", name) for name in path):
            raise _invalid_selection(text)
        node = mask
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = nested
        if tokens[:1] != [","]:
            return mask, tokens
        tokens = tokens[1:]
    raise _invalid_selection(text)


def select(value: Any, mask: Mask, known: Mask, path: str = "") -> Any:
    """Return the part of a value that the mask selects. ``known`` holds all fields of this kind of response; a mask
    with another field is refused."""
    if isinstance(value, list):
        return [select(item, mask, known, path) for item in value]
    check(mask, known, path)
    if not isinstance(value, dict) or not mask or "*" in mask:
        return value
    return {
        name: select(value[name], nested, known.get(name, {}), f"{path}{name}/")
        for name, nested in mask.items()
        if name in value
    }


def check(mask: Mask, known: Mask, path: str = "") -> None:
    for name, nested in mask.items():
        if name == "*":
            continue
        if known and name not in known:
            raise _invalid_selection(path + name)
        check(nested, known.get(name, {}), f"{path}{name}/")


def _invalid_selection(what: str) -> ApiError:
    return ApiError(400, "invalidParameter", f"Invalid field selection {what}", location="fields")


Query = Mapping[str, str]

_TERM = re.compile(r"(trashed|mimeType)\s*(=|!=)\s*('[^']*'|true|false)|'([^']+)'\s+in\s+parents")


def matching(q: str, corpus: Corpus, account: str) -> Callable[[Item], bool]:
    """Parse the part of the search language that is needed here, terms joined by ``and``; other queries are refused.

    https://developers.google.com/workspace/drive/api/guides/ref-search-terms
    """
    tests: list[Callable[[Item], bool]] = []
    for term in re.split(r"\s+and\s+", q.strip()) if q.strip() else ():
        if term == "'me' in owners":
            tests.append(lambda item: item.owner == account)
            continue
        match = _TERM.fullmatch(term)
        if match is None:
            raise invalid_value("q")
        name, sign, value, parent = match.groups()
        is_equal = sign != "!="
        if parent is not None:
            tests.append(lambda item, parent=parent: item.parent == parent)  # type: ignore[misc]
        elif name == "trashed" and value in ("true", "false"):
            trashed = (value == "true") == is_equal
            tests.append(lambda item, trashed=trashed: corpus.is_trashed(item) == trashed)  # type: ignore[misc]
        elif name == "mimeType" and value.startswith("'"):
            tests.append(lambda item, kind=value[1:-1], is_equal=is_equal: (item.mime_type == kind) == is_equal)  # type: ignore[misc]
        else:
            raise invalid_value("q")
    return lambda item: all(test(item) for test in tests)


def whole_number(query: Query, name: str, default: int, maximum: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ApiError(
            400, "invalidParameter", f"Invalid value '{text}'. Values must be within the range: [1, {maximum}]"
        )
    return min(int(text), maximum)


class Pages:
    """Page tokens. Increasing ``epoch`` invalidates all earlier tokens."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.epoch = 0
        self.gone_status = 400
        """The status for a change token that is no longer known: 400 as in Drive, or 410 as in its older feeds."""

    def files(self, items: list[Item], query: Query, *, truncated: bool) -> tuple[list[Item], str | None]:
        """Return a page of files and the next token. Files are in the order of their creation, which does not change
        when files move or disappear meanwhile."""
        size = whole_number(query, "pageSize", 100, 1000)
        listing = [query.get(name) for name in ("corpora", "driveId", "q", "orderBy")]
        after = self._read(query, listing)
        rest = [item for item in items if after is None or item.id > after]
        if truncated:
            return rest[: min(size, len(rest) // 2)], None
        page = rest[:size]
        return page, self._token(listing, page[-1].id) if len(rest) > size else None

    def rows(
        self,
        rows: Sequence[dict[str, Any]],
        query: Query,
        size_parameter: str = "pageSize",
        *,
        truncated: bool = False,
        maximum: int = 100,
        default: int = 100,
    ) -> tuple[list[dict[str, Any]], str | None]:
        size = whole_number(query, size_parameter, default, maximum)
        start = int(self._read(query, ["plain"]) or 0)
        page = list(rows[start : start + size])
        return page, self._token(["plain"], str(start + size)) if start + size < len(rows) else None

    def _token(self, listing: list[Any], position: str) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.epoch, listing, position]).encode()).decode()

    def _read(self, query: Query, listing: list[Any]) -> str | None:
        """Return the position in the page token. A token of another listing is refused."""
        token = query.get("pageToken")
        if token is None:
            return None
        try:
            epoch, token_listing, position = json.loads(base64.urlsafe_b64decode(token.encode()))
        except ValueError:
            raise invalid_value("pageToken") from None
        if epoch != self.epoch or token_listing != listing:
            raise invalid_value("pageToken")
        return str(position)

    # Changes: the token is the number of the next change, in the log of one drive or of the user.

    def start(self, log: str | None) -> str:
        newest = max((entry.number for entry in self._corpus.changes if entry.log == log), default=0)
        return self._change_token(newest + 1, log)

    def changes(self, mine: list[Change], log: str | None, query: Query) -> tuple[list[Change], dict[str, str]]:
        """Return a page of changes and the next token. A file that changed several times is listed once, with its
        newest change."""
        token = query.get("pageToken")
        if not token:
            raise missing("pageToken")
        size = whole_number(query, "pageSize", 100, 1000)
        first = self.number(token, log)
        newest = {entry.id: entry for entry in mine if entry.number >= first}
        rest = sorted(newest.values(), key=lambda entry: entry.number)
        if query.get("includeRemoved", "true") == "false":
            rest = [entry for entry in rest if entry.id in self._corpus.items]
        if len(rest) > size:
            return rest[:size], {"nextPageToken": self._change_token(rest[size - 1].number + 1, log)}
        after = max([first - 1, *(entry.number for entry in mine)])
        return rest, {"newStartPageToken": self._change_token(after + 1, log)}

    def _change_token(self, number: int, log: str | None) -> str:
        return f"{number}" if not self.epoch and log is None else f"{number}.{self.epoch}.{log or ''}"

    def number(self, token: str, log: str | None) -> int:
        number, _, rest = token.partition(".")
        epoch, _, token_log = rest.partition(".")
        if not number.isdigit() or (epoch or "0") != str(self.epoch) or token_log != (log or ""):
            if self.gone_status == 410:
                raise ApiError(410, "deleted", "The page token is no longer valid.", location="pageToken")
            raise invalid_value("pageToken")
        return int(number)


@dataclass
class Faults:
    """Faults of the server. Numbers of requests count down; the rest stays until changed. Requests for access tokens
    have no faults."""

    throttled: int = 0
    throttle_status: int = 429
    throttle_reason: str = "rateLimitExceeded"
    retry_after: int | None = 0
    failing: int = 0
    failing_status: int = 503
    truncated: bool = False
    """Whether listings end early, as if they were complete."""
    incomplete: bool = False
    """The API's incompleteSearch, which is true when some shared drives could not be searched."""
    broken: set[str] = field(default_factory=set)
    """Ids of files whose export and download always fail with 500."""
    no_markdown: bool = False
    """Whether documents cannot be exported as Markdown, only as HTML."""
    without_drive: set[str] = field(default_factory=set)
    """Users for whom the company has switched Drive off."""
    refused_users: set[str] = field(default_factory=set)
    """Users on whose behalf every request is refused."""
    disabled: bool = False
    """Whether the Drive API is not enabled in the project."""

    def answer(self) -> Response | None:
        """Return the faulty response to this request; None: there is no fault."""
        if self.throttled:
            self.throttled -= 1
            headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
            return _error(
                ApiError(
                    self.throttle_status,
                    self.throttle_reason,
                    "Rate limit exceeded.",
                    domain="usageLimits",
                    headers=headers,
                )
            )
        if self.failing:
            self.failing -= 1
            return _error(ApiError(self.failing_status, "backendError", "Backend Error"))
        return None


async def body_of(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        raise ApiError(400, "parseError", "Parse Error") from None
    return body if isinstance(body, dict) else {}


def flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid_value(name)
    return value == "true"


def partial(request: Request, answer: dict[str, Any], known: Mask, default: Mask | None = None) -> Response:
    fields = request.query_params.get("fields")
    whole_number(request.query_params, "pageSize", 100, 1000)
    return JSONResponse(select(answer, parse(fields) if fields else (default or {}), known))


def _error(error: ApiError | OAuthError) -> Response:
    headers = error.headers if isinstance(error, ApiError) else None
    return JSONResponse(error.body, error.status, headers=headers)


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | OAuthError)
    return _error(error)


GOOGLE = "application/vnd.google-apps."

USER = parse("kind,displayName,me,permissionId,emailAddress")
PERMISSION = parse(
    "kind,id,type,role,emailAddress,domain,displayName,expirationTime,deleted,allowFileDiscovery,view,pendingOwner,"
    "inheritedPermissionsDisabled,permissionDetails(permissionType,inheritedFrom,role,inherited)"
)
FILE: Mask = {
    **parse(
        "kind,id,name,mimeType,description,trashed,explicitlyTrashed,parents,version,createdTime,modifiedTime,driveId,"
        "teamDriveId,md5Checksum,sha256Checksum,size,headRevisionId,fileExtension,webViewLink,shared,ownedByMe,spaces,"
        "hasAugmentedPermissions,inheritedPermissionsDisabled,permissionIds,copyRequiresWriterPermission,exportLinks,"
        "capabilities(canDownload,canCopy,canShare,canListChildren,canReadDrive),shortcutDetails(targetId,targetMimeType),"
        "clientEncryptionDetails(encryptionState)"
    ),
    "owners": USER,
    "lastModifyingUser": USER,
    "permissions": PERMISSION,
}
DRIVE = parse("kind,id,name,createdTime,hidden,capabilities(canListChildren,canShare,canReadRevisions)")
CHANGE: Mask = {**parse("kind,changeType,type,time,removed,fileId,driveId,teamDriveId"), "file": FILE, "drive": DRIVE}


def rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def user(address: str, account: str) -> dict[str, Any]:
    return {
        "kind": "drive#user",
        "displayName": address.partition("@")[0].replace(".", " ").title(),
        "me": address == account,
        "permissionId": Grant(type="user", who=address).id,
        "emailAddress": address,
    }


def permission(
    grants: list[EffectiveGrant], corpus: Corpus, *, drive: str | None, of_drive: bool = False
) -> dict[str, Any]:
    """Return the permission resource of one grantee, whose grants have the item's own first. In a shared drive it
    includes where each role is inherited from."""
    grant = grants[0].grant
    permission_json: dict[str, Any] = {
        "kind": "drive#permission",
        "id": grant.id,
        "type": grant.type,
        "role": grant.role,
    }
    if grant.type in ("user", "group"):
        permission_json |= {
            "emailAddress": grant.who,
            "displayName": grant.who.partition("@")[0],
            "deleted": grant.deleted,
        }
    if grant.type == "domain":
        permission_json |= {"domain": grant.who, "displayName": grant.who}
    if grant.type in ("domain", "anyone"):
        permission_json["allowFileDiscovery"] = grant.discoverable
    if grant.expires:
        permission_json["expirationTime"] = rfc3339(grant.expires)
    if grant.view:
        permission_json["view"] = grant.view
    if drive:
        permission_json["permissionDetails"] = [
            {
                "permissionType": "member" if of_drive or effective.origin == drive else "file",
                "role": effective.grant.role,
                "inherited": effective.origin is not None,
                **({"inheritedFrom": effective.origin} if effective.origin else {}),
            }
            for effective in grants
        ]
    elif grant.type == "user":
        permission_json["pendingOwner"] = False
    return permission_json


def file(item: Item, corpus: Corpus, account: str) -> dict[str, Any]:
    permissions = corpus.permissions(item)
    roles = corpus.roles(account, item)
    may_share = bool(roles & {"owner", "organizer", "fileOrganizer", "writer"})
    native = item.mime_type.startswith(GOOGLE)
    resource: dict[str, Any] = {
        "kind": "drive#file",
        "id": item.id,
        "name": item.name,
        "mimeType": item.mime_type,
        "trashed": corpus.is_trashed(item),
        "explicitlyTrashed": item.trashed,
        "version": str(item.version),
        "createdTime": rfc3339(item.created),
        "modifiedTime": rfc3339(item.modified),
        "spaces": ["drive"],
        "webViewLink": f"https://drive.google.com/file/d/{item.id}/view?usp=drivesdk",
        "inheritedPermissionsDisabled": item.limited,
        "copyRequiresWriterPermission": not item.download,
        "permissionIds": sorted(permissions),
        "lastModifyingUser": user(item.modifier, account),
        "capabilities": {
            "canDownload": item.download and item.mime_type != FOLDER,
            "canCopy": item.download,
            "canShare": may_share,
            "canListChildren": item.mime_type == FOLDER,
        },
    }
    if item.parent:
        resource["parents"] = [item.parent]
    if item.drive:
        resource |= {"driveId": item.drive, "teamDriveId": item.drive, "hasAugmentedPermissions": bool(item.grants)}
    else:
        assert item.owner is not None
        resource |= {
            "owners": [user(item.owner, account)],
            "ownedByMe": item.owner == account,
            "shared": len(permissions) > 1,
            "parents": [item.parent or f"root-of-{item.owner}"],
        }
        if may_share:
            resource["permissions"] = [permission(grants, corpus, drive=None) for grants in permissions.values()]
    if not native:
        resource |= {
            "md5Checksum": hashlib.md5(item.content).hexdigest(),  # noqa: S324 - Google's field
            "sha256Checksum": hashlib.sha256(item.content).hexdigest(),
            "size": str(len(item.content)),
            "headRevisionId": f"0B{hashlib.sha256(item.content).hexdigest()[:24]}",
            "fileExtension": item.name.rpartition(".")[2] if "." in item.name else "",
        }
    elif item.mime_type == SHORTCUT and item.target:
        target = corpus.items.get(item.target)
        mime = target.mime_type if target else "application/octet-stream"
        resource["shortcutDetails"] = {"targetId": item.target, "targetMimeType": mime}
    if item.encrypted:
        resource["clientEncryptionDetails"] = {"encryptionState": "encrypted"}
    return resource


def drive(id_: str, corpus: Corpus, account: str) -> dict[str, Any]:
    roles = corpus.roles(account, corpus.items[id_])
    return {
        "kind": "drive#drive",
        "id": id_,
        "name": corpus.drives[id_],
        "createdTime": rfc3339(corpus.items[id_].created),
        "hidden": False,
        "capabilities": {"canListChildren": True, "canReadRevisions": True, "canShare": "organizer" in roles},
    }


def change(entry: Change, corpus: Corpus, account: str) -> dict[str, Any]:
    """Return a change resource. ``removed`` means deleted, no longer readable, or no longer in this drive."""
    resource: dict[str, Any] = {
        "kind": "drive#change",
        "changeType": entry.kind,
        "type": entry.kind,
        "time": rfc3339(entry.at),
        "removed": True,
    }
    item = corpus.items.get(entry.id)
    if entry.kind == "drive":
        resource |= {"driveId": entry.id, "teamDriveId": entry.id}
        if item is not None and corpus.roles(account, item):
            resource |= {"removed": False, "drive": drive(entry.id, corpus, account)}
        return resource
    resource["fileId"] = entry.id
    if item is not None and item.drive == entry.log and corpus.lists(account, item):
        resource |= {"removed": False, "file": file(item, corpus, account)}
    return resource
