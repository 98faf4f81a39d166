"""A fake Microsoft Graph (v1.0), Entra's token endpoint and the part of SharePoint's own API that lists the members of
site groups, over HTTP, with faults.

Tests compare its responses with Microsoft's published schema. It follows https://learn.microsoft.com/en-us/graph/api/overview,
and issue reports for the rest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.fakes.graph_tenant import TENANT, Grant, Item, Site, Tenant, User

CLIENT = "5b3f1c9e-0000-4000-8000-0000000000c1"
SECRET = "secret-of-the-application"  # noqa: S105 # opens nothing else
TOKEN_SECONDS = 3599
MAX_SUBSCRIPTION = timedelta(minutes=42_300)
BATCH_REQUESTS = 20
PREFERENCES = ("deltashowremovedasdeleted", "deltatraversepermissiongaps", "deltashowsharingchanges")

Validate = Callable[[str, str], Awaitable[str]]
"""Requests an address with a validation token, and returns the body of the response."""


class GraphError(Exception):
    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers

    def body(self) -> dict[str, Any]:
        inner = {"date": "2026-11-21T12:00:00", "request-id": "0", "client-request-id": "0"}
        return {"error": {"code": self.code, "message": str(self), "innerError": inner}}


def missing_item() -> GraphError:
    return GraphError(404, "itemNotFound", "The resource could not be found.")


@dataclass
class Faults:
    throttled: int = 0
    failing: int = 0
    truncated: bool = False
    """Listings end early, as if they were complete."""
    broken: set[str] = field(default_factory=set)
    """Items whose content always fails."""
    empty_pages: int = 0
    """So many next pages of the log are empty, with a link to the next page."""
    twice: bool = False
    """Items are twice on a page of the log: first as they were, without a name, then as they are."""
    throttled_batch: int = 0
    """So many next requests within a batch are answered with 429."""
    without_hierarchy: bool = False
    """The preference hierarchicalsharing is ignored, as without Sites.FullControl.All."""
    hidden_users: bool = False
    """Members of groups are shown by their ids only, as without User.Read.All."""

    def answer(self) -> Response | None:
        if self.throttled:
            self.throttled -= 1
            error = GraphError(429, "activityLimitReached", "The request has been throttled")
            return JSONResponse(error.body(), 429, {"Retry-After": "0"})
        if self.failing:
            self.failing -= 1
            return JSONResponse(GraphError(500, "generalException", "General exception while processing").body(), 500)
        return None


@dataclass(slots=True)
class Token:
    audience: str
    by_certificate: bool
    expires_at: datetime


@dataclass(slots=True)
class Subscription:
    id: str
    drive: str
    address: str
    secret: str | None
    expires_at: datetime
    notified: int
    """The number of the newest change that was sent to it."""


def certificate() -> tuple[str, x509.Certificate]:
    """Return a new private key with its self-signed certificate as PEM, and the certificate."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2036, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (private + made.public_bytes(encoding)).decode(), made


