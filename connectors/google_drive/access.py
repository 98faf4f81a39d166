"""Converts permissions of Drive to access sets, and reads the members of their principals. What is uncertain grants
nothing.

https://developers.google.com/workspace/drive/api/reference/rest/v3/permissions. Readers come from the file itself where
it lists them, otherwise from as few requests as are exact. Members of groups and users of domains come from the Admin
SDK, members of shared drives from Drive.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from connectors.google_drive.client import Api, Json
from connectors.google_drive.options import GoogleDriveOptions
from connectors.source import Group, GroupPage
from connectors.tag_queue import TagQueue
from connectors.web import Denied, Missing, Rejected
from pipeline.core.errors import Misconfigured
from pipeline.runtime.tasks import gather_or_cancel

Permission = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sharing that names no account is treated; see GoogleDriveOptions."""

    anyone_tag: str | None = None
    domain_links: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """An access set, and how long it is valid."""

    tags: frozenset[str] = frozenset()
    expires_at: datetime | None = None
    """When the first of its grants expires, if any does."""


NO_ACCESS = Access()


def drive_tag(drive: str) -> str:
    return f"drive:{drive}"


def tag_of(permission: Permission, sharing: Sharing, now: datetime) -> str | None:
    """Return the tag of those who may read by this permission; None: nobody, or it is uncertain."""
    if permission.get("deleted") or permission.get("view") is not None:
        return None  # a view grants less than the document: its metadata, or its published version
    if "expirationTime" in permission and _is_expired(permission, now):
        return None
    match permission.get("type"):
        case "user" | "group" as kind:
            address = str(permission.get("emailAddress") or "").lower()
            return f"{kind}:{address}" if "@" in address else None
        case "domain":
            is_open = permission.get("allowFileDiscovery") is True or sharing.domain_links
            domain = str(permission.get("domain") or "").lower()
            return f"domain:{domain}" if is_open and domain else None
        case "anyone":
            return sharing.anyone_tag
    return None


def _is_expired(permission: Permission, now: datetime) -> bool:
    end = expiry(permission)
    return end is None or end <= now


def expiry(permission: Permission) -> datetime | None:
    """Return when a permission expires; None if it does not, or if the time cannot be parsed."""
    try:
        moment = datetime.fromisoformat(str(permission.get("expirationTime", "")))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def own_access(permissions: Iterable[Permission], sharing: Sharing, now: datetime) -> Access:
    """Return the access of a file outside of shared drives, or of a shared drive itself: each permission counts by
    itself."""
    granted = [(tag, expiry(grant)) for grant in permissions if (tag := tag_of(grant, sharing, now)) is not None]
    return Access(frozenset(tag for tag, _ in granted), min((end for _, end in granted if end), default=None))


def shared_access(
    file: Permission,
    permissions: Collection[Permission],
    members: Collection[Permission],
    drive: str,
    sharing: Sharing,
    now: datetime,
) -> Access:
    """Return the access of a file in a shared drive: one tag for the drive's members if all of them may read it, else a
    tag for each.

    members: the drive's own permissions. Where a folder above has inheritance switched off, only organizers still
    inherit. If all members of a drive are organizers, it is therefore uncertain whether a folder restricts access, and
    each gets a tag: a member with another role, who is added later, may not be let in.
    """
    from_drive = {str(grant.get("id")) for grant in permissions if _is_inherited(grant, drive)}
    whole = {str(member.get("id")): member for member in members if tag_of(member, sharing, now) is not None}
    inherits = (
        file.get("inheritedPermissionsDisabled") is not True
        and whole.keys() <= from_drive
        and any(member.get("role") != "organizer" for member in whole.values())
    )
    if not inherits:
        return own_access(permissions, sharing, now)
    others = own_access((grant for grant in permissions if not _is_only_inherited(grant, drive)), sharing, now)
    return Access(others.tags | {drive_tag(drive)}, others.expires_at)


def _details(permission: Permission) -> list[Mapping[str, Any]]:
    details = permission.get("permissionDetails")
    return [detail for detail in details if isinstance(detail, Mapping)] if isinstance(details, list) else []


def _is_membership(detail: Mapping[str, Any], drive: str) -> bool:
    return detail.get("permissionType") == "member" and detail.get("inheritedFrom") in (drive, None)


def _is_inherited(permission: Permission, drive: str) -> bool:
    return any(_is_membership(detail, drive) for detail in _details(permission))


def _is_only_inherited(permission: Permission, drive: str) -> bool:
    details = _details(permission)
    return bool(details) and all(_is_membership(detail, drive) for detail in details)


Key = tuple[object, ...]


class Vanished(Exception):
    """A file was deleted while it was being read."""


