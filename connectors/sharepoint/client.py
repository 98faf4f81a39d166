"""Client of Microsoft Graph v1.0 and of SharePoint's own REST API, and their access tokens.

https://learn.microsoft.com/en-us/graph/api/overview
https://learn.microsoft.com/en-us/entra/identity-platform/v2-oauth2-client-creds-grant-flow
https://learn.microsoft.com/en-us/sharepoint/dev/sp-add-ins/users-groups-and-roles-rest-api-reference
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from connectors.listings import moved_on
from connectors.sharepoint.options import SharePointOptions
from connectors.source import CursorExpired
from connectors.web import Answered, Denied, Limits, Missing, Rejected, Web
from connectors.web.token import RenewedToken
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.tasks import gather_or_cancel

Json = dict[str, Any]

ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
ASSERTION_SECONDS = 600
"""Entra recommends 5 to 10 minutes (identity-platform/certificate-credentials)."""

ITEM_FIELDS = (
    "id,name,size,eTag,webUrl,file,folder,root,package,remoteItem,malware,deleted,shared,publication,"
    "lastModifiedDateTime,lastModifiedBy,createdBy,parentReference,sharepointIds"
)
SITE_FIELDS = "id,webUrl,isPersonalSite,siteCollection"
DRIVE_FIELDS = "id,name,driveType,webUrl,sharePointIds"
USER_FIELDS = "id,mail,userPrincipalName,accountEnabled,userType"
PREFER_DELTA = "deltashowremovedasdeleted, deltatraversepermissiongaps, deltashowsharingchanges, hierarchicalsharing"
"""The headers for scanning permissions (driveitem-delta, "Scanning permissions hierarchies"). Graph ignores those that
the application's permissions do not allow."""

BATCH_REQUESTS = 20
"""The most requests in one $batch (graph/json-batching)."""
DIRECTORY_PAGE = 999
"""The largest page of users and members."""


class Credential:
    """The credential of an application. Its repr shows the client id only."""

    def __init__(self, options: SharePointOptions) -> None:
        """Raises Misconfigured without quoting the credential."""
        self.client_id = options.client_id
        self.token_url = f"{options.login_url}/{options.tenant_id}/oauth2/v2.0/token"
        self._secret = options.client_secret
        self._file = options.federated_token_file
        self._key: RSAPrivateKey | None = None
        self._thumbprint = ""
        if options.certificate is not None:
            self._key, self._thumbprint = _certificate(options.certificate.get_secret_value())

    def __repr__(self) -> str:
        return f"Credential({self.client_id!r})"

    @property
    def is_certificate(self) -> bool:
        return self._key is not None

    async def form(self) -> dict[str, str]:
        """Return the fields of a token request that prove who requests it. Raises Misconfigured."""
        if self._secret is not None:
            return {"client_secret": self._secret.get_secret_value()}
        return {"client_assertion_type": ASSERTION_TYPE, "client_assertion": await self._assertion()}

    async def _assertion(self) -> str:
        if self._key is None:
            assert self._file is not None
            try:
                return (await asyncio.to_thread(self._file.read_text)).strip()
            except (OSError, UnicodeDecodeError) as error:
                raise Misconfigured(f"{self._file} cannot be read ({type(error).__name__})") from None
        now = int(time.time())
        claims = {
            "aud": self.token_url,
            "iss": self.client_id,
            "sub": self.client_id,
            "jti": str(uuid.uuid4()),
            "nbf": now - 60,
            "exp": now + ASSERTION_SECONDS,
        }
        return jwt.encode(claims, self._key, algorithm="PS256", headers={"x5t#S256": self._thumbprint})


