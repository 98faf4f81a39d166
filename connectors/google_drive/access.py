"""Permissions of Drive → tags. Pure. What is not certain gives nobody anything.

https://developers.google.com/workspace/drive/api/reference/rest/v3/permissions
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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
    file: Permission, permissions: Collection[Permission], members: Collection[Permission], drive: str,
    sharing: Sharing, now: datetime,
) -> Access:  # fmt: skip
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
