"""The content of a fake Google Workspace: accounts, groups, shared drives, folders, files, their permissions and the
log of changes. It knows nothing of HTTP.

Sharing is as Google describes it (https://developers.google.com/workspace/drive/api/guides/manage-sharing and
https://developers.google.com/workspace/drive/api/guides/limited-expansive-access).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

FOLDER = "application/vnd.google-apps.folder"
SHORTCUT = "application/vnd.google-apps.shortcut"
DOCUMENT = "application/vnd.google-apps.document"
SHEET = "application/vnd.google-apps.spreadsheet"
SLIDES = "application/vnd.google-apps.presentation"

GranteeType = Literal["user", "group", "domain", "anyone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    type: GranteeType
    who: str = ""
    """An address or a domain; empty for anyone."""
    role: str = "reader"
    expires: datetime | None = None
    discoverable: bool = False
    """For a domain or anyone: whether search lists the file, otherwise the link is needed."""
    deleted: bool = False
    view: str | None = None

    @property
    def id(self) -> str:
        """The permission id, which depends on the grantee alone: it is the same on every file."""
        if self.type == "anyone":
            return "anyone" if self.discoverable else "anyoneWithLink"
        number = str(int.from_bytes(hashlib.sha256(f"{self.type} {self.who}".encode()).digest()[:8], "big"))
        return f"{number}k" if self.type == "domain" else number


@dataclass(frozen=True, slots=True)
class EffectiveGrant:
    """A permission that applies to an item: the item's own (``origin`` None), or inherited from ``origin``."""

    grant: Grant
    origin: str | None


@dataclass(slots=True, kw_only=True)
class Item:
    id: str
    name: str
    mime_type: str
    parent: str | None
    drive: str | None
    owner: str | None
    created: datetime
    modified: datetime
    modifier: str
    version: int = 1
    content: bytes = b""
    exports: dict[str, bytes] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    limited: bool = False
    """The API's inheritedPermissionsDisabled."""
    trashed: bool = False
    target: str | None = None
    abusive: bool = False
    download: bool = True
    """The API's capabilities.canDownload, for every account."""
    encrypted: bool = False
    seen: set[str] = field(default_factory=set)
    """Accounts that could read the item at some time; the log shows them when they no longer can."""


@dataclass(frozen=True, slots=True)
class Change:
    number: int
    at: datetime
    kind: Literal["file", "drive"]
    id: str
    log: str | None
    """The shared drive whose log contains the change; None: the users' own log."""


