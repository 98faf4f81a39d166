"""Permissions of Drive as access sets, and the members of their principals. What is not certain grants nothing.

https://developers.google.com/workspace/drive/api/reference/rest/v3/permissions. Readers come from the file itself where
it lists them, otherwise from as few requests as are exact. Members of groups and users of domains come from the Admin
SDK, members of shared drives from Drive.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from connectors.google_drive.client import Api, Json
from connectors.google_drive.options import GoogleDriveOptions
from connectors.source import Group
from connectors.web import Denied, Missing, Rejected
from pipeline.core.errors import Misconfigured
from pipeline.runtime.tasks import gather_or_cancel

Permission = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How sharing that names no account is taken; see GoogleDriveOptions."""

    anyone_tag: str | None = None
    domain_links: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    tags: frozenset[str] = frozenset()
    until: datetime | None = None
    """When the first of the grants ends, if any does."""


NOBODY = Access()


def drive_tag(drive: str) -> str:
    return f"drive:{drive}"


def tag_of(permission: Permission, sharing: Sharing, now: datetime) -> str | None:
    """Whom it lets read, as a tag; None: nobody, for certain or for lack of certainty."""
    if permission.get("deleted") or permission.get("view") is not None:
        return None  # a view opens less than the document: its metadata, or what was published of it
    if "expirationTime" in permission and _ended(permission, now):
        return None
    match permission.get("type"):
        case "user" | "group" as kind:
            address = str(permission.get("emailAddress") or "").lower()
            return f"{kind}:{address}" if "@" in address else None
        case "domain":
            found = permission.get("allowFileDiscovery") is True or sharing.domain_links
            domain = str(permission.get("domain") or "").lower()
            return f"domain:{domain}" if found and domain else None
        case "anyone":
            return sharing.anyone_tag
    return None


def _ended(permission: Permission, now: datetime) -> bool:
    end = ends(permission)
    return end is None or end <= now


def ends(permission: Permission) -> datetime | None:
    """None for one that does not end, and for an end that cannot be read."""
    try:
        moment = datetime.fromisoformat(str(permission.get("expirationTime", "")))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def own_access(permissions: Iterable[Permission], sharing: Sharing, now: datetime) -> Access:
    """Of a file outside of shared drives, or of a shared drive itself: each permission for itself."""
    granted = [(tag, ends(one)) for one in permissions if (tag := tag_of(one, sharing, now)) is not None]
    return Access(frozenset(tag for tag, _ in granted), min((end for _, end in granted if end), default=None))


def shared_access(
    file: Permission,
    permissions: Collection[Permission],
    members: Collection[Permission],
    drive: str,
    sharing: Sharing,
    now: datetime,
) -> Access:
    """Of a file in a shared drive: the drive's members as one tag where all of them reach it, else one by one.

    members: the drive's own permissions. Where a folder above has inheritance switched off, only organizers still come
    through; a drive whose members are all organizers therefore proves nothing, and is named one by one, lest a member
    added tomorrow be let in.
    """
    from_drive = {str(one.get("id")) for one in permissions if _comes_from(one, drive)}
    whole = {str(one.get("id")): one for one in members if tag_of(one, sharing, now) is not None}
    inherits = (
        file.get("inheritedPermissionsDisabled") is not True
        and whole.keys() <= from_drive
        and any(one.get("role") != "organizer" for one in whole.values())
    )
    if not inherits:
        return own_access(permissions, sharing, now)
    others = own_access((one for one in permissions if not _comes_from_drive_alone(one, drive)), sharing, now)
    return Access(others.tags | {drive_tag(drive)}, others.until)


def _details(permission: Permission) -> list[Mapping[str, Any]]:
    found = permission.get("permissionDetails")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _is_membership(detail: Mapping[str, Any], drive: str) -> bool:
    return detail.get("permissionType") == "member" and detail.get("inheritedFrom") in (drive, None)


def _comes_from(permission: Permission, drive: str) -> bool:
    return any(_is_membership(detail, drive) for detail in _details(permission))


def _comes_from_drive_alone(permission: Permission, drive: str) -> bool:
    details = _details(permission)
    return bool(details) and all(_is_membership(detail, drive) for detail in details)


Key = tuple[object, ...]


class Vanished(Exception):
    """The file was there a moment ago."""


