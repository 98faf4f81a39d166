"""The parts of Confluence that both flavours have, independent of the names in their APIs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from connectors.atlassian import Person
from connectors.files import TEXTLESS_ENDINGS
from connectors.room import hold
from pipeline.core.errors import PenstockError

Kind = Literal["page", "blogpost", "attachment"]
Position = Mapping[str, Any]
"""The position at which a listing continues."""


@dataclass(frozen=True, slots=True)
class Space:
    id: str
    key: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """A comment on a page or blog post."""

    id: str
    version_number: int
    modified_at: str
    """When this version was written, in ISO 8601."""
    body: str = ""
    parent: str | None = None
    selection: str | None = None
    """The words that the comment refers to; None: it refers to the whole page."""
    author: str = ""
    """The id of a Person."""

    def __post_init__(self) -> None:
        parse_time(self.modified_at)
        hold((self.body,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A current page, blog post or attachment."""

    id: str
    kind: Kind
    space: str
    """The key of its space. Empty for a page in a space that is not read, while the account does not see one that the
    settings name: it may be that space, and the page is then not deleted."""
    title: str
    version_number: int
    """Confluence's version number. It is not used as ``Document.version``: deleting an old version in Confluence
    renumbers the later ones, and a page whose number goes 5, 4, 5 would be taken for outdated."""
    modified_at: str
    """When this version was written, in ISO 8601."""
    webui: str = ""
    """The address of the page for people, relative to the base address."""
    author: str = ""
    """The id of a Person."""
    body: str | None = None
    parent: str | None = None
    """Cloud: the id of its parent in the tree."""
    parent_kind: str = ""
    """``page``, or a kind that holds no text: ``folder``, ``whiteboard``, ``database``, ``embed``."""
    container: str | None = None
    media_type: str = ""
    size: int = 0
    download: str = ""
    required_tags: tuple[str, ...] | None = None
    """One tag for each view restriction on itself and its ancestors; None: they could not be read for certain."""
    comments: Sequence[Comment] = ()
    labels: tuple[str, ...] = ()
    """The labels that everybody sees, sorted; empty for an attachment. A change of them makes no new version."""

    def __post_init__(self) -> None:
        parse_time(self.modified_at)
        hold((self.body,))

    @property
    def is_readable(self) -> bool:
        """True unless it is an attachment without text, such as a picture or an archive, which is no document."""
        return self.kind != "attachment" or not _is_opaque(self.title, self.media_type)

    @property
    def tags(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(acl_tags, required_tags). Both are empty, which admits nobody, while access is unknown."""
        return ((), ()) if self.required_tags is None else ((space_tag(self.space),), self.required_tags)

    @property
    def revision(self) -> str:
        """The revision for ``Document.revision``. It differs while access is unknown: the document is read again once
        access becomes known, and not with every sweep before."""
        known = "" if self.required_tags is not None else "?"
        modified = f"{parse_time(self.modified_at).timestamp():.3f}"
        more = f"{comments_digest(self.comments)}{labels_digest(self.labels)}"
        return f"{known}{self.space}:{self.version_number}@{modified}{more}"


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a listing, and the position of the next (None: this was the last)."""

    contents: Sequence[Content]
    next: Position | None
    failed: Mapping[str, PenstockError] = field(default_factory=dict)
    """The errors of pages that could not be read with their comments and attachments, by id."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change as search reports it."""

    id: str
    kind: Literal["page", "blogpost", "attachment", "comment"]
    container: str | None
    version: str
    """A text that is different for every version of the content."""

    @property
    def document(self) -> str:
        """The id of the changed document. A comment is a part of its page's document."""
        return self.container or self.id if self.kind == "comment" else self.id


@dataclass(frozen=True, slots=True)
class Readers:
    """The people, the groups and, with ``anonymous``, everybody who may view a space or a page; with ``licensed``, all
    users with a licence."""

    people: Sequence[Person] = ()
    groups: Sequence[str] = ()
    """Groups by the name that ``members`` takes."""
    anonymous: bool = False
    licensed: bool = False

    def __bool__(self) -> bool:
        return bool(self.people or self.groups or self.anonymous or self.licensed)


class Site(Protocol):
    """One Confluence site. Raises the errors of ``connectors.web``, CursorExpired, and Retryable for a response that
    does not have the API's format."""

    async def close(self) -> None: ...

    async def me(self) -> Person: ...

    async def spaces(self) -> Mapping[str, Space]:
        """Return the spaces to read, by key. Raises Misconfigured when none of those that the settings name exists."""
        ...

    async def listing(self, space: Space, kind: Kind, position: Position | None, *, full: bool) -> Listing:
        """Return one page of a space's contents; with ``full`` including bodies and comments, otherwise only what
        revisions and access need."""
        ...

    def kinds(self) -> Sequence[Kind]:
        """Return the kinds that ``listing`` accepts. Other kinds are returned along with them."""
        ...

    async def get(self, ids: Sequence[str], *, bodies: bool = True) -> Sequence[Content]:
        """Return the contents with these ids that exist and are current, with ``bodies`` also their texts and comments;
        one whose ``space`` is empty exists, but must not be read."""
        ...

    async def recent_changes(self, minutes: int) -> Sequence[Change]:
        """Return the changes of the last ``minutes``, as far as the search index knows them."""
        ...

    async def trashed(self) -> Sequence[str]:
        """Return the ids of the newest contents in the trash, as many as one request returns."""
        ...

    async def descendants(self, id_: str, limit: int) -> Sequence[str] | None:
        """Return the ids of the pages and attachments below a page, or None if there are more than ``limit``."""
        ...

    async def readers(self, space: Space) -> Readers:
        """Return who may view a space."""
        ...

    async def restriction(self, id_: str) -> Readers:
        """Return whom a content's own view restriction admits; an empty result means that it has none."""
        ...

    async def restrictions(
        self, space: Space, position: Position | None
    ) -> tuple[Mapping[str, Readers | None], Position | None]:
        """Return some ids in a space that have view restrictions of their own, with whom these admit (None: that has to
        be requested), and the next position."""
        ...

    async def members(self, group: str) -> Sequence[Person]: ...

    async def people(self, ids: Sequence[str], *, fresh: bool = False) -> Mapping[str, Person]:
        """Return people by id, without those who are unknown. With ``fresh`` nothing is taken from a cache, which
        decisions about access require."""
        ...


def space_tag(key: str) -> str:
    return f"space:{key}"


def group_tag(group: str) -> str:
    return f"group:{group}"


def restriction_tag(content: str) -> str:
    return f"restriction:{content}"


def parse_time(modified_at: str) -> datetime:
    """Parse an ISO 8601 time; without a zone it is taken as UTC. Raises ValueError."""
    time = datetime.fromisoformat(modified_at)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def comments_digest(comments: Sequence[Comment]) -> str:
    """Return a digest that changes when a comment is added, edited or removed, which leaves the page's version as it
    is. Empty without comments."""
    if not comments:
        return ""
    text = ",".join(sorted(f"{comment.id}:{comment.version_number}" for comment in comments))
    return f"+{len(comments)}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def labels_digest(labels: Sequence[str]) -> str:
    """Return a digest of the labels. Empty without labels."""
    return f"#{hashlib.sha256(json.dumps(labels).encode()).hexdigest()[:16]}" if labels else ""


_OPAQUE_TYPES = ("image/", "video/", "audio/", "font/", "application/vnd.atlassian")
_OPAQUE_ENDINGS = TEXTLESS_ENDINGS | frozenset(("drawio", "fig", "gliffy", "sketch", "svg", "tmp", "vsd", "vsdx"))


def _is_opaque(title: str, media_type: str) -> bool:
    ending = title.rpartition(".")[2].lower() if "." in title else ""
    return media_type.lower().startswith(_OPAQUE_TYPES) or ending in _OPAQUE_ENDINGS or title.startswith("~")


@dataclass(slots=True)
class NameCache:
    """Display names by person id, cached until the process ends: nothing about access depends on them."""

    known: dict[str, str] = field(default_factory=dict)
    limit: int = 20_000

    def add(self, people: Mapping[str, Person]) -> None:
        if len(self.known) > self.limit:
            self.known.clear()
        self.known |= {id_: person.name for id_, person in people.items() if person.name}