class Corpus:
    def __init__(self) -> None:
        self.clock_offset = timedelta()
        self.users: dict[str, bool] = {}
        """Address → whether the account is suspended."""
        self.groups: dict[str, set[str]] = {}
        self.items: dict[str, Item] = {}
        self.drives: dict[str, str] = {}
        """Id → name. The drive's root folder is an item with the same id, and its grants are the members."""
        self.deleted: dict[str, Item] = {}
        self.changes: list[Change] = []
        self.shows_expired_grants = False
        """Whether expired permissions are still returned, as they are until Google removes them."""
        self._numbers = itertools.count(101)
        self._ids = itertools.count(1)
        self._last = datetime.min.replace(tzinfo=UTC)

    # Time

    def now(self) -> datetime:
        return datetime.now(UTC) + self.clock_offset

    def _tick(self) -> datetime:
        """Return the present time in milliseconds, as Drive stores it, later than the one before."""
        moment = self.now().replace(microsecond=self.now().microsecond // 1000 * 1000)
        self._last = max(moment, self._last + timedelta(milliseconds=1))
        return self._last

    # People

    def user(self, address: str, *, suspended: bool = False) -> str:
        self.users[address] = suspended
        return address

    def group(self, address: str, *members: str) -> str:
        self.groups[address] = set(members)
        return address

    def people_of(self, group: str) -> set[str]:
        """Return the people in a group and in the groups that it contains."""
        people: set[str] = set()
        pending, seen = [group], {group}
        while pending:
            for member in self.groups.get(pending.pop(), ()):
                if member in self.groups:
                    if member not in seen:
                        seen.add(member)
                        pending.append(member)
                else:
                    people.add(member)
        return people

    # Items

    def drive(self, name: str, *members: Grant) -> str:
        id_ = f"0AD{next(self._ids):04}Uk9PVA"
        self.drives[id_] = name
        now = self._tick()
        self.items[id_] = Item(
            id=id_,
            name="Drive",
            mime_type=FOLDER,
            parent=None,
            drive=id_,
            owner=None,
            created=now,
            modified=now,
            modifier="",
            grants={grant.id: grant for grant in members},
        )
        self._log(self.items[id_], "drive")
        return id_

    def add(
        self,
        name: str,
        *,
        parent: str | None = None,
        owner: str | None = None,
        mime_type: str = DOCUMENT,
        content: bytes = b"",
        exports: dict[str, bytes] | None = None,
        target: str | None = None,
        by: str = "",
    ) -> Item:
        """Add an item to a folder or shared drive (``parent``), or to the My Drive of ``owner``."""
        folder = self.items[parent] if parent else None
        drive = folder.drive if folder else None
        owner = None if drive else (owner or (folder.owner if folder else None))
        now = self._tick()
        item = Item(
            id=f"1F{next(self._ids):05}aBcDeFgHiJkLmNoP",
            name=name,
            mime_type=mime_type,
            parent=parent,
            drive=drive,
            owner=owner,
            created=now,
            modified=now,
            modifier=by or owner or "writer@example.com",
            content=content,
            exports=exports or {},
            target=target,
        )
        if owner:
            own = Grant(type="user", who=owner, role="owner")
            item.grants[own.id] = own
        self.items[item.id] = item
        self._log(item)
        return item

    def edit(self, id_: str, *, content: bytes | None = None, exports: dict[str, bytes] | None = None) -> None:
        item = self.items[id_]
        item.content = item.content if content is None else content
        item.exports = item.exports if exports is None else exports
        item.modified = self._tick()
        self._log(item)

    def rename(self, id_: str, name: str) -> None:
        self.items[id_].name = name
        self._log(self.items[id_])

    def move(self, id_: str, parent: str) -> None:
        """Move an item, within a drive or to another with everything below it."""
        item, old = self.items[id_], self.items[id_].drive
        item.parent = parent
        for moved in (item, *self._below(id_)):
            moved.drive = self.items[parent].drive
            if old != moved.drive:
                self._log(moved, log=old)
                self._log(moved)
        if old == item.drive:
            self._log(item)

    def trash(self, id_: str, trashed: bool = True) -> None:
        self.items[id_].trashed = trashed
        for item in (self.items[id_], *self._below(id_)):
            self._log(item)

    def delete(self, id_: str) -> None:
        for item in (*self._below(id_), self.items[id_]):
            self._record_readers(item)
            self.deleted[item.id] = self.items.pop(item.id)
            self._log(item)

    def view(self, id_: str) -> None:
        """Open an item, which changes its version and nothing else."""
        self.items[id_].version += 1

    def is_trashed(self, item: Item) -> bool:
        return item.trashed or any(ancestor.trashed for ancestor in self._above(item))

    def _above(self, item: Item) -> Iterator[Item]:
        while item.parent and item.parent in self.items:
            item = self.items[item.parent]
            yield item

    def _below(self, id_: str) -> list[Item]:
        return [item for item in self.items.values() if any(ancestor.id == id_ for ancestor in self._above(item))]

    # Sharing

    def share(self, id_: str, grant: Grant) -> None:
        """Share an item and everything below it; the log contains the item alone."""
        self._record_readers(self.items[id_])
        self.items[id_].grants[grant.id] = grant
        self._log(self.items[id_], "drive" if id_ in self.drives else "file")

    def unshare(self, id_: str, grant: Grant) -> None:
        self._record_readers(self.items[id_])
        del self.items[id_].grants[grant.id]
        self._log(self.items[id_], "drive" if id_ in self.drives else "file")

    def limit(self, id_: str, limited: bool = True) -> None:
        self._record_readers(self.items[id_])
        self.items[id_].limited = limited
        self._log(self.items[id_])

    def permissions(self, item: Item) -> dict[str, list[EffectiveGrant]]:
        """Return all permissions that apply to an item, by permission id, its own first."""
        permissions: dict[str, list[EffectiveGrant]] = {
            id_: [EffectiveGrant(grant, None)]
            for id_, grant in item.grants.items()
            if self.shows_expired_grants or not self._is_expired(grant)
        }
        folder = self.items.get(item.parent or "")
        if folder is not None:
            for id_, grants in self.permissions(folder).items():
                inherited = [
                    effective
                    for effective in grants
                    if not item.limited or effective.grant.role in ("organizer", "owner")
                ]
                if inherited and not all(effective.grant.view == "metadata" for effective in inherited):
                    permissions.setdefault(id_, []).extend(
                        EffectiveGrant(effective.grant, effective.origin or folder.id) for effective in inherited
                    )
        return permissions

    def _is_expired(self, grant: Grant) -> bool:
        return grant.expires is not None and grant.expires <= self.now()

    def holds(self, account: str, grant: Grant) -> bool:
        if grant.type == "user":
            return grant.who == account
        if grant.type == "group":
            return account in self.people_of(grant.who)
        return grant.type == "anyone" or account.endswith(f"@{grant.who}")

    def roles(self, account: str, item: Item) -> set[str]:
        grants = itertools.chain.from_iterable(self.permissions(item).values())
        return {
            effective.grant.role
            for effective in grants
            if self.holds(account, effective.grant)
            and not self._is_expired(effective.grant)
            and not effective.grant.deleted
        }

    def lists(self, account: str, item: Item) -> bool:
        """Return whether a listing for the account contains the item. A file that anyone with the link may open is not
        listed."""
        grants = itertools.chain.from_iterable(self.permissions(item).values())
        return any(
            self.holds(account, effective.grant)
            and effective.grant.type != "anyone"
            and not self._is_expired(effective.grant)
            for effective in grants
        )

    # The log

    def _record_readers(self, item: Item) -> None:
        item.seen |= {account for account in self.users if self.roles(account, item)}

    def _log(self, item: Item, kind: Literal["file", "drive"] = "file", log: str | None = "") -> None:
        item.version += 1
        if item.id in self.items:
            self._record_readers(item)
        drive = item.drive if log == "" else log
        self.changes.append(Change(next(self._numbers), self._tick(), kind, item.id, drive))