class AccessReader:
    """Reads the access of the files of one page, or of a listing. What files must have in common is read once: the
    access of any of them may therefore be as old as ``began``."""

    def __init__(self, sharing: Sharing, now: Callable[[], datetime], on_hidden: Callable[[], None]) -> None:
        """on_hidden: called for a file whose sharing the account may not see."""
        self.began = datetime.now(UTC)
        self._sharing = sharing
        self._now = now
        self._on_hidden = on_hidden
        self._members: dict[str, list[Json]] = {}
        """The permissions of shared drives."""
        self._accesses: dict[Key, Access] = {}
        self._locks: defaultdict[object, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def access(self, file: Json, api: Api) -> Access:
        """Return a file's access. api: the client that reads it. Raises Vanished."""
        drive = file.get("driveId")
        if not drive:
            if "permissions" not in file:  # Google shows them only to accounts that may share the file
                self._on_hidden()
                return NO_ACCESS
            return own_access(file["permissions"], self._sharing, self._now())
        try:
            if (key := _shared_key(file)) is None:
                return await self._read(file, api)
            async with self._locks[key]:
                if key not in self._accesses:
                    self._accesses[key] = await self._read(file, api)
                return self._accesses[key]
        except Missing as error:
            raise Vanished from error
        except (Denied, Rejected):
            self._on_hidden()
            return NO_ACCESS

    async def _read(self, file: Json, api: Api) -> Access:
        drive = str(file["driveId"])
        permissions = await api.permissions(str(file["id"]))
        async with self._locks[drive]:
            if drive not in self._members:
                self._members[drive] = await api.permissions(drive)
        return shared_access(file, permissions, self._members[drive], drive, self._sharing, self._now())


def _shared_key(file: Json) -> Key | None:
    """Return the same key for files that have the same permissions, including expiry and origin: files of one folder
    that have no permissions of their own and the same ids inherit all of them from that folder. None: the file may have
    permissions of its own."""
    if file.get("hasAugmentedPermissions") is not False or not file.get("permissionIds"):
        return None
    return (
        file["driveId"],
        *(file.get("parents") or (file["id"],)),
        bool(file.get("inheritedPermissionsDisabled")),
        frozenset(file["permissionIds"]),
    )


MAX_CONCURRENT_GROUPS = 8
"""Groups whose members are read at the same time."""
_INACTIVE = frozenset({"SUSPENDED", "ARCHIVED"})


class Memberships:
    """Reads the members of tags. A group that may not be listed has no members, which is reported once for an instance;
    one that cannot be listed at the moment raises Retryable."""

    def __init__(
        self, api: Api, options: GoogleDriveOptions, now: Callable[[], datetime], report: Callable[[str, str], None]
    ) -> None:
        """report: called with the code and message of a problem."""
        self._api = api
        self._options = options
        self._sharing = Sharing(options.anyone_tag, options.domain_links)
        self._now = now
        self._report = report

    async def pages(self, queue: TagQueue, *, nested: bool) -> AsyncIterator[GroupPage]:
        """Yield the groups of these tags. nested: also the groups within them."""
        while batch := queue.take(MAX_CONCURRENT_GROUPS):
            groups = [group for group in await gather_or_cancel(*map(self._group, batch)) if group is not None]
            if nested:
                queue.add({tag for group in groups for tag in group.of if not tag.startswith("user:")})
            yield GroupPage(groups, queue.cursor)

    async def _group(self, tag: str) -> Group | None:
        kind, _, name = tag.partition(":")
        try:
            if kind == "drive":
                return await self._drive(tag, name)
            if kind == "domain":
                return await self._domain(tag, name)
            if kind == "group":
                return await self._members(tag, name)
        except Missing:
            self._report(
                "unknown_group", f"{kind}s that Google does not show to the account: they give access to nobody"
            )
        except Denied as error:
            self._report(
                "directory",
                f"Google does not list the members of {kind}s ({error.code}): {_required_role(self._options)}",
            )
        except Misconfigured as error:
            if kind == "drive":
                raise
            self._report("directory", str(error))
        return None

    async def _drive(self, tag: str, drive: str) -> Group:
        permissions = await self._api.permissions(drive)
        now = self._now()
        members = {member for grant in permissions if (member := tag_of(grant, self._sharing, now)) is not None}
        people = {member.removeprefix("user:") for member in members if member.startswith("user:")}
        return Group(tag, people, {member for member in members if not member.startswith("user:")})

    async def _domain(self, tag: str, domain: str) -> Group | None:
        if domain not in self._options.domains:
            self._report(
                "domain", "a file is shared with a domain that is not in `domains`: this gives access to nobody"
            )
            return None
        people = {
            str(user["primaryEmail"]).lower()
            async for user in self._api.users(domain)
            if not user.get("suspended") and not user.get("archived") and user.get("primaryEmail")
        }
        return Group(tag, people)

    async def _members(self, tag: str, address: str) -> Group | None:
        if not self._options.directory:
            self._report(
                "directory", "the members of groups are not read (directory = false): groups give access to nobody"
            )
            return None
        people: set[str] = set()
        everybody = False
        async for member in self._api.members(address):
            everybody |= member.get("type") == "CUSTOMER"
            if _is_person(member):
                people.add(str(member["email"]).lower())
        # CUSTOMER is all users of the company, without their names: the users of the configured domains are among them.
        return Group(tag, people, [f"domain:{domain}" for domain in self._options.domains] if everybody else ())


def _is_person(member: Json) -> bool:
    return bool(member.get("email")) and member.get("type") != "GROUP" and member.get("status") not in _INACTIVE


def _required_role(options: GoogleDriveOptions) -> str:
    account = options.directory_subject or options.subject or "the service account"
    return f"{account} needs an administrator role with the privilege Groups > Read"
