"""Client of Drive v3 and of the Admin SDK's directory, which requests exactly the fields that are used.

https://developers.google.com/workspace/drive/api/reference/rest/v3
https://developers.google.com/workspace/admin/directory/reference/rest
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from connectors.google_drive.credentials import Account, Bearer
from connectors.google_drive.options import GoogleDriveOptions
from connectors.listings import moved_on
from connectors.source import CursorExpired
from connectors.web import Answered, Denied, Limits, Missing, Rejected, TooLarge, Web
from pipeline.core.errors import Deferred, Misconfigured, Retryable

SCOPES = "https://www.googleapis.com/auth/"
DRIVE_SCOPE = f"{SCOPES}drive.readonly"
MEMBER_SCOPE = f"{SCOPES}admin.directory.group.member.readonly"
USER_SCOPE = f"{SCOPES}admin.directory.user.readonly"

Json = dict[str, Any]

FOLDER = "application/vnd.google-apps.folder"
SHORTCUT = "application/vnd.google-apps.shortcut"
USER_FIELDS = "(displayName,emailAddress)"
PERMISSION_FIELDS = (
    "id,type,role,emailAddress,domain,expirationTime,deleted,allowFileDiscovery,view,"
    "permissionDetails(permissionType,inherited,inheritedFrom)"
)
SHARED_FILE_FIELDS = (
    f"id,name,mimeType,trashed,version,modifiedTime,md5Checksum,headRevisionId,size,webViewLink,owners{USER_FIELDS},"
    f"lastModifyingUser{USER_FIELDS},capabilities(canDownload),clientEncryptionDetails(encryptionState),"
    "shortcutDetails(targetId),driveId,parents,permissionIds,hasAugmentedPermissions,inheritedPermissionsDisabled"
)
"""The fields of a file in a shared drive, whose permissions Google shows to a request for them alone."""
FILE_FIELDS = f"{SHARED_FILE_FIELDS},permissions({PERMISSION_FIELDS})"
LOCATION_FIELDS = "id,mimeType,trashed,driveId,parents"
ALL_DRIVES = {"supportsAllDrives": "true"}

QUOTA_REASONS = frozenset({"dailyLimitExceeded", "quotaExceeded", "sharingRateLimitExceeded"})
"""Reasons of a 403 that are deferred too, in addition to those of ``connectors.web`` (guides/handle-errors)."""
QUOTA_SECONDS = 300.0
"""Delay after a spent quota: a day's quota does not return sooner."""

CONCURRENT_REQUESTS = 16
"""To Drive: 80 a second if each takes 0.2 s. A project may send 200 (Drive's usage limits)."""
PERMISSIONS_PER_PAGE = 100
MEMBERS_PER_PAGE = 200
USERS_PER_PAGE = 500
"""The largest page that each list offers."""


