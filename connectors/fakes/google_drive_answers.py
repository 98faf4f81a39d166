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

from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, Change, Corpus, Grant, Held, Item


class ApiError(Exception):
    """What a Google API answers instead of what was asked for. ``reason`` is what programs tell errors apart by."""

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
        one: dict[str, Any] = {"message": message, "domain": domain, "reason": reason}
        if location:
            kind = "header" if location == "Authorization" else "parameter"
            one |= {"location": location, "locationType": kind}
        self.body: dict[str, Any] = {"error": {"code": status, "message": message, "errors": [one]}}


class OAuthError(Exception):
    """RFC 6749, section 5.2, as https://oauth2.googleapis.com/token words it."""

    def __init__(self, status: int, error: str, description: str) -> None:
        super().__init__(description)
        self.status = status
        self.body = {"error": error, "error_description": description}


def file_not_found(id_: str) -> ApiError:
    return ApiError(404, "notFound", f"File not found: {id_}.", location="fileId")


def drive_not_found(id_: str) -> ApiError:
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
"""Name → the mask below it; an empty one takes everything below."""

_TOKEN = re.compile(r"[\w*]+|[(),/]")


def parse(text: str) -> Mask:
    """Raises ApiError where Google would: a selection that is not well formed."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise _refused(text)
    mask, rest = _parsed(tokens, text)
    if rest:
        raise _refused(text)
    return mask


def _parsed(tokens: list[str], text: str) -> tuple[Mask, list[str]]:
    mask: Mask = {}
    while tokens:
        path, tokens = [tokens[0]], tokens[1:]
        while tokens[:1] == ["/"] and len(tokens) > 1:
            path, tokens = [*path, tokens[1]], tokens[2:]
        below: Mask = {}
        if tokens[:1] == ["("]:
            below, tokens = _parsed(tokens[1:], text)
            if tokens[:1] != [")"]:
                raise _refused(text)
            tokens = tokens[1:]
        if any(not re.fullmatch(r"[\w*]+", name) for name in path):
            raise _refused(text)
        place = mask
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = below
        if tokens[:1] != [","]:
            return mask, tokens
        tokens = tokens[1:]
    raise _refused(text)


def chosen(value: Any, mask: Mask, known: Mask, path: str = "") -> Any:
    """What the mask takes of a value. known: every name that this kind of answer could have; another one is refused."""
    if isinstance(value, list):
        return [chosen(one, mask, known, path) for one in value]
    check(mask, known, path)
    if not isinstance(value, dict) or not mask or "*" in mask:
        return value
    return {
        name: chosen(value[name], below, known.get(name, {}), f"{path}{name}/")
        for name, below in mask.items()
        if name in value
    }


def check(mask: Mask, known: Mask, path: str = "") -> None:
    for name, below in mask.items():
        if name == "*":
            continue
        if known and name not in known:
            raise _refused(path + name)
        check(below, known.get(name, {}), f"{path}{name}/")


def _refused(what: str) -> ApiError:
    return ApiError(400, "invalidParameter", f"Invalid field selection {what}", location="fields")


Query = Mapping[str, str]

_TERM = re.compile(r"(trashed|mimeType)\s*(=|!=)\s*('[^']*'|true|false)|'([^']+)'\s+in\s+parents")


def matching(q: str, corpus: Corpus) -> Callable[[Item], bool]:
    """The part of the search language that is needed here, terms joined by ``and``; anything else is refused.

    https://developers.google.com/workspace/drive/api/guides/ref-search-terms
    """
    tests: list[Callable[[Item], bool]] = []
    for term in re.split(r"\s+and\s+", q.strip()) if q.strip() else ():
        found = _TERM.fullmatch(term)
        if found is None:
            raise invalid_value("q")
        name, sign, value, parent = found.groups()
        wanted = sign != "!="
        if parent is not None:
            tests.append(lambda item, parent=parent: item.parent == parent)  # type: ignore[misc]
        elif name == "trashed" and value in ("true", "false"):
            is_it = (value == "true") == wanted
            tests.append(lambda item, is_it=is_it: corpus.is_trashed(item) == is_it)  # type: ignore[misc]
        elif name == "mimeType" and value.startswith("'"):
            tests.append(lambda item, kind=value[1:-1], wanted=wanted: (item.mime_type == kind) == wanted)  # type: ignore[misc]
        else:
            raise invalid_value("q")
    return lambda item: all(test(item) for test in tests)


def whole_number(query: Query, name: str, usual: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return usual
    if not text.isdigit() or int(text) < 1:
        raise ApiError(400, "invalidParameter", f"Invalid value '{text}'. Values must be within the range: [1, {most}]")
    return min(int(text), most)


class Pages:
    """``epoch``: raised, it makes every token given so far unknown."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.epoch = 0
        self.gone_status = 400
        """With what a change token that is no longer known is refused: Drive's 400, or 410 as its older feeds do."""

    def files(self, found: list[Item], query: Query, *, truncated: bool) -> tuple[list[Item], str | None]:
        """In the order of creation: whoever is met stays met, whatever moves or goes meanwhile."""
        size = whole_number(query, "pageSize", 100, 1000)
        about = [query.get(name) for name in ("corpora", "driveId", "q", "orderBy")]
        after = self._read(query, about)
        rest = [item for item in found if after is None or item.id > after]
        if truncated:
            return rest[: min(size, len(rest) // 2)], None
        shown = rest[:size]
        return shown, self._token(about, shown[-1].id) if len(rest) > size else None

    def plain(
        self,
        every: Sequence[dict[str, Any]],
        query: Query,
        sizing: str = "pageSize",
        *,
        truncated: bool = False,
        most: int = 100,
        usual: int = 100,
    ) -> tuple[list[dict[str, Any]], str | None]:
        size = whole_number(query, sizing, usual, most)
        start = int(self._read(query, ["plain"]) or 0)
        shown = list(every[start : start + size])
        return shown, self._token(["plain"], str(start + size)) if start + size < len(every) else None

    def _token(self, about: list[Any], place: str) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.epoch, about, place]).encode()).decode()

    def _read(self, query: Query, about: list[Any]) -> str | None:
        """Where to go on. A token that is not of this very listing is refused."""
        token = query.get("pageToken")
        if token is None:
            return None
        try:
            epoch, of, place = json.loads(base64.urlsafe_b64decode(token.encode()))
        except ValueError:
            raise invalid_value("pageToken") from None
        if epoch != self.epoch or of != about:
            raise invalid_value("pageToken")
        return str(place)

    # Changes: the token is the number of the next change, in the log of one drive or of the user.

    def start(self, log: str | None) -> str:
        newest = max((entry.number for entry in self._corpus.changes if entry.log == log), default=0)
        return self._change_token(newest + 1, log)

    def changes(self, mine: list[Change], log: str | None, query: Query) -> tuple[list[Change], dict[str, str]]:
        """A file that changed several times stands there once, at its newest change."""
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
        epoch, _, of = rest.partition(".")
        if not number.isdigit() or (epoch or "0") != str(self.epoch) or of != (log or ""):
            if self.gone_status == 410:
                raise ApiError(410, "deleted", "The page token is no longer valid.", location="pageToken")
            raise invalid_value("pageToken")
        return int(number)