def _certificate(text: str) -> tuple[RSAPrivateKey, str]:
    """Return the private key, and the certificate's SHA-256 thumbprint in base64url."""
    pem = text
    if "-----BEGIN" not in text:
        try:
            pem = Path(text).read_text()
        except (OSError, ValueError, UnicodeDecodeError):
            raise Misconfigured("the certificate is neither PEM nor the path of a file that can be read") from None
    key: object = None
    certificate: x509.Certificate | None = None
    try:
        key = load_pem_private_key(pem.encode(), None)
        certificate = x509.load_pem_x509_certificate(pem.encode())
    except (ValueError, TypeError):
        pass  # the error's text could hold the key
    if not isinstance(key, RSAPrivateKey) or certificate is None:
        raise Misconfigured(
            "the certificate is not PEM with an RSA private key (without password) and the certificate: write both"
            " into one file"
        )
    digest = hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()
    return key, base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class AppToken(RenewedToken):
    """The access tokens of an application for one service (client credentials)."""

    def __init__(self, credential: Credential, audience: str, name: str, limits: Limits) -> None:
        """audience: the service's address."""
        super().__init__()
        self._credential = credential
        self._audience = audience
        parts = urlsplit(credential.token_url)
        self._path = parts.path
        self._web = Web(f"{parts.scheme}://{parts.netloc}", name=name, limits=limits)

    def __repr__(self) -> str:
        return f"AppToken({self._credential!r}, {self._audience!r})"

    async def close(self) -> None:
        await self._web.close()

    async def request_token(self) -> tuple[str, float]:
        form = {
            "grant_type": "client_credentials",
            "client_id": self._credential.client_id,
            "scope": f"{self._audience}/.default",
            **await self._credential.form(),
        }
        try:
            answer = await self._web.json("POST", self._path, data=form)
        except Answered as error:
            raise Misconfigured(self._refusal(error)) from None
        if not isinstance(answer, dict) or not answer.get("access_token"):
            raise Retryable("Entra's token endpoint answered without a token")
        return str(answer["access_token"]), float(answer.get("expires_in", 3599))

    def _refusal(self, error: Answered) -> str:
        who = f"application {self._credential.client_id}"
        if error.code == "invalid_client":
            return f"{who} is refused (invalid_client): its secret or certificate is wrong, has expired or was removed"
        if error.code == "unauthorized_client":
            return f"{who} does not exist in this tenant (unauthorized_client): check tenant_id and client_id"
        if error.code in ("invalid_request", "invalid_tenant"):
            return f"{who} gets no access token ({error.code}): check tenant_id"
        return f"{who} gets no access token (answer {error.status}, {error.code or 'no code'})"