class Api:
    """The requests to Google. Raises the errors of Web, Deferred also for a spent quota, and CursorExpired for a page
    token that is refused."""

    def __init__(self, options: GoogleDriveOptions, name: str, limits: Limits) -> None:
        self._account = Account(options)
        self.email = self._account.email
        self.drive_auth = Bearer(self._account, DRIVE_SCOPE, options.subject)
        subject = options.directory_subject or options.subject
        scopes = [MEMBER_SCOPE] if options.directory or not options.all_my_drives else []
        scopes += [USER_SCOPE] if options.domains or options.all_my_drives else []
        self.directory_auth = Bearer(self._account, " ".join(scopes), subject)
        drive = f"{options.api_url.rstrip('/')}/drive/v3"
        self._drive = Web(drive, auth=self.drive_auth, name=name, limits=replace(limits, parallel=CONCURRENT_REQUESTS))
        directory = f"{options.directory_url.rstrip('/')}/admin/directory/v1"
        self._directory = Web(directory, auth=self.directory_auth, name=name, limits=limits)
        self._domains = options.domains
        self._users: dict[str, Api] = {}

    async def close(self) -> None:
        for client in (self._drive, self._directory):
            await client.close()

    def acting_as(self, user: str | None) -> Api:
        """Return a client that reads Drive on behalf of a user; None: this one. It is closed with this one."""
        if user is None:
            return self
        if user not in self._users:
            self._users[user] = other = copy.copy(self)
            other.drive_auth = Bearer(self._account, DRIVE_SCOPE, user)
            other._drive = self._drive.with_auth(other.drive_auth)
        return self._users[user]

    async def active_users(self) -> list[str]:
        """Return the addresses of all users of the domains, or of the company, who are neither suspended nor
        archived."""
        users: set[str] = set()
        for domain in self._domains or (None,):
            async for user in self.users(domain):
                if not user.get("suspended") and not user.get("archived") and user.get("primaryEmail"):
                    users.add(str(user["primaryEmail"]).lower())
        for gone in self._users.keys() - users:
            del self._users[gone]
        return sorted(users)

    # Files

    async def files(self, drive: str | None, q: str, fields: str, size: int, token: str | None) -> Json:
        """Return a page of the files of a shared drive, or of the account's own. Raises Retryable when Google says that
        it did not search everything: such a listing is incomplete."""
        scope = (
            {"corpora": "drive", "driveId": drive, "includeItemsFromAllDrives": "true", **ALL_DRIVES}
            if drive
            else {"corpora": "user", "includeItemsFromAllDrives": "false", **ALL_DRIVES}
        )
        params = {
            **scope,
            "q": q,
            "pageToken": token,
            "spaces": "drive",
            "fields": f"nextPageToken,incompleteSearch,files({fields})",
        }
        page = await self._page_of_size("files", params, size)
        if page.get("incompleteSearch"):
            raise Retryable("Google Drive could not search everything (incompleteSearch): the listing is not complete")
        return page

    async def documents(self, drive: str | None, q: str, size: int, token: str | None) -> Json:
        return await self.files(drive, q, SHARED_FILE_FIELDS if drive else FILE_FIELDS, size, token)

    async def has_children(self, folder: Mapping[str, Any]) -> bool:
        page = await self.files(folder.get("driveId"), f"'{folder['id']}' in parents", "id", 1, None)
        return bool(page.get("files"))

    async def file(self, id_: str, fields: str = FILE_FIELDS) -> Json:
        return await self._get(f"files/{_segment(id_)}", {"fields": fields, **ALL_DRIVES})

    async def permissions(self, id_: str) -> list[Json]:
        """Return all permissions of a file, or all members of a shared drive."""
        permissions: list[Json] = []
        token: str | None = None
        while True:
            params = {
                "fields": f"nextPageToken,permissions({PERMISSION_FIELDS})",
                "pageSize": PERMISSIONS_PER_PAGE,
                "pageToken": token,
                **ALL_DRIVES,
            }
            page = await self._get(f"files/{_segment(id_)}/permissions", params)
            permissions += page.get("permissions", [])
            token = moved_on(page.get("nextPageToken"), token, "Google Drive")
            if not token:
                return permissions

    async def export(self, id_: str, media_type: str) -> str:
        path, params = f"files/{_segment(id_)}/export", {"mimeType": media_type}
        return str(await self._with_instance_errors(self._drive.text("GET", path, params=params)))

    async def export_to(self, id_: str, media_type: str, to: Path, max_bytes: int) -> None:
        path, params = f"files/{_segment(id_)}/export", {"mimeType": media_type}
        await self._with_instance_errors(self._drive.download(path, to, max_bytes=max_bytes, params=params))

    async def download(self, id_: str, to: Path, max_bytes: int) -> None:
        params = {"alt": "media", **ALL_DRIVES}
        await self._with_instance_errors(
            self._drive.download(f"files/{_segment(id_)}", to, max_bytes=max_bytes, params=params)
        )

    # Shared drives

    async def drives(self) -> list[str]:
        ids: list[str] = []
        token: str | None = None
        while True:
            page = await self._get(
                "drives", {"fields": "nextPageToken,drives(id)", "pageSize": 100, "pageToken": token}
            )
            ids += [str(drive["id"]) for drive in page.get("drives", [])]
            token = moved_on(page.get("nextPageToken"), token, "Google Drive")
            if not token:
                return ids

    async def drive(self, id_: str) -> Json:
        return await self._get(f"drives/{_segment(id_)}", {"fields": "id,name"})

    # Changes

    async def start_page_token(self, drive: str | None) -> Json:
        """Return ``{"startPageToken": …}``, from which all later changes can be read."""
        return await self._get("changes/startPageToken", {"driveId": drive, "fields": "startPageToken", **ALL_DRIVES})

    async def changes(self, drive: str | None, token: str, size: int) -> Json:
        """Return a page of the changes of a shared drive, or of the account's own files."""
        params = {
            "driveId": drive,
            "pageToken": token,
            "includeRemoved": "true",
            "spaces": "drive",
            "includeItemsFromAllDrives": "true" if drive else "false",
            **ALL_DRIVES,
            "fields": f"nextPageToken,newStartPageToken,changes(changeType,removed,fileId,driveId,file({FILE_FIELDS}))",
        }
        return await self._page_of_size("changes", params, size)

    async def watch(self, drive: str | None, token: str, channel: Mapping[str, Any]) -> Json:
        params = {
            "driveId": drive,
            "pageToken": token,
            "includeRemoved": "true",
            "spaces": "drive",
            "includeItemsFromAllDrives": "true" if drive else "false",
            **ALL_DRIVES,
        }
        granted: Json = await self._with_instance_errors(
            self._drive.json("POST", "changes/watch", params=params, json=dict(channel))
        )
        return granted

    async def stop(self, channel: str, resource: str) -> None:
        body = {"id": channel, "resourceId": resource}
        await self._with_instance_errors(self._drive.json("POST", "channels/stop", json=body, ok=(200, 204)))

    # Directory

    async def members(self, group: str) -> AsyncIterator[Json]:
        """Yield the members of a group, with those of the groups in it."""
        params = {"includeDerivedMembership": "true", "maxResults": MEMBERS_PER_PAGE}
        async for member in self._directory_list(f"groups/{_segment(group)}/members", "members", params):
            yield member

    async def users(self, domain: str | None) -> AsyncIterator[Json]:
        """Yield the users of a domain; None: of the whole company."""
        whose = {"customer": "my_customer"} if domain is None else {"domain": domain}
        async for user in self._directory_list("users", "users", {**whose, "maxResults": USERS_PER_PAGE}):
            yield user

    async def _directory_list(self, path: str, name: str, params: Mapping[str, Any]) -> AsyncIterator[Json]:
        token: str | None = None
        while True:
            page = await self._with_instance_errors(
                self._directory.json("GET", path, params={**params, "pageToken": token})
            )
            for entry in page.get(name, []):
                yield entry
            token = moved_on(page.get("nextPageToken"), token, "Google Drive")
            if not token:
                return

    # Requests

    async def _get(self, path: str, params: Mapping[str, Any]) -> Json:
        response: Json = await self._with_instance_errors(self._drive.json("GET", path, params=params))
        return response

    async def _page_of_size(self, path: str, params: Mapping[str, Any], size: int) -> Json:
        """Return a page of at most ``size`` entries, or of fewer if the response is too large: files that are shared
        with very many people make large pages."""
        while True:
            try:
                return await self._page(path, {**params, "pageSize": size})
            except TooLarge:
                if size == 1:
                    raise
                size = max(1, size // 4)

    async def _page(self, path: str, params: Mapping[str, Any]) -> Json:
        try:
            return await self._get(path, params)
        except (Rejected, Missing) as error:
            if params.get("pageToken") and (error.status == 410 or (error.status == 400 and error.code == "invalid")):
                raise CursorExpired("Google Drive no longer knows the page token") from error
            raise

    async def _with_instance_errors(self, request: Any) -> Any:
        """Await a request, and raise Deferred or Misconfigured for errors that concern the whole instance."""
        try:
            return await request
        except Denied as error:
            if error.code in QUOTA_REASONS:
                raise Deferred(f"Google's quota is spent ({error.code})", retry_after=QUOTA_SECONDS) from error
            if (advice := misconfiguration(error)) is not None:
                raise Misconfigured(advice) from error
            raise


def misconfiguration(error: Answered) -> str | None:
    """Return what an operator has to do before any request can succeed, or None."""
    if error.code == "accessNotConfigured":
        return (
            "the API is not enabled in the service account's project: enable the Google Drive API and the Admin SDK API"
        )
    if error.code in ("insufficientPermissions", "ACCESS_TOKEN_SCOPE_INSUFFICIENT"):
        return f"the token lacks a scope: {DRIVE_SCOPE} (and {MEMBER_SCOPE} for groups) must be granted"
    if error.status == 401:
        return (
            "Google rejects all tokens of this service account (authError): check that the account is enabled and the"
            " user is not suspended"
        )
    return None


def _segment(text: str) -> str:
    return quote(text, safe="")