@dataclass
class Faults:
    """A number of requests counts down; the rest stays until changed. Tokens are asked for without trouble."""

    throttled: int = 0
    throttle_status: int = 429
    throttle_reason: str = "rateLimitExceeded"
    retry_after: int | None = 0
    failing: int = 0
    failing_status: int = 503
    truncated: bool = False
    """Listings end early, as if that were all."""
    incomplete: bool = False
    """incompleteSearch, as when some shared drives could not be searched."""
    broken: set[str] = field(default_factory=set)
    """Ids of files that cannot be exported or downloaded: Google answers 500 whenever it is tried."""
    no_markdown: bool = False
    """Documents are exported as HTML and not as Markdown."""
    disabled: bool = False
    """The Drive API is not enabled in the project."""

    def answer(self) -> Response | None:
        """What is answered instead, if this request is one of those."""
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
        found = json.loads(await request.body())
    except ValueError:
        raise ApiError(400, "parseError", "Parse Error") from None
    return found if isinstance(found, dict) else {}


def flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid_value(name)
    return value == "true"


def partial(request: Request, answer: dict[str, Any], known: Mask, usual: Mask | None = None) -> Response:
    asked = request.query_params.get("fields")
    whole_number(request.query_params, "pageSize", 100, 1000)
    return JSONResponse(chosen(answer, parse(asked) if asked else (usual or {}), known))


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


