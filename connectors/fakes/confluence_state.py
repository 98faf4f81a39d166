"""The state of the fake Confluence: its content, and the actions of its users."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import merge
from typing import Any, Literal

Kind = Literal["page", "blogpost", "comment", "attachment", "folder"]
Status = Literal["current", "trashed", "archived"]
FIRST_ID = 65_601


@dataclass
class User:
    account_id: str
    """The account id (Cloud) or the user key (Data Center)."""
    username: str
    email: str
    display: str
    shows_email: bool = True
    time_zone: str = "UTC"
    sees_all: bool = False
    """Data Center: whether the user is in confluence-administrators, to whom no restriction applies."""


@dataclass
class Restriction:
    users: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.users or self.groups)


@dataclass
class Space:
    id: str
    key: str
    name: str
    type: Literal["global", "personal"] = "global"
    readers: Restriction = field(default_factory=Restriction)
    anonymous: bool = False
    status: Literal["current", "archived"] = "current"
    assignments: list[tuple[str, str, str]] = field(default_factory=list)
    """Type of principal (USER, GROUP, ACCESS_CLASS), its id, and the id of its role."""


@dataclass
class Item:
    id: str
    kind: Kind
    space: str
    title: str
    author: str
    parent: str | None = None
    """The parent in the tree of pages or of comments."""
    container: str | None = None
    """The page of a comment or an attachment."""
    body: str = ""
    data: bytes = b""
    media_type: str = ""
    selection: str | None = None
    """The words to which an inline comment refers."""
    labels: set[str] = field(default_factory=set)
    """The labels that everybody sees."""
    status: Status = "current"
    versions: list[datetime] = field(default_factory=list)
    """When each version was written; the first is version 1."""
    read: Restriction = field(default_factory=Restriction)
    update: Restriction = field(default_factory=Restriction)

    @property
    def number(self) -> int:
        """The id as a number: ids are given in ascending order, whatever the kind."""
        return int(self.id.removeprefix("att"))

    @property
    def version_number(self) -> int:
        return len(self.versions)


class _Index:
    """Finds items without a look at all of them. Law: it holds the items of ``State.items``, and no others."""

    def __init__(self) -> None:
        self._items: dict[int, Item] = {}
        self._listed: defaultdict[tuple[str, Kind], list[int]] = defaultdict(list)
        """By space and kind, in the order of the ids."""
        self._parts: defaultdict[str, dict[str, Item]] = defaultdict(dict)
        """The comments and attachments of each page."""
        self._children: defaultdict[str, dict[str, Item]] = defaultdict(dict)
        self._written: list[tuple[datetime, int]] = []
        """When versions were written, in the order of time."""

    def add(self, item: Item) -> None:
        self._items[item.number] = item
        insort(self._listed[item.space, item.kind], item.number)
        if item.container:
            self._parts[item.container][item.id] = item
        if item.parent:
            self._children[item.parent][item.id] = item

    def remove(self, item: Item) -> None:
        del self._items[item.number]
        listed = self._listed[item.space, item.kind]
        del listed[bisect_left(listed, item.number)]
        for index, key in ((self._parts, item.container), (self._children, item.parent)):
            if key:
                del index[key][item.id]

    def record_version(self, item: Item) -> None:
        insort(self._written, (item.versions[-1], item.number))

    def listed(self, kinds: Collection[Kind], spaces: Iterable[str], after: int) -> Iterator[Item]:
        lists = [self._listed[space, kind] for space in spaces for kind in kinds if (space, kind) in self._listed]
        for number in merge(*(_following(numbers, after) for numbers in lists)):
            yield self._items[number]

    def parts(self, container: str) -> list[Item]:
        return list(self._parts[container].values()) if container in self._parts else []

    def children(self, parent: str) -> list[Item]:
        return list(self._children[parent].values()) if parent in self._children else []

    def written_since(self, at: datetime) -> list[Item]:
        numbers = {number for _, number in self._written[bisect_left(self._written, (at, 0)) :]}
        return [self._items[number] for number in sorted(numbers) if number in self._items]


def _following(numbers: list[int], after: int) -> Iterator[int]:
    return (numbers[at] for at in range(bisect_right(numbers, after), len(numbers)))


@dataclass(frozen=True)
class Event:
    name: str
    """The name in Data Center, such as ``page_updated``."""
    item: Item
    at: datetime


class State:
    """Users, groups, spaces and content. ``now`` follows the clock unless ``freeze`` stops it."""

    def __init__(self, *, zone_free_now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = zone_free_now
        self._shift = timedelta()
        self._frozen: datetime | None = None
        self.users: dict[str, User] = {}
        self.groups: dict[str, set[str]] = {}
        """Group id → account ids. On Data Center the id is the name."""
        self.spaces: dict[str, Space] = {}
        self.roles: dict[str, tuple[str, ...]] = {}
        """The permissions of each role by its id; a site without roles refuses requests about them."""
        self.items: dict[str, Item] = {}
        """By id, in the order of the ids. Only the actions below may add, remove or move one."""
        self._index = _Index()
        self.events: list[Event] = []
        self._next = FIRST_ID

    # The clock

    def now(self) -> datetime:
        return (self._frozen or self._clock()) + self._shift

    def freeze(self, at: datetime) -> None:
        self._frozen, self._shift = at, timedelta()

    def advance(self, **parts: float) -> None:
        self._shift += timedelta(**parts)

    # Queries

    def chain(self, item: Item) -> list[Item]:
        """Return the pages from the root of the tree to the item's own page, which is the last."""
        page = self.items[item.container] if item.container else item
        chain = [page]
        while chain[0].parent:
            chain.insert(0, self.items[chain[0].parent])
        return chain

    def listed(self, kinds: Collection[Kind], spaces: Collection[str] | None = None, after: int = 0) -> Iterator[Item]:
        """Yield the items of these kinds and spaces (None: all spaces) whose number is above ``after``, by number."""
        return self._index.listed(kinds, self.spaces if spaces is None else spaces, after)

    def is_current(self, item: Item) -> bool:
        """Whether an item is current, as its container is."""
        return item.status == "current" and (not item.container or self.items[item.container].status == "current")

    def current(self, *kinds: Kind) -> Iterator[Item]:
        """Yield the items of these kinds that are current, as their containers are, in the order of their ids."""
        return (item for item in self.listed(kinds) if self.is_current(item))

    def parts(self, container: str) -> list[Item]:
        """Return the comments and attachments of a page, whatever their status."""
        return self._index.parts(container)

    def contained(self, container: str, kind: Kind) -> list[Item]:
        return [item for item in self.parts(container) if item.kind == kind and self.is_current(item)]

    def below(self, id_: str) -> list[Item]:
        """Return the pages and folders below one, or the replies to a comment, at any depth."""
        descendants: list[Item] = []
        for child in self._index.children(id_):
            descendants += [child, *self.below(child.id)]
        return descendants

    def written_since(self, at: datetime) -> list[Item]:
        """Return the items of which a version was written at that time or later, in the order of their ids."""
        return self._index.written_since(at)

    def in_any(self, account: str, allowed: Restriction) -> bool:
        return account in allowed.users or any(account in self.groups.get(group, ()) for group in allowed.groups)

    def may_see(self, user: User, item: Item) -> bool:
        if not self.may_see_space(user, self.spaces[item.space]):
            return False
        return user.sees_all or all(
            self.in_any(user.account_id, ancestor.read) for ancestor in self.chain(item) if ancestor.read
        )

    def may_see_space(self, user: User, space: Space) -> bool:
        return (
            user.sees_all
            or space.anonymous
            or self.in_any(user.account_id, space.readers)
            or any(self._holds(user, kind, id_) for kind, id_, role in space.assignments if self.may_view(role))
        )

    def _holds(self, user: User, kind: str, id_: str) -> bool:
        match kind:
            case "USER":
                return id_ == user.account_id
            case "GROUP":
                return user.account_id in self.groups.get(id_, ())
            case _:
                return id_ in ("all-licensed-users", "authenticated-users", "anonymous-users")

    def may_view(self, role: str) -> bool:
        return role in self.roles and "read/space" in self.roles[role]

    # Actions

    def _id(self) -> str:
        self._next += 1
        return str(self._next)

    def add_user(self, name: str, **fields: object) -> User:
        user = User(f"557058:{name}", name, f"{name.capitalize()}@Example.com", name.capitalize(), **fields)  # type: ignore[arg-type]
        self.users[user.account_id] = user
        return user

    def add_space(self, key: str, *, users: set[str] | None = None, groups: set[str] | None = None) -> Space:
        space = Space(self._id(), key, f"Space {key}", readers=Restriction(users or set(), groups or set()))
        self.spaces[key] = space
        return space

    def _add(self, item: Item, event: str | None) -> Item:
        self.items[item.id] = item
        self._index.add(item)
        self._write(item)
        if event:
            self._emit(event, item)
        return item

    def _write(self, item: Item) -> None:
        item.versions.append(self.now())
        self._index.record_version(item)

    def _emit(self, name: str, item: Item) -> None:
        self.events.append(Event(name, item, self.now()))

    def add_page(
        self,
        space: str,
        title: str,
        body: str = "",
        *,
        parent: str | None = None,
        author: str = "",
        kind: Kind = "page",
    ) -> Item:
        author = author or next(iter(self.users))
        event = {"page": "page_created", "blogpost": "blog_created"}.get(kind)
        return self._add(Item(self._id(), kind, space, title, author, parent=parent, body=body), event)

    def add_comment(
        self, container: str, body: str, *, parent: str | None = None, selection: str | None = None, author: str = ""
    ) -> Item:
        page = self.items[container]
        item = Item(
            self._id(),
            "comment",
            page.space,
            f"Re: {page.title}",
            author or page.author,
            parent=parent,
            container=container,
            body=body,
            selection=selection,
        )
        return self._add(item, "comment_created")

    def attach(self, container: str, name: str, data: bytes, media_type: str) -> Item:
        page = self.items[container]
        item = Item(
            f"att{self._id()}",
            "attachment",
            page.space,
            name,
            page.author,
            container=container,
            data=data,
            media_type=media_type,
        )
        return self._add(item, "attachment_created")

    def edit(self, id_: str, *, body: str | None = None, title: str | None = None, data: bytes | None = None) -> None:
        item = self.items[id_]
        item.body = item.body if body is None else body
        item.title = title or item.title
        item.data = item.data if data is None else data
        self._write(item)
        self._emit(f"{_noun(item)}_updated", item)

    def label(self, id_: str, *labels: str) -> None:
        """Give a page these labels instead of those that it has. Neither its version nor ``lastmodified`` changes."""
        self.items[id_].labels = set(labels)

    def move(self, id_: str, parent: str | None, *, space: str | None = None) -> None:
        """Move a page. This makes no new version, since its position is no part of it."""
        item = self.items[id_]
        self._place(item, parent, space or item.space)
        if space:
            tree = [item, *self.below(id_)]
            for moved in [*tree[1:], *(part for page in tree for part in self.parts(page.id))]:
                self._place(moved, moved.parent, space)
        self._emit("page_moved", item)

    def trash(self, id_: str) -> None:
        """Move a content to the trash. Its children move up to its parent, as they do in Confluence."""
        item = self.items[id_]
        item.status = "trashed"
        for child in self._index.children(id_):
            if child.kind in ("page", "folder"):
                self._place(child, item.parent, child.space)
        self._emit(f"{_noun(item)}_trashed", item)

    def _place(self, item: Item, parent: str | None, space: str) -> None:
        self._index.remove(item)
        item.parent, item.space = parent, space
        self._index.add(item)

    def restore(self, id_: str) -> None:
        item = self.items[id_]
        item.status = "current"
        self._emit(f"{_noun(item)}_restored", item)

    def purge(self, id_: str) -> None:
        item = self.items[id_]
        for removed in [*self.parts(id_), item]:
            self._index.remove(removed)
            del self.items[removed.id]
        self._emit(f"{_noun(item)}_removed", item)

    def restrict(self, id_: str, *, users: set[str] | None = None, groups: set[str] | None = None) -> None:
        """Restrict viewing to these; without any, lift the restriction. Neither the version nor ``lastmodified``
        changes."""
        item = self.items[id_]
        item.read = Restriction(users or set(), groups or set())
        self._emit("content_permissions_updated", item)


def _noun(item: Item) -> str:
    return {"blogpost": "blog"}.get(item.kind, item.kind)


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def body(self, *, v2: bool) -> dict[str, Any]:
        if "scope" in self.message:
            return {"code": self.status, "message": self.message}
        if v2:
            return {"errors": [{"status": self.status, "code": self.code, "title": self.message, "detail": None}]}
        data = {"authorized": self.status != 403, "valid": True, "errors": [], "successful": False}
        return {"statusCode": self.status, "data": data, "message": self.message}


def no_such_content() -> Refusal:
    """The response for content that does not exist or that the caller may not see; it does not reveal which."""
    return Refusal(404, "NOT_FOUND", "No content found with id, or you do not have permission to view it")