class Graph:
    """The requests to Microsoft Graph. Raises the errors of Web, and CursorExpired for a delta link that Graph no
    longer knows."""

    def __init__(self, options: SharePointOptions, credential: Credential, name: str, limits: Limits) -> None:
        self.auth = AppToken(credential, options.graph_url, name, limits)
        self._web = Web(f"{options.graph_url}/v1.0", auth=self.auth, also=options.hosts, name=name, limits=limits)

    async def close(self) -> None:
        await self._web.close()
        await self.auth.close()

    # Sites and drives

    async def site(self, address: str) -> Json:
        """Return the site at this address."""
        parts = urlsplit(address)
        path = f":{quote(parts.path)}" if parts.path.strip("/") else ""
        return await self._get(f"sites/{parts.netloc}{path}", {"$select": SITE_FIELDS})

    def all_sites(self) -> AsyncIterator[Json]:
        return self._list("sites/getAllSites", {"$select": SITE_FIELDS})

    def drives(self, site: str) -> AsyncIterator[Json]:
        return self._list(f"sites/{_segment(site)}/drives", {"$select": DRIVE_FIELDS})

    async def onedrive(self, user: str) -> Json:
        return await self._get(f"{_user_path(user)}/drive", {"$select": DRIVE_FIELDS})

    async def pages_drive(self, site: str) -> Json | None:
        """Return the library that holds the pages of a site, or None. Libraries of the system are listed only where
        ``system`` is selected."""
        async for entry in self._list(f"sites/{_segment(site)}/lists", {"$select": "id,list,system"}):
            if (entry.get("list") or {}).get("template") == "webPageLibrary":
                path = f"sites/{_segment(site)}/lists/{_segment(entry['id'])}/drive"
                return await self._get(path, {"$select": DRIVE_FIELDS})
        return None

    # Items

    async def delta(self, drive: str, link: str | None, size: int) -> Json:
        """Return a page of a drive's log of changes.

        link: from a page before, of which it is the unchanged ``@odata.nextLink`` or ``@odata.deltaLink``; None: all
        items, from the beginning.
        """
        if link:
            return await self._delta(link, {})
        return await self._delta(f"drives/{_segment(drive)}/root/delta", {"$select": ITEM_FIELDS, "$top": size})

    async def delta_now(self, drive: str) -> str:
        """Return the link by which everything that happens after this call can be read."""
        page = await self._delta(f"drives/{_segment(drive)}/root/delta", {"$select": ITEM_FIELDS, "token": "latest"})
        link = page.get("@odata.deltaLink")
        if not link:
            raise Retryable("Microsoft Graph returned no delta link for token=latest")
        return str(link)

    async def _delta(self, path: str, params: Mapping[str, Any]) -> Json:
        try:
            page: Json = await self._web.json("GET", path, params=params, headers={"prefer": PREFER_DELTA})
        except (Missing, Rejected) as error:
            if error.status == 410 or (error.status == 400 and not params):  # 400: the token of a link is damaged
                raise CursorExpired("Microsoft Graph no longer knows the delta link") from error
            raise
        return page

    async def item(self, drive: str, item: str) -> Json:
        return await self._get(_item_path(drive, item), {"$select": ITEM_FIELDS})

    async def permissions(self, drive: str, items: Sequence[str]) -> list[list[Json] | Answered]:
        """Return the permissions of each item, inherited ones too, or the error that Graph answers for it."""
        pages = await self._batch([f"{_item_path(drive, item)}/permissions" for item in items])
        return [page if isinstance(page, Answered) else await self._all(page) for page in pages]

    async def download(self, drive: str, item: str, to: Path, max_bytes: int) -> None:
        """Download a file. Graph redirects to a host of SharePoint with an address that is itself a credential."""
        await self._web.download(f"{_item_path(drive, item)}/content", to, max_bytes=max_bytes)

    async def page(self, site: str, page: str) -> Json:
        """Return a site page with its content."""
        path = f"sites/{_segment(site)}/pages/{_segment(page)}/microsoft.graph.sitePage"
        return await self._get(path, {"$expand": "canvasLayout"})

    # Directory

    def transitive_members(self, group: str) -> AsyncIterator[Json]:
        params = {"$select": USER_FIELDS, "$top": DIRECTORY_PAGE}
        return self._list(f"groups/{_segment(group)}/transitiveMembers", params)

    def owners(self, group: str) -> AsyncIterator[Json]:
        return self._list(f"groups/{_segment(group)}/owners", {"$select": USER_FIELDS, "$top": DIRECTORY_PAGE})

    def members_of_tenant(self) -> AsyncIterator[Json]:
        """Yield all users that are not guests and may sign in."""
        params = {"$select": USER_FIELDS, "$top": DIRECTORY_PAGE, "$filter": "accountEnabled eq true"}
        return self._list("users", params)

    async def users(self, names: Sequence[str]) -> list[Json | Answered]:
        """Return users by their id or user principal name, or the error that Graph answers for one."""
        return await self._batch([f"{_user_path(name)}?$select={USER_FIELDS}" for name in names])

    # Subscriptions

    async def subscribe(self, body: Mapping[str, Any]) -> Json:
        headers = {"prefer": "includesecuritywebhooks"}  # changes of permissions too (onedrive scan-guidance)
        made: Json = await self._web.json("POST", "subscriptions", json=dict(body), headers=headers, ok=(200, 201))
        return made

    async def renew_subscription(self, id_: str, expires: str) -> Json:
        body = {"expirationDateTime": expires}
        renewed: Json = await self._web.json("PATCH", f"subscriptions/{_segment(id_)}", json=body)
        return renewed

    async def unsubscribe(self, id_: str) -> None:
        await self._web.json("DELETE", f"subscriptions/{_segment(id_)}", ok=(200, 204))

    # Requests

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Json:
        answer: Json = await self._web.json("GET", path, params=params)
        return answer

    async def _list(self, path: str, params: Mapping[str, Any]) -> AsyncIterator[Json]:
        page, link = await self._get(path, params), None
        while True:
            for entry in page.get("value", ()):
                yield entry
            link = moved_on(page.get("@odata.nextLink"), link, "Microsoft Graph")
            if not link:
                return
            page = await self._get(str(link))

    async def _all(self, page: Json) -> list[Json]:
        """Return the entries of a page and of those after it."""
        entries: list[Json] = list(page.get("value", ()))
        link = page.get("@odata.nextLink")
        while link:
            page = await self._get(str(link))
            entries += page.get("value", ())
            link = moved_on(page.get("@odata.nextLink"), link, "Microsoft Graph")
        return entries

    async def _batch(self, paths: Sequence[str]) -> list[Json | Answered]:
        """Send GET requests, as many as possible in one. One that Graph cannot answer now is sent again by itself, so
        that rate limits and failures are waited out as for every other request."""
        batches = [paths[start : start + BATCH_REQUESTS] for start in range(0, len(paths), BATCH_REQUESTS)]
        return [answer for answers in await gather_or_cancel(*map(self._one_batch, batches)) for answer in answers]

    async def _one_batch(self, paths: Sequence[str]) -> list[Json | Answered]:
        requests = [{"id": str(n), "method": "GET", "url": f"/{path}"} for n, path in enumerate(paths)]
        responses = (await self._web.json("POST", "$batch", json={"requests": requests})).get("responses", ())
        by_id = {str(response.get("id")): response for response in responses}
        answers: list[Json | Answered] = []
        for number, path in enumerate(paths):
            response = by_id.get(str(number)) or {}
            if response.get("status") == 200 and isinstance(response.get("body"), dict):
                answers.append(response["body"])
                continue
            try:
                answers.append(await self._get(path))
            except (Missing, Denied, Rejected) as error:
                if error.status == 401:
                    raise
                answers.append(error)
        return answers


