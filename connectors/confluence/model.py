"""What both flavours of Confluence have, whatever their APIs call it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

Kind = Literal["page", "blogpost", "attachment"]
Position = Mapping[str, Any]
"""Where a listing goes on."""


@dataclass(frozen=True, slots=True)
class Space:
    id: str
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class Person:
    """An account, as the API tells it. ``id``: account id, or user key."""

    id: str
    name: str = ""
    """For people to read."""
    username: str = ""
    email: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A comment."""

    id: str
    number: int
    when: str
    body: str = ""
    parent: str | None = None
    selection: str | None = None
    """The words it is about; None: about the whole page."""
    author: str = ""
    """A person's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A page, blog post or attachment that is current."""

    id: str
    kind: Kind
    space: str
    """Key."""
    title: str
    number: int
    """Of its version. Not taken as ``Document.version``: deleting an old version in Confluence renumbers the later
    ones, and a page that counts 5, 4, 5 would be taken for outdated."""
    when: str
    """When that version was made, ISO 8601."""
    webui: str = ""
    """Relative to the base address."""
    author: str = ""
    """A person's id."""
    body: str | None = None
    parent: str | None = None
    """Cloud: what it stands below in the tree."""
    parent_kind: str = ""
    """``page``, or what cannot be read itself: ``folder``, ``whiteboard``, ``database``, ``embed``."""
    container: str | None = None
    media_type: str = ""
    size: int = 0
    download: str = ""
    required: tuple[str, ...] | None = None
    """A tag for every view restriction on the way down to it; None: that could not be read for certain."""
    remarks: Sequence[Remark] = ()

    @property
    def is_readable(self) -> bool:
        """Whether it has text that we read. Pictures, sound, film and archives have none: they are no documents."""
        return self.kind != "attachment" or not _is_opaque(self.title, self.media_type)

    @property
    def tags(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(acl_tags, required_tags); nobody, where access is not known."""
        return ((), ()) if self.required is None else ((space_tag(self.space),), self.required)

    @property
    def revision(self) -> str:
        """Another one while access is unknown: it is read when that heals, and not with every sweep before."""
        known = "" if self.required is not None else "?"
        return f"{known}{self.space}:{self.number}@{instant(self.when).timestamp():.3f}{digest(self.remarks)}"


@dataclass(frozen=True, slots=True)
class Listing:
    """Some content, and where the listing goes on (None: it ends here)."""

    found: Sequence[Content]
    next: Position | None


@dataclass(frozen=True, slots=True)
class Changed:
    """What a search shows of a change."""

    id: str
    kind: Literal["page", "blogpost", "attachment", "comment"]
    container: str | None
    mark: str
    """Another one for every version."""

    @property
    def document(self) -> str:
        """A comment is a part of its page."""
        return self.container or self.id if self.kind == "comment" else self.id


@dataclass(frozen=True, slots=True)
class Readers:
    """Who may view something: these people, the members of these groups, anybody at all."""

    people: Sequence[Person] = ()
    groups: Sequence[str] = ()
    """By the name that ``members`` takes."""
    anonymous: bool = False

    def __bool__(self) -> bool:
        return bool(self.people or self.groups or self.anonymous)


class Site(Protocol):
    """One Confluence. Raises what ``connectors.web`` raises, CursorExpired, and Retryable for answers that are none."""

    async def close(self) -> None: ...

    async def me(self) -> Person: ...

    async def spaces(self) -> Mapping[str, Space]:
        """Those that are to be read, by key. Raises Misconfigured where one that is named is not there."""
        ...

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        """full: with bodies and remarks, else only what revisions and access need."""
        ...

    def kinds(self) -> Sequence[Kind]:
        """What ``listing`` takes; the rest comes along with it."""
        ...

    async def get(self, ids: Sequence[str]) -> Sequence[Content]:
        """Those that are there and current, in full."""
        ...

    async def changed(self, minutes: int) -> Sequence[Changed]:
        """Content of all kinds that search knows to have changed within the last minutes."""
        ...

    async def trashed(self) -> Sequence[str]:
        """The newest part of the trash, as much as one request shows."""
        ...

    async def below(self, id_: str, limit: int) -> Sequence[str] | None:
        """Pages and attachments below a page; None: more than limit."""
        ...

    async def readers(self, space: Space) -> Readers: ...

    async def restriction(self, id_: str) -> Readers:
        """Who a content's own view restriction names; nobody: it has none."""
        ...

    async def restricted(self, space: Space, position: Position | None) -> tuple[Sequence[str], Position | None]:
        """Some ids of the space that have view restrictions of their own."""
        ...

    async def members(self, group: str) -> Sequence[Person]: ...

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        """By id; whoever is unknown is missing. fresh: nothing from memory, as access demands."""
        ...


def space_tag(key: str) -> str:
    return f"space:{key}"


def group_tag(group: str) -> str:
    return f"group:{group}"


def restriction_tag(content: str) -> str:
    return f"restriction:{content}"


def instant(when: str) -> datetime:
    """Raises ValueError."""
    found = datetime.fromisoformat(when)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def digest(remarks: Sequence[Remark]) -> str:
    """A comment that comes, changes or goes changes the document, but not its page's version."""
    if not remarks:
        return ""
    text = ",".join(sorted(f"{one.id}:{one.number}" for one in remarks))
    return f"+{len(remarks)}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


_OPAQUE_TYPES = ("image/", "video/", "audio/", "font/", "application/vnd.atlassian")
_OPAQUE_ENDINGS = frozenset(
    {
        "png",
        "jpg",
        "jpeg",
        "gif",
        "webp",
        "svg",
        "bmp",
        "ico",
        "tif",
        "tiff",
        "mp3",
        "mp4",
        "mov",
        "avi",
        "webm",
        "wav",
        "zip",
        "gz",
        "tgz",
        "tar",
        "7z",
        "rar",
        "jar",
        "exe",
        "msi",
        "dmg",
        "iso",
        "bin",
        "drawio",
        "tmp",
        "gliffy",
        "vsd",
        "vsdx",
        "psd",
        "ai",
        "sketch",
        "fig",
        "ttf",
        "woff",
        "woff2",
    }
)


def _is_opaque(title: str, media_type: str) -> bool:
    ending = title.rpartition(".")[2].lower() if "." in title else ""
    return media_type.lower().startswith(_OPAQUE_TYPES) or ending in _OPAQUE_ENDINGS or title.startswith("~")


@dataclass(slots=True)
class Names:
    """Display names, kept while we run: they are no access."""

    known: dict[str, str] = field(default_factory=dict)
    limit: int = 20_000

    def keep(self, people: Mapping[str, Person]) -> None:
        if len(self.known) > self.limit:
            self.known.clear()
        self.known |= {id_: person.name for id_, person in people.items() if person.name}
