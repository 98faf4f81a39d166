"""The content of a fake Microsoft 365 tenant: users, groups, sites with their groups, drives, items, and their log of
changes. It knows nothing of HTTP.

Sharing and the log of changes are as Microsoft describes them:
https://learn.microsoft.com/en-us/graph/api/driveitem-delta
https://learn.microsoft.com/en-us/sharepoint/dev/solution-guidance/modern-experience-customizations-provisioning-sites
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

HOST = "contoso.sharepoint.com"
TENANT = "0a1b2c3d-0000-4000-8000-00000000000a"
START = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass(slots=True)
class User:
    id: str
    mail: str | None
    upn: str
    is_enabled: bool = True
    type: str = "Member"


@dataclass(slots=True)
class EntraGroup:
    id: str
    is_unified: bool = False
    """It is a Microsoft 365 group, which has owners that sites know."""
    members: set[str] = field(default_factory=set)
    """Ids of users and groups."""
    owners: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Site:
    id: str
    url: str
    is_personal: bool = False
    is_locked: bool = False
    groups: dict[int, list[str]] = field(default_factory=dict)
    """The claims of the members of its groups, by number."""
    drives: list[str] = field(default_factory=list)
    pages_drive: str | None = None

    @property
    def collection(self) -> str:
        return self.id.split(",")[1]


@dataclass(slots=True, kw_only=True)
class Grant:
    """A permission of an item."""

    role: str = "read"
    user: str | None = None
    """The id of a user."""
    group: str | None = None
    """The id of a group of Entra."""
    owners: str | None = None
    """The id of a group whose owners it is for."""
    site_group: int | None = None
    claim: str | None = None
    """A claim without an object of Entra, such as the one for everyone."""
    link: str | None = None
    """The scope of a sharing link."""
    link_users: tuple[str, ...] = ()
    expires: datetime | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True, kw_only=True)
class Item:
    id: str
    drive: str
    parent: str | None
    name: str
    is_folder: bool = False
    content: bytes = b""
    mime_type: str = "text/plain"
    grants: list[Grant] | None = None
    """None: the permissions are inherited."""
    changed: int = 0
    """The number of its last change."""
    shared: int = 0
    """The number of the last change of its permissions."""
    edits: int = 1
    modified_at: datetime
    is_deleted: bool = False
    package: str | None = None
    is_shortcut: bool = False
    malware: str | None = None
    version: str | None = None
    unique_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    page: dict[str, Any] | None = None
    """The title and layout of a site page."""


class Tenant:
    """Everything by id. Every change has a number, by which the log of changes orders items."""

    def __init__(self, clock: Callable[[], datetime] = lambda: START) -> None:
        """clock: the time to start from; by default it stands still, so that only ``advance`` moves it."""
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self._clock = clock
        self._advanced = timedelta()
        self.last_change = 0
        self.users: dict[str, User] = {}
        self.groups: dict[str, EntraGroup] = {}
        self.sites: dict[str, Site] = {}
        self.drives: dict[str, tuple[str, str]] = {}
        """The site and name of each drive."""
        self.items: dict[str, Item] = {}

    def now(self) -> datetime:
        return self._clock() + self._advanced

    def advance(self, duration: timedelta) -> None:
        self._advanced += duration

    # Directory

    def user(self, mail: str, *, upn: str | None = None, guest: bool = False) -> str:
        id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, mail))
        self.users[id_] = User(id_, mail, upn or mail, type="Guest" if guest else "Member")
        return id_

    def group(self, name: str, *members: str, unified: bool = False) -> str:
        id_ = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
        self.groups[id_] = EntraGroup(id_, unified, set(members))
        return id_

    def transitive_members(self, group: str) -> Iterator[str]:
        """Yield the ids of users and groups, each once, also in groups that contain each other."""
        seen, pending = {group}, [group]
        while pending:
            for member in sorted(self.groups[pending.pop()].members - seen):
                seen.add(member)
                yield member
                if member in self.groups:
                    pending.append(member)

    # Sites and drives

    def site(self, path: str, *, personal: bool = False) -> Site:
        ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, f"{path} {part}")) for part in ("site", "web")]
        host = HOST.replace(".", "-my.", 1) if personal else HOST
        site = Site(",".join([host, *ids]), f"https://{host}{path}", is_personal=personal)
        self.sites[site.id] = site
        return site

    def drive(self, site: Site, name: str = "Documents", *grants: Grant, pages: bool = False) -> str:
        """Add a library, whose root has these permissions."""
        id_ = f"b!{next(self._ids):040}"
        self.drives[id_] = (site.id, name)
        if pages:
            site.pages_drive = id_
        else:
            site.drives.append(id_)
        self.add("root", drive=id_, parent=None, folder=True, grants=list(grants))
        return id_

    def root(self, drive: str) -> str:
        return next(item.id for item in self.items.values() if item.drive == drive and item.parent is None)

    def site_of(self, drive: str) -> Site:
        return self.sites[self.drives[drive][0]]

    # Items

    def add(
        self,
        name: str,
        *,
        drive: str,
        parent: str | None = "",
        folder: bool = False,
        content: bytes = b"",
        mime_type: str = "text/plain",
        grants: list[Grant] | None = None,
        **more: Any,
    ) -> Item:
        """parent: the id of a folder; empty: the root."""
        item = Item(
            id=f"01{next(self._ids):032}",
            drive=drive,
            parent=self.root(drive) if parent == "" else parent,
            name=name,
            is_folder=folder,
            content=content,
            mime_type=mime_type,
            grants=grants,
            modified_at=self.now(),
            **more,
        )
        self.items[item.id] = item
        self._record(item)
        return item

    def _record(self, item: Item) -> None:
        item.changed = self.last_change = next(self._numbers)

    def edit(self, id_: str, content: bytes) -> None:
        item = self.items[id_]
        self.advance(timedelta(seconds=1))
        item.content, item.modified_at = content, self.now()
        item.edits += 1
        self._record(item)

    def rename(self, id_: str, name: str) -> None:
        item = self.items[id_]
        item.name, item.edits = name, item.edits + 1
        self._record(item)

    def move(self, id_: str, parent: str) -> None:
        """Only the moved item is in the log, not what is below it."""
        item = self.items[id_]
        item.parent, item.edits = parent, item.edits + 1
        self._record(item)

    def delete(self, id_: str, *, deleted: bool = True) -> None:
        """Move an item to the recycle bin, with everything below it, or back."""
        for item in [self.items[id_], *self.below(id_)]:
            item.is_deleted = deleted
            self._record(item)

    def share(self, id_: str, grants: list[Grant] | None) -> None:
        """Replace the permissions of an item; only the item itself is in the log."""
        item = self.items[id_]
        item.grants = grants
        self._record(item)
        item.shared = item.changed

    def below(self, id_: str) -> Iterator[Item]:
        for item in list(self.items.values()):
            if item.parent == id_:
                yield item
                yield from self.below(item.id)

    def above(self, item: Item) -> Iterator[Item]:
        while item.parent is not None:
            item = self.items[item.parent]
            yield item

    def effective(self, item: Item) -> list[Grant]:
        for place in [item, *self.above(item)]:
            if place.grants is not None:
                return place.grants
        return []