class SiteGroups:
    """Reads the members of site groups from SharePoint's own API, which Graph does not offer."""

    def __init__(self, options: SharePointOptions, credential: Credential, name: str, limits: Limits) -> None:
        self._options = options
        self._credential = credential
        self._name = name
        self._limits = limits
        self._clients: dict[str, tuple[Web, AppToken]] = {}

    async def close(self) -> None:
        for web, token in self._clients.values():
            await web.close()
            await token.close()

    async def members(self, site_url: str, group: str) -> list[Json]:
        """Return the members of a group of the site at this address. Raises Denied, too, for an address that is not
        one of SharePoint's hosts: no token is sent there."""
        parts = urlsplit(site_url)
        web = self._client(site_url)
        path = f"{parts.path.rstrip('/')}/_api/web/sitegroups/getbyid({int(group)})/users"
        link: str | None = path.lstrip("/")
        params: Mapping[str, Any] | None = {"$select": "LoginName,PrincipalType"}
        members: list[Json] = []
        while link:
            page = await web.json("GET", link, params=params, headers={"accept": "application/json;odata=nometadata"})
            members += page.get("value", ())
            link, params = page.get("odata.nextLink"), None
        return members

    def _client(self, site_url: str) -> Web:
        parts = urlsplit(site_url)
        base = self._options.sharepoint_url or f"https://{parts.netloc}"
        if self._options.sharepoint_url is None and not self._is_host(parts.scheme, parts.netloc.lower()):
            raise Misconfigured("a site's address is not a host of SharePoint (hosts): no token is sent there")
        if base not in self._clients:
            token = AppToken(self._credential, base, self._name, self._limits)
            self._clients[base] = Web(base, auth=token, name=self._name, limits=self._limits), token
        return self._clients[base][0]

    def _is_host(self, scheme: str, host: str) -> bool:
        return scheme == "https" and any(
            host.endswith(entry) if entry.startswith(".") else host == entry for entry in self._options.hosts
        )


def misconfiguration(error: Answered) -> str | None:
    """Return what an operator has to do before any request can succeed, or None."""
    if error.status == 401:
        return "Microsoft Graph rejects all tokens of this application: check that it is enabled in this tenant"
    return None


def _segment(text: object) -> str:
    return quote(str(text), safe=",!")


def _item_path(drive: str, item: str) -> str:
    return f"drives/{_segment(drive)}/items/{_segment(item)}"


def _user_path(name: str) -> str:
    """Return the path of a user. A user principal name that begins with $ needs the form with parentheses
    (graph/api/user-get)."""
    if name.startswith("$"):
        return f"users('{quote(name.replace(chr(39), chr(39) * 2), safe='')}')"
    return f"users/{quote(name, safe='')}"


GUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)