class Readers:
    """Good for one page: what was read for one file serves others that must have the same, and no longer."""

    def __init__(self, api: Api, sharing: Sharing, now: Callable[[], datetime], unknown: Callable[[], None]) -> None:
        """unknown: told of a file whose sharing the account may not see."""
        self._api = api
        self._sharing = sharing
        self._now = now
        self._unknown = unknown
        self._read: dict[Key, list[Json]] = {}
        self._reading: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, file: Json) -> Access:
        """Raises Vanished."""
        drive = file.get("driveId")
        if not drive:
            if "permissions" not in file:  # Google shows them to those only who may share the file
                self._unknown()
                return NOBODY
            return own_access(file["permissions"], self._sharing, self._now())
        try:
            permissions = await self._list(str(file["id"]), self._key(file))
            members = await self._list(str(drive), ("drive", drive))
        except Missing as error:
            raise Vanished from error
        except (Denied, Rejected):
            self._unknown()
            return NOBODY
        return shared_access(file, permissions, members, str(drive), self._sharing, self._now())

    def _key(self, file: Json) -> Key:
        """Files of one folder that have no permissions of their own and are open to the same have the same ones, ends
        and origins included: all come down from that folder."""
        if file.get("hasAugmentedPermissions") is not False or not file.get("permissionIds"):
            return ("file", file["id"])
        return (
            "folder",
            file["driveId"],
            *(file.get("parents") or (file["id"],)),
            bool(file.get("inheritedPermissionsDisabled")),
            frozenset(file["permissionIds"]),
        )

    async def _list(self, id_: str, key: Key) -> Sequence[Json]:
        async with self._reading[key]:
            if key not in self._read:
                self._read[key] = await self._api.permissions(id_)
            return self._read[key]


AT_ONCE = 8
"""Groups asked for at the same time."""
_INACTIVE = frozenset({"SUSPENDED", "ARCHIVED"})


class Holders:
    """Whoever cannot be listed holds nothing, and that is told once an instance; what cannot be listed *now* raises."""

    def __init__(
        self, api: Api, options: GoogleDriveOptions, now: Callable[[], datetime], tell: Callable[[str, str], None]
    ) -> None:
        """tell: (code, message) of what somebody should look at."""
        self._api = api
        self._options = options
        self._sharing = Sharing(options.anyone_tag, options.domain_links)
        self._now = now
        self._tell = tell

    async def of(self, tags: Collection[str], *, inner: bool) -> AsyncIterator[Group]:
        """inner: also the groups that these are made of."""
        waiting, met = sorted(tags, reverse=True), set(tags)
        while waiting:
            some, waiting = waiting[-AT_ONCE:], waiting[:-AT_ONCE]
            for group in await gather_or_cancel(*(self._group(tag) for tag in reversed(some))):
                if group is None:
                    continue
                yield group
                if inner:
                    more = {tag for tag in group.of if not tag.startswith("user:")} - met
                    met |= more
                    waiting += sorted(more, reverse=True)

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
            self._tell("unknown_group", f"{kind}s that Google does not know, or not to us: nobody reads through them")
        except Denied as error:
            self._tell("directory", f"Google does not say who is in {kind}s ({error.code}): {_needs(self._options)}")
        except Misconfigured as error:
            if kind == "drive":
                raise
            self._tell("directory", str(error))
        return None

    async def _drive(self, tag: str, drive: str) -> Group:
        held = await self._api.permissions(drive)
        tags = {found for one in held if (found := tag_of(one, self._sharing, self._now())) is not None}
        people = {found.removeprefix("user:") for found in tags if found.startswith("user:")}
        return Group(tag, people, {found for found in tags if not found.startswith("user:")})

    async def _domain(self, tag: str, domain: str) -> Group | None:
        if domain not in self._options.domains:
            self._tell(
                "domain", "something is shared with a domain that is not among `domains`: nobody reads through it"
            )
            return None
        people = {
            str(one["primaryEmail"]).lower()
            async for one in self._api.users(domain)
            if not one.get("suspended") and not one.get("archived") and one.get("primaryEmail")
        }
        return Group(tag, people)

    async def _members(self, tag: str, address: str) -> Group | None:
        if not self._options.directory:
            self._tell("directory", "groups are not asked for (directory = false): nobody reads through them")
            return None
        people: set[str] = set()
        everybody = False
        async for one in self._api.members(address):
            everybody |= one.get("type") == "CUSTOMER"
            if _is_person(one):
                people.add(str(one["email"]).lower())
        # All users of the company, whom the list does not name: those of its domains that we may list are among them.
        return Group(tag, people, [f"domain:{domain}" for domain in self._options.domains] if everybody else ())


def _is_person(member: Json) -> bool:
    return bool(member.get("email")) and member.get("type") != "GROUP" and member.get("status") not in _INACTIVE


def _needs(options: GoogleDriveOptions) -> str:
    who = options.directory_subject or options.subject or "the service account"
    return f"{who} needs an administrator role with the privilege Groups > Read"