class FakeGraph:
    """``async with served(fake) as url, served(fake.sharepoint) as sharepoint``: Graph is below ``url``/v1.0, tokens at
    ``url``/TENANT/oauth2/v2.0/token; downloads and SharePoint's own API are at ``sharepoint``, which ``connect``
    tells."""

    OPEN: ClassVar[re.Pattern[str]] = re.compile(r"/[^/]+/oauth2/v2\.0/token")

    def __init__(self, tenant: Tenant | None = None) -> None:
        self.tenant = tenant or Tenant()
        self.faults = Faults()
        self.certificate, public = certificate()
        self._public = public
        self.tokens: dict[str, Token] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.validate: Validate | None = None
        """None: addresses are not validated."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request, also of those within a batch."""
        self.epoch = 0
        """Links of an earlier epoch are no longer known."""
        self.url = self.sharepoint_url = ""
        self._outbox: list[tuple[str, bytes]] = []
        get, post = ["GET"], ["POST"]
        self._app = Starlette(
            routes=[
                Route("/{tenant}/oauth2/v2.0/token", self._token, methods=post),
                Route("/v1.0/$batch", self._batch, methods=post),
                Route("/v1.0/sites/getAllSites", self._all_sites, methods=get),
                Route("/v1.0/sites/{site}/drives", self._site_drives, methods=get),
                Route("/v1.0/sites/{site}/lists", self._lists, methods=get),
                Route("/v1.0/sites/{site}/lists/{list}/drive", self._list_drive, methods=get),
                Route("/v1.0/sites/{site}/pages/{page}/microsoft.graph.sitePage", self._page, methods=get),
                Route("/v1.0/sites/{site:path}", self._site, methods=get),
                Route("/v1.0/users", self._users, methods=get),
                Route("/v1.0/users/{user}", self._user, methods=get),
                Route("/v1.0/users/{user}/drive", self._user_drive, methods=get),
                Route("/v1.0/groups/{group}/transitiveMembers", self._members, methods=get),
                Route("/v1.0/groups/{group}/owners", self._owners, methods=get),
                Route("/v1.0/drives/{drive}/root/delta", self._delta, methods=get),
                Route("/v1.0/drives/{drive}/items/{item}", self._item, methods=get),
                Route("/v1.0/drives/{drive}/items/{item}/permissions", self._permissions, methods=get),
                Route("/v1.0/drives/{drive}/items/{item}/content", self._content, methods=get),
                Route("/v1.0/subscriptions", self._subscribe, methods=post),
                Route("/v1.0/subscriptions/{id}", self._subscription, methods=["PATCH", "DELETE"]),
            ],
            exception_handlers={GraphError: _answer_error},
        )
        self.sharepoint = Starlette(
            routes=[
                Route("/download", self._download, methods=get),
                Route("/{site:path}/_api/web/sitegroups/getbyid({number:int})/users", self._site_group, methods=get),
            ],
            exception_handlers={GraphError: _answer_error},
        )
        self.downloads: dict[str, str] = {}
        """The item of each pre-authenticated address."""
        self.download_headers: list[Mapping[str, str]] = []

    def connect(self, url: str, sharepoint_url: str) -> None:
        self.url, self.sharepoint_url = url, sharepoint_url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests.append((scope["method"], scope["path"]))
            if not self.OPEN.fullmatch(scope["path"]) and (fault := self.faults.answer()):
                await fault(scope, receive, send)
                return
        await self._app(scope, receive, send)

    # Authentication

    async def _token(self, request: Request) -> Response:
        async with request.form() as form:
            fields = {name: str(value) for name, value in form.items()}
        if request.path_params["tenant"] != TENANT:
            return _oauth_error("invalid_request", 90002, "Tenant not found.")
        if fields.get("grant_type") != "client_credentials":
            return _oauth_error("unsupported_grant_type", 70003, "The grant type is not supported.")
        if fields.get("client_id") != CLIENT:
            return _oauth_error("unauthorized_client", 700016, "Application was not found in the directory.")
        audience, suffix, rest = fields.get("scope", "").partition("/.default")
        if not suffix or rest or audience not in (self.url, self.sharepoint_url):
            return _oauth_error(
                "invalid_scope", 70011, "The provided value for the input parameter scope is not valid."
            )
        by_certificate = "client_assertion" in fields
        if by_certificate:
            if not self._is_valid(fields, str(request.url)):
                return _oauth_error("invalid_client", 700027, "The certificate used to sign is not registered.", 401)
        elif fields.get("client_secret") != SECRET:
            return _oauth_error("invalid_client", 7000215, "Invalid client secret provided.", 401)
        name = secrets.token_urlsafe(24)
        expires_at = self.tenant.now() + timedelta(seconds=TOKEN_SECONDS)
        self.tokens[name] = Token(audience, by_certificate, expires_at)
        return JSONResponse(
            {"token_type": "Bearer", "expires_in": TOKEN_SECONDS, "ext_expires_in": TOKEN_SECONDS, "access_token": name}
        )

    def _is_valid(self, fields: Mapping[str, str], url: str) -> bool:
        if fields.get("client_assertion_type") != "urn:ietf:params:oauth:client-assertion-type:jwt-bearer":
            return False
        assertion = fields["client_assertion"]
        der = self._public.public_bytes(serialization.Encoding.DER)
        thumbprint = base64.urlsafe_b64encode(hashlib.sha256(der).digest()).rstrip(b"=").decode()
        try:
            header = jwt.get_unverified_header(assertion)
            public: Any = self._public.public_key()
            claims = jwt.decode(
                assertion,
                public,
                algorithms=["PS256"],
                audience=url,
                issuer=CLIENT,
                options={"require": ["aud", "exp", "iss", "jti", "nbf", "sub"]},
            )
        except jwt.PyJWTError:
            return False
        return header.get("x5t#S256") == thumbprint and claims["sub"] == CLIENT

    def _require(self, request: Request, audience: str) -> Token:
        scheme, _, name = request.headers.get("authorization", "").partition(" ")
        token = self.tokens.get(name)
        if scheme != "Bearer" or token is None or token.audience != audience or token.expires_at <= self.tenant.now():
            raise GraphError(401, "InvalidAuthenticationToken", "Access token validation failure. Invalid audience.")
        return token

    # Sites

    def _site_by_id(self, id_: str) -> Site:
        site = self.tenant.sites.get(id_)
        if site is None:
            raise missing_item()
        return self._open(site)

    @staticmethod
    def _open(site: Site) -> Site:
        if site.is_locked:
            raise GraphError(423, "notAllowed", "Access to this site has been blocked.")
        return site

    async def _site(self, request: Request) -> Response:
        """A site by its id, or by its address as HOST:/PATH."""
        self._require(request, self.url)
        key = request.path_params["site"]
        if ":" not in key and key in self.tenant.sites:
            return JSONResponse(_site(self._site_by_id(key)))
        host, _, path = key.partition(":")
        for site in self.tenant.sites.values():
            if site.url.rstrip("/") == f"https://{host}{path}".rstrip("/"):
                return JSONResponse(_site(self._open(site)))
        raise missing_item()

    async def _all_sites(self, request: Request) -> Response:
        """Locked sites, too, are listed."""
        return self._rows(request, [_site(site) for site in self.tenant.sites.values()])

    async def _site_drives(self, request: Request) -> Response:
        site = self._site_by_id(request.path_params["site"])
        return self._rows(request, [self._drive(id_) for id_ in site.drives])

    async def _lists(self, request: Request) -> Response:
        """The library of pages belongs to the system: it is listed only where ``system`` is selected."""
        site = self._site_by_id(request.path_params["site"])
        lists = [
            {
                "id": f"list-of-{id_}",
                "list": {"contentTypesEnabled": False, "hidden": False, "template": "documentLibrary"},
            }
            for id_ in site.drives
        ]
        if site.pages_drive and "system" in request.query_params.get("$select", "").split(","):
            facts = {"contentTypesEnabled": True, "hidden": False, "template": "webPageLibrary"}
            lists.append({"id": f"list-of-{site.pages_drive}", "list": facts, "system": {}})
        return self._rows(request, lists)

    async def _list_drive(self, request: Request) -> Response:
        self._require(request, self.url)
        self._site_by_id(request.path_params["site"])
        return JSONResponse(self._drive(request.path_params["list"].removeprefix("list-of-")))

    async def _user_drive(self, request: Request) -> Response:
        self._require(request, self.url)
        user = self._find_user(request.path_params["user"])
        path = f"/personal/{re.sub('[.@]', '_', user.upn)}"
        for site in self.tenant.sites.values():
            if site.is_personal and urlsplit(site.url).path == path:
                return JSONResponse(self._drive(self._open(site).drives[0]))
        raise GraphError(404, "ResourceNotFound", "User's mysite not found.")

    def _drive(self, id_: str) -> dict[str, Any]:
        if id_ not in self.tenant.drives:
            raise missing_item()
        site, name = self.tenant.site_of(id_), self.tenant.drives[id_][1]
        _, collection, web = site.id.split(",")
        return {
            "id": id_,
            "name": name,
            "driveType": "business" if site.is_personal else "documentLibrary",
            "webUrl": f"{site.url}/{quote(name)}",
            "sharePointIds": {"siteId": collection, "webId": web, "siteUrl": site.url, "listId": f"list-of-{id_}"},
        }

    async def _page(self, request: Request) -> Response:
        self._require(request, self.url)
        self._site_by_id(request.path_params["site"])
        for item in self.tenant.items.values():
            if item.unique_id == request.path_params["page"] and item.page is not None and not item.is_deleted:
                version = item.version or f"{item.edits}.0"
                level = "published" if version.endswith(".0") else "draft"
                return JSONResponse(
                    {
                        "@odata.type": "#microsoft.graph.sitePage",
                        "id": item.unique_id,
                        "name": item.name,
                        "publishingState": {"level": level, "versionId": version},
                        **item.page,
                    }
                )
        raise missing_item()

    # Directory

    def _find_user(self, key: str) -> User:
        key = unquote(key).lower()
        for user in self.tenant.users.values():
            if key in (user.id, user.upn.lower()):
                return user
        raise GraphError(404, "Request_ResourceNotFound", f"Resource '{key}' does not exist.")

    async def _user(self, request: Request) -> Response:
        self._require(request, self.url)
        return JSONResponse(_user(self._find_user(request.path_params["user"])))

    async def _users(self, request: Request) -> Response:
        users = self.tenant.users.values()
        if request.query_params.get("$filter") == "accountEnabled eq true":
            users = [user for user in users if user.is_enabled]  # type: ignore[assignment]
        return self._rows(request, [_user(user) for user in users])

    def _directory(self, ids: Any) -> list[dict[str, Any]]:
        rows = []
        for id_ in ids:
            user = self.tenant.users.get(id_)
            if user is None:
                rows.append({"@odata.type": "#microsoft.graph.group", "id": id_})
            elif self.faults.hidden_users:
                empty = {"mail": None, "userPrincipalName": None, "accountEnabled": None, "userType": None}
                rows.append({"@odata.type": "#microsoft.graph.user", "id": id_, **empty})
            else:
                rows.append({"@odata.type": "#microsoft.graph.user", **_user(user)})
        return rows

    def _group(self, request: Request) -> str:
        id_ = str(request.path_params["group"])
        if id_ not in self.tenant.groups:
            raise GraphError(404, "Request_ResourceNotFound", f"Resource '{id_}' does not exist.")
        return id_

    async def _members(self, request: Request) -> Response:
        return self._rows(request, self._directory(self.tenant.transitive_members(self._group(request))))

    async def _owners(self, request: Request) -> Response:
        return self._rows(request, self._directory(sorted(self.tenant.groups[self._group(request)].owners)))

    def _rows(self, request: Request, rows: list[dict[str, Any]], default: int = 100) -> Response:
        """Return a page of a list."""
        self._require(request, self.url)
        at, size = int(request.query_params.get("$skiptoken", "0")), int(request.query_params.get("$top", default))
        page: dict[str, Any] = {"value": rows[at : at + size]}
        if at + size < len(rows):
            page["@odata.nextLink"] = str(
                request.url.replace(
                    scheme=urlsplit(self.url).scheme, netloc=urlsplit(self.url).netloc
                ).include_query_params(**{"$skiptoken": at + size})
            )
        return JSONResponse(page)

    # Items

    def _item_of(self, request: Request) -> Item:
        self._require(request, self.url)
        drive, id_ = unquote(request.path_params["drive"]), request.path_params["item"]
        if drive not in self.tenant.drives:
            raise missing_item()
        self._open(self.tenant.site_of(drive))
        item = self.tenant.items.get(self.tenant.root(drive) if id_ == "root" else id_)
        if item is None or item.drive != drive or item.is_deleted:
            raise missing_item()
        return item

    async def _item(self, request: Request) -> Response:
        item = self._item_of(request)
        return JSONResponse(self.shown(item, with_shared=item.grants is not None))

    def shown(self, item: Item, *, with_shared: bool) -> dict[str, Any]:
        site = self.tenant.site_of(item.drive)
        shown: dict[str, Any] = {
            "id": item.id,
            "name": item.name,
            "size": len(item.content),
            "eTag": f'"{{{item.unique_id.upper()}}},{item.edits}"',
            "webUrl": f"{site.url}/{quote(self.tenant.drives[item.drive][1])}/{quote(item.name)}",
            "lastModifiedDateTime": _time(item.modified_at),
            "lastModifiedBy": {"user": {"displayName": "Ines Author", "id": "0"}},
            "createdBy": {"user": {"displayName": "Ines Author", "id": "0"}},
            "parentReference": {"driveId": item.drive, "driveType": "documentLibrary", "siteId": site.collection},
            "sharepointIds": {"listItemUniqueId": item.unique_id, "siteUrl": site.url},
        }
        if item.parent is not None:
            shown["parentReference"]["id"] = item.parent
        else:
            shown["root"] = {}
        if item.is_shortcut:
            shown["remoteItem"] = {"id": "01REMOTE", "name": item.name}
        if item.package:
            shown["package"] = {"type": item.package}
        elif item.is_folder:
            children = sum(other.parent == item.id and not other.is_deleted for other in self.tenant.items.values())
            shown["folder"] = {"childCount": children}
        else:
            shown["file"] = {"mimeType": item.mime_type, "hashes": {"quickXorHash": f"{hash(item.content):x}"}}
        if item.malware:
            shown["malware"] = {"description": item.malware}
        if item.version:
            shown["publication"] = {"level": "published", "versionId": item.version}
        if with_shared:
            shown["shared"] = {"scope": "users"} if item.grants else {}
        return shown

    async def _permissions(self, request: Request) -> Response:
        item = self._item_of(request)
        return self._rows(request, [self.permission(grant) for grant in self.tenant.effective(item)])

    def permission(self, grant: Grant) -> dict[str, Any]:
        """SharePoint does not return ``inheritedFrom`` (resources/permission, Remarks)."""
        shown: dict[str, Any] = {"id": grant.id, "roles": [grant.role]}
        if grant.expires is not None:
            shown["expirationDateTime"] = _time(grant.expires)
        if grant.link is not None:
            shown["link"] = {"scope": grant.link, "type": "view", "webUrl": "https://contoso.sharepoint.com/:t:/s/x"}
            shown["grantedToIdentitiesV2"] = [self._identity(user) for user in grant.link_users]
            return shown
        if grant.user is not None:
            shown["grantedToV2"] = self._identity(grant.user)
        elif grant.group is not None or grant.owners is not None:
            id_ = grant.group or grant.owners or ""
            login = self.group_claim(id_, owners=grant.owners is not None)
            shown["grantedToV2"] = {
                "group": {"id": id_, "displayName": "A group"},
                "siteUser": {"id": "11", "displayName": "A group", "loginName": login},
            }
        elif grant.site_group is not None:
            name = f"Site group {grant.site_group}"
            shown["grantedToV2"] = {"siteGroup": {"id": str(grant.site_group), "displayName": name, "loginName": name}}
        elif grant.claim is not None:
            shown["grantedToV2"] = {"siteUser": {"id": "12", "displayName": "A claim", "loginName": grant.claim}}
        return shown

    def _identity(self, user: str) -> dict[str, Any]:
        known = self.tenant.users[user]
        identity = {"id": user, "displayName": known.upn}
        login = f"i:0#.f|membership|{known.upn}"
        return {"user": identity, "siteUser": {"id": "10", "displayName": known.upn, "loginName": login}}

    def group_claim(self, id_: str, *, owners: bool = False) -> str:
        if self.tenant.groups[id_].is_unified:
            return f"c:0o.c|federateddirectoryclaimprovider|{id_}" + ("_o" if owners else "")
        return f"c:0t.c|tenant|{id_}"

    async def _content(self, request: Request) -> Response:
        item = self._item_of(request)
        if item.id in self.faults.broken:
            raise GraphError(500, "generalException", "General exception while processing")
        if item.malware:
            raise GraphError(403, "malwareDetected", "Malware detected.")
        code = secrets.token_urlsafe(16)
        self.downloads[code] = item.id
        return Response(status_code=302, headers={"Location": f"{self.sharepoint_url}/download?tempauth={code}"})

    async def _download(self, request: Request) -> Response:
        self.download_headers.append(dict(request.headers))
        item = self.downloads.pop(request.query_params.get("tempauth", ""), None)
        if item is None:
            return Response("401 UNAUTHORIZED", 401)
        return Response(self.tenant.items[item].content, media_type="application/octet-stream")

    # The log of changes

    async def _delta(self, request: Request) -> Response:
        self._require(request, self.url)
        drive = unquote(request.path_params["drive"])
        if drive not in self.tenant.drives:
            raise missing_item()
        self._open(self.tenant.site_of(drive))
        prefer = request.headers.get("prefer", "")
        query = request.query_params
        token = query.get("token", "")
        if token == "latest":  # noqa: S105 # Graph's word
            return JSONResponse(
                {"value": [], "@odata.deltaLink": self._link(drive, query, self.tenant.last_change, "c")}
            )
        kind, after = self._parse(token)
        items = sorted(
            (
                item
                for item in self.tenant.items.values()
                if item.drive == drive and item.changed > after and not (kind == "f" and item.is_deleted)
            ),
            key=lambda item: item.changed,
        )
        size = int(query.get("$top", 200))
        if self.faults.empty_pages:
            self.faults.empty_pages -= 1
            return JSONResponse({"value": [], "@odata.nextLink": self._link(drive, query, after, kind)})
        page, has_more = items[:size], len(items) > size
        reached = page[-1].changed if has_more else self.tenant.last_change
        value = [self._changed(item, after, prefer, is_listing=kind == "f") for item in page]
        if kind == "c":
            value = [*self._above(page, prefer), *value]
        if self.faults.twice:
            names = ("id", "file", "folder")
            first: list[dict[str, Any]] = [{name: entry[name] for name in names if name in entry} for entry in value]
            value = [*first, *value]
        if self.faults.truncated and kind == "f":
            has_more = False
        body: dict[str, Any] = {"@odata.context": f"{self.url}/v1.0/$metadata#Collection(driveItem)", "value": value}
        if has_more:
            body["@odata.nextLink"] = self._link(drive, query, reached, kind)
        else:
            body["@odata.deltaLink"] = self._link(drive, query, self.tenant.last_change, "c")
        return JSONResponse(body)

    def _parse(self, token: str) -> tuple[str, int]:
        """Return whether a token continues a full listing (f) or the log of changes (c), and its number."""
        if not token:
            return "f", 0
        match = re.fullmatch(r"([fc])-(\d+)-(\d+)", token)
        if match is None:
            raise GraphError(400, "invalidRequest", "The token is invalid.")
        if int(match[2]) != self.epoch:
            location = {"Location": f"{self.url}/v1.0/drives/-/root/delta"}
            raise GraphError(410, "resyncChangesApplyDifferences", "Resync required.", location)
        return match[1], int(match[3])

    def _link(self, drive: str, query: Mapping[str, str], number: int, kind: str) -> str:
        more = "".join(f"&{name}={quote(query[name])}" for name in ("$select", "$top") if name in query)
        return f"{self.url}/v1.0/drives/{quote(drive)}/root/delta?token={kind}-{self.epoch}-{number}{more}"

    def _changed(self, item: Item, after: int, prefer: str, *, is_listing: bool) -> dict[str, Any]:
        if item.is_deleted:  # without a name (driveitem-delta, Remarks)
            kind: dict[str, Any] = {"folder": {}} if item.is_folder else {"file": {}}
            return {"id": item.id, "deleted": {"state": "deleted"}, "parentReference": {"driveId": item.drive}, **kind}
        if "hierarchicalsharing" in prefer and not self.faults.without_hierarchy:
            with_shared = item.grants is not None or (not is_listing and item.shared > after)
        else:
            with_shared = item.parent is not None and bool(self.tenant.effective(item))
        shown = self.shown(item, with_shared=with_shared)
        asks_for_sharing = all(name in prefer for name in PREFERENCES)
        if asks_for_sharing and not is_listing and item.shared > after and not item.is_folder:
            shown["@microsoft.graph.sharedChanged"] = "True"  # only on files: msgraph-sdk-java issue 2548
        return shown

    def _above(self, items: list[Item], prefer: str) -> list[dict[str, Any]]:
        """The folders above changed items, which the log shows too."""
        changed = {item.id for item in items}
        above = {place.id: place for item in items if not item.is_deleted for place in self.tenant.above(item)}
        places = [place for place in above.values() if place.id not in changed and not place.is_deleted]
        number = self.tenant.last_change
        return [self._changed(place, number, prefer, is_listing=False) for place in places]

    # Batch

    async def _batch(self, request: Request) -> Response:
        self._require(request, self.url)
        requests = (await request.json())["requests"]
        if len(requests) > BATCH_REQUESTS:
            raise GraphError(400, "BadRequest", f"Number of batch requests exceeds the maximum of {BATCH_REQUESTS}.")
        responses = [await self._within_batch(entry, request) for entry in requests]
        return JSONResponse({"responses": list(reversed(responses))})  # in any order

    async def _within_batch(self, entry: Mapping[str, Any], request: Request) -> dict[str, Any]:
        path, _, query = str(entry["url"]).partition("?")
        self.requests.append((entry["method"], f"/v1.0{unquote(path)}"))
        if self.faults.throttled_batch:
            self.faults.throttled_batch -= 1
            error = GraphError(429, "TooManyRequests", "Too many requests").body()
            return {"id": entry["id"], "status": 429, "headers": {"Retry-After": "0"}, "body": error}
        status, body = 0, b""

        async def send(message: Any) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        scope = {
            **request.scope,
            "method": entry["method"],
            "path": f"/v1.0{unquote(path)}",
            "raw_path": f"/v1.0{path}".encode(),
            "query_string": query.encode(),
        }
        await self._app(scope, request.receive, send)
        headers = {"Content-Type": "application/json"}
        return {"id": entry["id"], "status": status, "headers": headers, "body": json.loads(body)}

    # SharePoint's own API

    async def _site_group(self, request: Request) -> Response:
        token = self._require(request, self.sharepoint_url)
        if not token.by_certificate:
            return JSONResponse({"error_description": "Unsupported app only token."}, 401)
        for site in self.tenant.sites.values():
            if urlsplit(site.url).path.strip("/") == request.path_params["site"]:
                claims = site.groups.get(request.path_params["number"])
                if claims is None:
                    return JSONResponse(
                        {"odata.error": {"code": "-2146232832", "message": {"value": "Not found"}}}, 404
                    )
                rows = [{"LoginName": claim, "PrincipalType": 1 if claim.startswith("i:") else 4} for claim in claims]
                return JSONResponse({"value": rows})
        return JSONResponse({"odata.error": {"code": "-1", "message": {"value": "Not found"}}}, 404)

    # Subscriptions

    async def _subscribe(self, request: Request) -> Response:
        self._require(request, self.url)
        body = await request.json()
        match = re.fullmatch(r"/?drives/([^/]+)/root", body.get("resource", ""))
        if match is None or match[1] not in self.tenant.drives or body.get("changeType") != "updated":
            raise GraphError(400, "ExtensionError", "The resource or its change type is not supported.")
        end = datetime.fromisoformat(body["expirationDateTime"])
        if not self.tenant.now() < end <= self.tenant.now() + MAX_SUBSCRIPTION:
            raise GraphError(400, "ExtensionError", "Subscription expiration can only be 42300 minutes in the future.")
        if len(body.get("clientState", "")) > 128:
            raise GraphError(400, "InvalidRequest", "clientState is limited to 128 characters.")
        if self.validate is not None:
            token = "Validation: Testing client application reachability"  # noqa: S105
            if await self.validate(body["notificationUrl"], token) != token:
                raise GraphError(400, "ValidationError", "Subscription validation request failed.")
        id_ = secrets.token_hex(16)
        self.subscriptions[id_] = Subscription(
            id_, match[1], body["notificationUrl"], body.get("clientState"), end, self.tenant.last_change
        )
        return JSONResponse({"id": id_, "applicationId": CLIENT, **body, "clientState": None}, 201)

    async def _subscription(self, request: Request) -> Response:
        self._require(request, self.url)
        subscription = self.subscriptions.get(request.path_params["id"])
        if subscription is None or subscription.expires_at <= self.tenant.now():
            raise GraphError(404, "ResourceNotFound", "The object was not found.")
        if request.method == "DELETE":
            del self.subscriptions[subscription.id]
            return Response(status_code=204)
        subscription.expires_at = datetime.fromisoformat((await request.json())["expirationDateTime"])
        return JSONResponse({"id": subscription.id, "expirationDateTime": _time(subscription.expires_at)})

    def notification(self, subscription: Subscription, **more: Any) -> bytes:
        entry = {
            "subscriptionId": subscription.id,
            "clientState": subscription.secret,
            "subscriptionExpirationDateTime": _time(subscription.expires_at),
            "resource": f"drives/{subscription.drive}/root",
            "tenantId": TENANT,
            "changeType": "updated",
            **more,
        }
        return json.dumps({"value": [entry]}).encode()

    def take(self) -> list[bytes]:
        """Return the bodies of the notifications since the last call. Several changes may share one."""
        sent = []
        for subscription in list(self.subscriptions.values()):
            if subscription.expires_at <= self.tenant.now():
                del self.subscriptions[subscription.id]
                continue
            newest = max((i.changed for i in self.tenant.items.values() if i.drive == subscription.drive), default=0)
            if newest > subscription.notified:
                subscription.notified = newest
                sent.append(self.notification(subscription))
        return sent


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _site(site: Site) -> dict[str, Any]:
    return {
        "id": site.id,
        "webUrl": site.url,
        "isPersonalSite": site.is_personal,
        "siteCollection": {"hostname": site.id.split(",")[0]},
    }


def _user(user: User) -> dict[str, Any]:
    return {
        "id": user.id,
        "mail": user.mail,
        "userPrincipalName": user.upn,
        "accountEnabled": user.is_enabled,
        "userType": user.type,
    }


def _oauth_error(code: str, number: int, text: str, status: int = 400) -> Response:
    description = f"AADSTS{number}: {text}"
    return JSONResponse({"error": code, "error_description": description, "error_codes": [number]}, status)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GraphError)
    return JSONResponse(error.body(), error.status, error.headers)