def permission(held: list[Held], corpus: Corpus, *, drive: str | None, of_drive: bool = False) -> dict[str, Any]:
    """held: one grantee's, its own first. A file in a shared drive tells where each role comes from."""
    grant = held[0].grant
    shown: dict[str, Any] = {"kind": "drive#permission", "id": grant.id, "type": grant.type, "role": grant.role}
    if grant.type in ("user", "group"):
        shown |= {"emailAddress": grant.who, "displayName": grant.who.partition("@")[0], "deleted": grant.deleted}
    if grant.type == "domain":
        shown |= {"domain": grant.who, "displayName": grant.who}
    if grant.type in ("domain", "anyone"):
        shown["allowFileDiscovery"] = grant.discoverable
    if grant.expires:
        shown["expirationTime"] = rfc3339(grant.expires)
    if grant.view:
        shown["view"] = grant.view
    if drive:
        shown["permissionDetails"] = [
            {
                "permissionType": "member" if of_drive or one.origin == drive else "file",
                "role": one.grant.role,
                "inherited": one.origin is not None,
                **({"inheritedFrom": one.origin} if one.origin else {}),
            }
            for one in held
        ]
    elif grant.type == "user":
        shown["pendingOwner"] = False
    return shown


def file(item: Item, corpus: Corpus, account: str) -> dict[str, Any]:
    held = corpus.permissions(item)
    roles = corpus.roles(account, item)
    may_share = bool(roles & {"owner", "organizer", "fileOrganizer", "writer"})
    native = item.mime_type.startswith(GOOGLE)
    shown: dict[str, Any] = {
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
        "permissionIds": sorted(held),
        "lastModifyingUser": user(item.modifier, account),
        "capabilities": {
            "canDownload": item.download and item.mime_type != FOLDER,
            "canCopy": item.download,
            "canShare": may_share,
            "canListChildren": item.mime_type == FOLDER,
        },
    }
    if item.parent:
        shown["parents"] = [item.parent]
    if item.drive:
        shown |= {"driveId": item.drive, "teamDriveId": item.drive, "hasAugmentedPermissions": bool(item.grants)}
    else:
        assert item.owner is not None
        shown |= {
            "owners": [user(item.owner, account)],
            "ownedByMe": item.owner == account,
            "shared": len(held) > 1,
            "parents": [item.parent or f"root-of-{item.owner}"],
        }
        if may_share:
            shown["permissions"] = [permission(one, corpus, drive=None) for one in held.values()]
    if not native:
        shown |= {
            "md5Checksum": hashlib.md5(item.content).hexdigest(),  # noqa: S324 - Google's field
            "sha256Checksum": hashlib.sha256(item.content).hexdigest(),
            "size": str(len(item.content)),
            "headRevisionId": f"0B{hashlib.sha256(item.content).hexdigest()[:24]}",
            "fileExtension": item.name.rpartition(".")[2] if "." in item.name else "",
        }
    elif item.mime_type == SHORTCUT and item.target:
        target = corpus.items.get(item.target)
        mime = target.mime_type if target else "application/octet-stream"
        shown["shortcutDetails"] = {"targetId": item.target, "targetMimeType": mime}
    if item.encrypted:
        shown["clientEncryptionDetails"] = {"encryptionState": "encrypted"}
    return shown


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
    """``removed``: deleted, no longer ours to read, or no longer in this drive."""
    shown: dict[str, Any] = {
        "kind": "drive#change",
        "changeType": entry.kind,
        "type": entry.kind,
        "time": rfc3339(entry.at),
        "removed": True,
    }
    item = corpus.items.get(entry.id)
    if entry.kind == "drive":
        shown |= {"driveId": entry.id, "teamDriveId": entry.id}
        if item is not None and corpus.roles(account, item):
            shown |= {"removed": False, "drive": drive(entry.id, corpus, account)}
        return shown
    shown["fileId"] = entry.id
    if item is not None and item.drive == entry.log and corpus.finds(account, item):
        shown |= {"removed": False, "file": file(item, corpus, account)}
    return shown
